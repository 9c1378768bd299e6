"""A headless Chromium driven by its DevTools protocol; enough to look at a page as a reader
would."""

import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

# Debian's name first; ZETACLIP_CHROMIUM names another.
CANDIDATES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium():
    named = os.environ.get("ZETACLIP_CHROMIUM")
    return named or next((path for name in CANDIDATES if (path := shutil.which(name))), None)


needs_chromium = pytest.mark.skipif(
    find_chromium() is None, reason="no chromium on this machine (apt-get install chromium)"
)


class Browser:
    """One tab. ``open`` waits for the page to load, ``js`` runs an expression and returns its
    value."""

    def __init__(self, process, address, folder):
        import websocket

        self._process, self._folder = process, folder
        self._numbers = itertools.count(1)
        self.console, self.requests = [], []
        with urllib.request.urlopen(f"http://{address}/json/list") as answer:
            pages = json.load(answer)
        target = next(page for page in pages if page["type"] == "page")
        self._socket = websocket.create_connection(
            target["webSocketDebuggerUrl"], timeout=120, suppress_origin=True, max_size=None
        )
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message)

    def _note(self, message):
        kind, params = message.get("method"), message.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.console.append(json.dumps(params["exceptionDetails"])[:500])
        elif kind == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.console.append(json.dumps(params["args"])[:500])
        elif kind == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.console.append(params["entry"]["text"])
        elif kind == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def size(self, width, height=900, mobile=False):
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def media(self, scheme="light", kind=""):
        self.send(
            "Emulation.setEmulatedMedia",
            media=kind,
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def visit(self, page, width=1280):
        """As ``open``, unless it is there already; in light colours."""
        self.media("light")
        self.size(width, mobile=width < 500)
        if self.js("location.href") != page.resolve().as_uri() or self.js("innerWidth") != width:
            self.open(page)

    def open(self, address, until="document.querySelectorAll('figure:not(.drawn)').length === 0"):
        self.send(
            "Page.navigate", url="about:blank"
        )  # what the last page still says is not this one's
        self.wait("location.href === 'about:blank'")
        self.console.clear()
        self.requests.clear()
        if isinstance(address, Path):
            address = address.resolve().as_uri()
        self.send("Page.navigate", url=address)
        self.wait(
            f"location.href !== 'about:blank' && document.readyState === 'complete' && ({until})"
        )

    def js(self, expression):
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression, seconds=90):
        """Until the expression is true. Polls: there is nothing to be told of a change in a
        page."""
        end = time.monotonic() + seconds
        while not self.js(expression):
            assert time.monotonic() < end, (
                f"still not so after {seconds} s: {expression}; console: {self.console}"
            )
            time.sleep(0.05)

    def mouse(self, kind, x, y, **more):
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x, y):
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def picture(self, path, whole=True):
        box = self.js(
            "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
        )
        clip = {"x": 0, "y": 0, "width": box[0], "height": box[1], "scale": 1}
        more = {"clip": clip, "captureBeyondViewport": True} if whole else {}
        Path(path).write_bytes(
            base64.b64decode(self.send("Page.captureScreenshot", format="png", **more)["data"])
        )

    def pdf(self):
        answer = self.send(
            "Page.printToPDF", printBackground=False, paperWidth=8.27, paperHeight=11.69
        )
        return base64.b64decode(answer["data"])

    def close(self):
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        shutil.rmtree(self._folder, ignore_errors=True)


def start():
    """A browser in a process group of its own, with a fresh profile and no network of its own."""
    folder = tempfile.mkdtemp(prefix="zetaclip-chromium-")
    command = [
        find_chromium(),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--hide-scrollbars",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "about:blank",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=folder,
    )
    ready = Path(folder) / "DevToolsActivePort"
    end = time.monotonic() + 90
    while not (ready.exists() and "\n" in ready.read_text()):
        assert process.poll() is None, "chromium ended at once"
        assert time.monotonic() < end, "chromium did not start"
        time.sleep(0.05)
    return Browser(process, f"127.0.0.1:{ready.read_text().splitlines()[0]}", folder)
