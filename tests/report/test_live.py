"""The live page: who may ask, what is answered, and how often work is done for it."""

import http.client
import itertools
import json
import os
import socket
import urllib.parse
from contextlib import contextmanager

import pytest
from fake_runs import append, dump, invented, status

from zetaclip.errors import CommandError
from zetaclip.report.live import BUDGET, Source, pace, serve
from zetaclip.report.page import WAIT


@pytest.fixture
def run(tmp_path):
    return invented(tmp_path / "run", state="running", ledger=False)


def ask(address, path="/data.json", method="GET", host=None, **headers):
    port = urllib.parse.urlsplit(address).port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    if host is not None:
        headers["Host"] = host
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def test_the_page_and_its_data(run):
    with serve([run]) as address:
        code, headers, page = ask(address, "/")
        assert code == 200 and headers["Content-Type"].startswith("text/html")
        assert b"connect-src 'self'" in page and b"Running, at step 120 of 120" in page
        code, headers, data = ask(address)
        fresh = json.loads(data)
        assert (
            code == 200
            and "main" in fresh
            and len(fresh["figures"]["epsilon"]["data"][0]["x"]) == 12
        )
        shape = urllib.parse.quote(fresh["shape"])
        assert "main" not in json.loads(ask(address, **{"X-Shape": shape})[2])
        code, more, body = ask(address, **{"If-None-Match": headers["ETag"]})
        assert (code, body) == (304, b"") and float(more["X-Wait"]) >= WAIT


@pytest.mark.parametrize(
    "path",
    [
        "/config.json",
        "/../run/config.json",
        "/%2e%2e/config.json",
        "/data.json/",
        "/index.html",
        "/private/",
    ],
)
def test_nothing_else_is_served(run, path):
    with serve([run]) as address:
        code, _, body = ask(address, path)
        assert code == 404 and b"digits" not in body


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1", "evil.example:{port}", "127.0.0.1:1", ""]
)
def test_a_foreign_host_name_is_refused(run, host):
    with serve([run]) as address:
        code, _, body = ask(address, host=host.format(port=urllib.parse.urlsplit(address).port))
        assert code == 403 and b"epsilon" not in body
        assert ask(address, host=f"localhost:{urllib.parse.urlsplit(address).port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_only_get(run, method):
    with serve([run]) as address:
        assert ask(address, method=method)[0] == 501


def test_other_pages_may_not_use_it(run):
    with serve([run]) as address:
        _, headers, _ = ask(address, Origin="http://evil.example")
        assert not any(name.lower().startswith("access-control") for name in headers)
        assert (
            headers["Cross-Origin-Resource-Policy"] == "same-origin"
            and headers["X-Frame-Options"] == "DENY"
        )


def test_only_this_machine_can_connect(run):
    with serve([run]) as address:
        port = urllib.parse.urlsplit(address).port
        with contextmanager(_taken)("127.0.0.1", port) as taken:
            assert taken
        # were it bound to every address, this one would be taken too
        with contextmanager(_taken)("127.0.0.2", port) as taken:
            assert not taken


def _taken(host, port):
    with socket.socket() as other:
        try:
            other.bind((host, port))
            yield False
        except OSError:
            yield True


def test_nothing_is_written(run):
    def look():
        return {
            entry.name: (entry.stat().st_mtime_ns, entry.stat().st_size)
            for entry in os.scandir(run)
        }

    before = look()
    with serve([run]) as address:
        ask(address, "/")
        ask(address)
    assert look() == before


def test_the_server_ends_with_its_block(run):
    with serve([run]) as address:
        port = urllib.parse.urlsplit(address).port
    with pytest.raises(ConnectionRefusedError):
        ask(address)
    with serve([run], port) as again:
        assert again == address
        with pytest.raises(CommandError, match="can't listen"), serve([run], port):
            pass


class Clock:
    now, worked = 0.0, 0.0


def source(folders, clock, cost=0.0):
    calls = itertools.count()

    def work():
        clock.worked += cost * (next(calls) % 2)  # asked before and after each look
        return clock.worked

    return Source(folders, lambda: clock.now, work)


def test_work_is_done_once_per_pace_however_many_ask(run):
    clock = Clock()
    pages = source([run], clock)
    for _ in range(50):
        pages.newest()
    assert pages.builds == 1
    append(run / "metrics.jsonl", {"epoch": 13, "step": 130, "metric": 0.5, "accuracy": 0.5})
    pages.newest()
    assert pages.builds == 1
    clock.now += WAIT
    pages.newest()
    assert pages.builds == 2
    clock.now += 100 * WAIT
    pages.newest()
    assert pages.builds == 2  # nothing new: nothing built


@pytest.mark.parametrize("cost", [0.001, 0.1, 3.0])
def test_the_pace_keeps_the_work_below_one_per_cent(run, cost):
    assert cost / pace(cost) <= BUDGET < 0.01
    clock = Clock()
    pages = source([run], clock, cost)
    while clock.now < 1000 * WAIT:
        clock.now += pages.newest()[1]
    assert clock.worked / clock.now < 0.01


def test_a_run_that_dies_is_shown_as_stopped_with_how_to_resume(run):
    clock = Clock()
    pages = source([run], clock)
    assert b"The run stopped" not in pages.newest()[0].data
    alive = json.loads((run / "status.json").read_text())
    dump(
        run / "status.json",
        status("running", 60, 120) | {"pid": 2**22 + 1, "updated": alive["updated"]},
    )
    clock.now += 1000
    data = pages.newest()[0].data.decode()
    assert "The run stopped at step 60 of 120." in data and "--out run --resume" in data


def test_a_folder_of_runs_shows_new_ones(tmp_path, run):
    clock = Clock()
    pages = source([tmp_path], clock)
    assert len(json.loads(pages.newest()[0].data)["figures"]["metric-accuracy"]["data"]) == 1
    invented(tmp_path / "second", seed=2, ledger=False)
    clock.now += 1000
    assert len(json.loads(pages.newest()[0].data)["figures"]["metric-accuracy"]["data"]) == 2


def test_folders_that_vanish(tmp_path, run):
    with serve([tmp_path]) as address:
        assert ask(address)[0] == 200
        run.rename(tmp_path.parent / f"{tmp_path.name}-gone")
        assert ask(address)[0] == 200  # the last page stands until it is time to look again
    with pytest.raises(CommandError, match="holds no run"):
        Source([tmp_path])
