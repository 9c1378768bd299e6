"""The page of runs in progress, served to a browser on this machine.

The server reads run folders and writes nothing. It works only when a browser asks, and tells the
browser how long to wait, so that its own work stays below one per cent of one core.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..errors import CommandError
from .page import WAIT, Page, main, payload, render, shape
from .read import Follower, unique_names
from .runs import page_for

ADDRESS = "127.0.0.1"

# The share of one core that answering may take.
BUDGET = 0.008


def pace(cost: float) -> float:
    """Seconds until the next answer may be built, if this one took ``cost`` seconds of CPU time."""
    return max(WAIT, cost / BUDGET)


@dataclass(frozen=True)
class Answer:
    """The newest page, its data as sent, and a tag that changes with the data."""

    page: Page
    data: bytes
    tag: str


class Source:
    """Builds the page of some folders, at most once per ``pace`` however many browsers ask.

    Args:
        folders: Run folders, or folders that contain some.
        clock: The time in seconds.
        work: The CPU time of this thread in seconds.
    """

    def __init__(
        self,
        folders: Sequence[str | os.PathLike[str]],
        clock: Callable[[], float] = time.monotonic,
        work: Callable[[], float] = time.thread_time,
    ) -> None:
        self._roots = [Path(folder) for folder in folders]
        self._followers: dict[Path, Follower] = {}
        self._clock, self._work = clock, work
        self._lock = threading.Lock()
        self._next = -1.0
        self._stamp: Any = None
        self._answer: Answer | None = None
        self.wait = WAIT
        self.builds = 0
        self._follow()

    def _follow(self) -> list[Follower]:
        """The runs that exist now; a folder of runs may have got new ones."""
        paths: dict[Path, None] = {}
        for root in self._roots:
            inside = [root] if (root / "config.json").exists() else _inside(root)
            paths |= dict.fromkeys(inside)
        if not paths:
            Follower(self._roots[0])  # raises an error that says what is wrong with the folder
            raise CommandError(f"no runs in {', '.join(map(str, self._roots))} any more")
        kept = {path: self._followers.get(path) or Follower(path) for path in paths}
        for follower, name in zip(kept.values(), unique_names(list(kept))):
            follower.name = name
        self._followers = kept
        return list(kept.values())

    def newest(self) -> tuple[Answer, float]:
        """The answer, and the seconds until it is worth asking again."""
        with self._lock:
            now = self._clock()
            if self._answer is None or now >= self._next:
                begun = self._work()
                self._answer = self._renewed()
                self.wait = pace(self._work() - begun)
                self._next = now + self.wait
            return self._answer, self.wait

    def whole(self, answer: Answer) -> bytes:
        """The data with the HTML of the whole page, for a browser that shows other charts.

        Building it takes time too, so it is paced.
        """
        with self._lock:
            begun = self._work()
            data = to_bytes(payload(answer.page) | {"main": main(answer.page, stills=False)})
            self._next += (self._work() - begun) / BUDGET
            return data

    def _renewed(self) -> Answer:
        followers = self._follow()
        # A run that dies changes no file, so its state is a part of the stamp.
        stamp = [(follower.name, follower.stamp(), follower.state()) for follower in followers]
        if self._answer is not None and stamp == self._stamp:
            return self._answer
        page = page_for([follower.read() for follower in followers], live=True)
        self._stamp = stamp
        self.builds += 1
        tag = hashlib.sha256(repr(stamp).encode("utf-8", "replace")).hexdigest()[:32]
        return Answer(page, to_bytes(payload(page)), f'"{tag}"')


def to_bytes(value: dict[str, Any]) -> bytes:
    """The value as JSON in UTF-8."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False).encode("utf-8", "replace")


def _inside(root: Path) -> list[Path]:
    try:
        return sorted(child for child in root.iterdir() if (child / "config.json").exists())
    except OSError:
        return []


class _Handler(BaseHTTPRequestHandler):
    """Answers GET / and GET /data.json at the printed address, and refuses everything else."""

    server: _Server
    server_version, sys_version = "zetaclip", ""
    timeout = 20

    def do_GET(self) -> None:
        """Answers one request."""
        # DNS rebinding: a foreign page whose name resolves to 127.0.0.1 still sends its own name.
        if self.headers.get("Host", "") not in self.server.hosts:
            self._answer(
                HTTPStatus.FORBIDDEN, b"open the address that zetaclip printed\n", "text/plain"
            )
            return
        target = urllib.parse.urlsplit(self.path).path
        if target not in ("/", "/data.json"):
            self._answer(HTTPStatus.NOT_FOUND, b"there is only / and /data.json\n", "text/plain")
            return
        try:
            answer, wait = self.server.source.newest()
        except CommandError as error:
            self._answer(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{error}\n".encode("utf-8", "replace"),
                "text/plain",
            )
            return
        more = {"ETag": answer.tag, "X-Wait": f"{wait:.3f}"}
        if target == "/":
            self._answer(
                HTTPStatus.OK,
                render(answer.page, live=True).encode("utf-8", "replace"),
                "text/html",
            )
        elif self.headers.get("If-None-Match") == answer.tag:
            self._answer(HTTPStatus.NOT_MODIFIED, b"", "application/json", more)
        elif urllib.parse.unquote(self.headers.get("X-Shape", "")) != shape(answer.page):
            self._answer(HTTPStatus.OK, self.server.source.whole(answer), "application/json", more)
        else:
            self._answer(HTTPStatus.OK, answer.data, "application/json", more)

    def _answer(
        self, status: HTTPStatus, body: bytes, kind: str, more: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }
        for name, value in (headers | (more or {})).items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):  # the browser closed the connection
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing: the terminal shows the run's progress."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = False

    def __init__(self, port: int, source: Source) -> None:
        super().__init__((ADDRESS, port), _Handler)
        self.source = source
        self.hosts = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints errors, except those of a browser that closed the connection."""
        import sys

        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


@contextmanager
def serve(folders: Sequence[str | os.PathLike[str]], port: int = 0) -> Iterator[str]:
    """Serves the page of these folders while the block runs.

    Args:
        folders: Run folders (with a config.json), or folders that contain some. New runs show up by
            themselves.
        port: The port; 0 takes a free one.

    Yields:
        The address of the page.

    Raises:
        CommandError: There is no run, or the port can't be used.

    **Guarantee.** It listens on 127.0.0.1 only, serves nothing but the page and its data, and
    writes nothing. After the page was first opened, answering takes less than one per cent of one
    core.
    """
    source = Source(folders)
    try:
        server = _Server(port, source)
    except (OSError, OverflowError) as error:
        raise CommandError(
            f"can't listen on port {port}: {error}; leave --port out for a free one"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="zetaclip-watch", daemon=True)
    thread.start()
    try:
        yield f"http://{ADDRESS}:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
