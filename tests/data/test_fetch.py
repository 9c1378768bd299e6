"""Downloads against a server on this machine that cuts connections, lies and forgets."""

import hashlib
import io
import re
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from zetaclip.cli import main
from zetaclip.data import fetch as fetching
from zetaclip.data.fetch import download, fetch
from zetaclip.data.registry import names
from zetaclip.data.sources import BY_HAND, SOURCES, Source
from zetaclip.errors import InputError

BODY = bytes(range(256)) * 1000
SHA = "sha256:" + hashlib.sha256(BODY).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Serves ``server.files``; ``server.plan`` is a list of what to do wrong, one entry a
    request."""

    def do_GET(self):
        self.server.asked.append((self.path, self.headers.get("Range")))
        plan = self.server.plan.pop(0) if self.server.plan else ""
        body = self.server.files.get(self.path)
        if body is None or plan.isdigit():
            self.send_error(int(plan or 404))
            return
        start = 0
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if wanted and plan != "no ranges":
            start = int(wanted.group(1))
            if start >= len(body):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(body)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        rest = body[start:]
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest[: len(rest) // 2] if plan == "cut" else rest)
        self.close_connection = True

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        served.files, served.plan, served.asked = {"/file": BODY}, [], []
        served.url = f"http://127.0.0.1:{served.server_address[1]}"
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def get(server, target, digest=SHA, **options):
    download(f"{server.url}/file", target, digest, pause=0.0, **options)


def only(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_plain_download_with_progress(server, tmp_path):
    seen = []
    get(server, tmp_path / "sub" / "file", progress=lambda *state: seen.append(state))
    assert (tmp_path / "sub" / "file").read_bytes() == BODY and only(tmp_path / "sub") == ["file"]
    assert seen[-1] == ("file", len(BODY), len(BODY)) and seen == sorted(seen)


def test_a_cut_connection_goes_on_where_it_stopped(server, tmp_path):
    server.plan = ["cut", "cut", "503", ""]
    get(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    half, quarter = len(BODY) // 2, len(BODY) * 3 // 4
    assert [asked for _, asked in server.asked] == [
        None,
        f"bytes={half}-",
        f"bytes={quarter}-",
        f"bytes={quarter}-",
    ]


def test_what_came_is_kept_for_the_next_time(server, tmp_path):
    server.plan = ["cut"]
    with pytest.raises(
        InputError, match=r"ended at 128000 of 256000 bytes.*the next fetch continues from there"
    ):
        get(server, tmp_path / "file", attempts=1)
    assert only(tmp_path) == ["file.part"]  # nothing under the final name
    get(server, tmp_path / "file", attempts=1)
    assert server.asked[-1] == ("/file", "bytes=128000-")
    assert only(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == BODY


def test_a_server_without_ranges_starts_over(server, tmp_path):
    server.plan = ["cut", "no ranges"]
    get(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY


def test_a_part_that_is_whole_already(server, tmp_path):
    (tmp_path / "file.part").write_bytes(BODY)
    get(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY


def test_a_part_of_something_longer_is_thrown_away(server, tmp_path):
    (tmp_path / "file.part").write_bytes(BODY * 2)
    get(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY


def test_a_wrong_checksum_leaves_nothing_and_the_old_file_alone(server, tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    server.files["/file"] = BODY[:-1] + b"!"
    with pytest.raises(
        InputError, match=rf"has the sha256 \w+, but {SHA[7:]} is published; nothing was kept"
    ):
        get(server, tmp_path / "file")
    assert only(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == b"old"


def test_a_wrong_beginning_is_found_out_and_the_next_try_is_clean(server, tmp_path):
    (tmp_path / "file.part").write_bytes(b"?" * 1000)
    with pytest.raises(InputError, match="is published"):
        get(server, tmp_path / "file")
    get(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY


def test_refusals_are_not_tried_again(server, tmp_path):
    server.files.clear()
    with pytest.raises(InputError, match="the server answers 404"):
        get(server, tmp_path / "file")
    assert len(server.asked) == 1 and only(tmp_path) == []


def test_no_server_at_all(tmp_path):
    with pytest.raises(InputError, match="could not be downloaded"):
        download("http://127.0.0.1:9/file", tmp_path / "file", SHA, attempts=2, pause=0.0)
    assert only(tmp_path) == []


def test_two_at_once(server, tmp_path):
    with (
        fetching._locked(tmp_path / "file.part"),
        pytest.raises(InputError, match="by another process"),
    ):
        get(server, tmp_path / "file")


def packed(kind, members):
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, body in members.items():
                archive.writestr(name, body)
    else:
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for name, body in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(body)
                archive.addfile(info, io.BytesIO(body))
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_members_of_an_archive(server, tmp_path, kind):
    archive = packed(kind, {"top/a": b"first", "top/b": b"second", "../evil": b"x"})
    server.files["/x"] = archive
    digest = "md5:" + hashlib.md5(archive).hexdigest()
    sha1 = "sha1:" + hashlib.sha1(b"first").hexdigest()
    source = Source(
        f"{server.url}/x", f"x.{kind}", digest, (("top/a", "set/a", sha1), ("top/b", "set/b", ""))
    )
    root = tmp_path / "root"
    assert fetch("toy", root, sources=[source]) == [root / "set" / "a", root / "set" / "b"]
    assert (root / "set" / "b").read_bytes() == b"second"
    assert only(root) == ["set"] and only(tmp_path) == [
        "root"
    ]  # the archive is gone, and nothing else was unpacked
    fetch("toy", root, sources=[source])
    assert len(server.asked) == 1  # what is there and right is not fetched again
    (root / "set" / "a").write_bytes(b"damaged")
    fetch("toy", root, sources=[source])
    assert (root / "set" / "a").read_bytes() == b"first" and len(server.asked) == 2


def test_a_member_with_another_digest_or_missing(server, tmp_path):
    archive = packed("zip", {"a": b"first"})
    server.files["/x"] = archive
    digest = "md5:" + hashlib.md5(archive).hexdigest()
    wrong = Source(f"{server.url}/x", "x.zip", digest, (("a", "a", "sha1:" + "0" * 40),))
    with pytest.raises(InputError, match=r"a of .* does not have its published digest"):
        fetch("toy", tmp_path, sources=[wrong])
    assert not (tmp_path / "a").exists()
    lacking = Source(f"{server.url}/x", "x.zip", digest, (("b", "b", ""),))
    with pytest.raises(InputError, match="cannot unpack"):
        fetch("toy", tmp_path, sources=[lacking])


def test_a_folder_that_cannot_be_written(server, tmp_path):
    (tmp_path / "root").write_text("a file")
    with pytest.raises(InputError, match="cannot store toy under"):
        fetch("toy", tmp_path / "root", sources=[Source(f"{server.url}/file", "toy/file", SHA)])


def test_every_known_set_can_be_fetched_or_says_what_to_do():
    assert set(names()) == set(SOURCES) | set(BY_HAND)
    lengths = {"md5": 32, "sha1": 40, "sha256": 64}
    for source in (source for sources in SOURCES.values() for source in sources):
        digests = [source.digest, *(digest for _, _, digest in source.members if digest)]
        assert all(
            re.fullmatch(r"[0-9a-f]+", d.split(":")[1])
            and lengths[d.split(":")[0]] == len(d.split(":")[1])
            for d in digests
        )


def test_the_command_fetches_into_the_root_and_lists_it(server, tmp_path, monkeypatch, capsys):
    files = ("adult.data", "adult.test")
    for name in files:
        server.files[f"/{name}"] = BODY
    monkeypatch.setitem(
        SOURCES, "adult", tuple(Source(f"{server.url}/{n}", f"adult/{n}", SHA) for n in files)
    )
    assert main(["data", "fetch", "adult", "--data-root", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert (
        out.split() == [str(tmp_path / "adult" / n) for n in files]
        and "fetching adult.data (0.3 MB)" in err
    )
    assert main(["data", "list", "--data-root", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.split()[:4] == ["adult", "uci", "0.5", "MB"] and str(tmp_path) in line
        for line in lines
    )
    assert any(
        line.split() == ["mnist", "missing", "zetaclip", "data", "fetch", "mnist"] for line in lines
    )
    assert main(["data", "fetch", "imagenet100", "--data-root", str(tmp_path)]) == 2
    assert "registered users only" in capsys.readouterr().err


def test_the_command_writes_a_schema(tmp_path, capsys):
    path = tmp_path / "people.csv"
    path.write_text("age,income\n" + "".join(f"{i},{i % 2}\n" for i in range(12)))
    assert main(["data", "schema", str(path), "--target", "income"]) == 0
    assert 'target = "income"' in capsys.readouterr().out
    assert main(["data", "schema", str(path), "--target", "incom"]) == 2
    assert "Did you mean 'income'" in capsys.readouterr().err
