"""Downloads that can be cut off: resumed where they stopped, checked, and put in place whole.

Guarantee: a file under its final name is complete and has the expected digest. What was downloaded so far stands beside it
with ``.part`` added; a wrong digest deletes it.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from filelock import lock_descriptor

from ..errors import InputError
from ..files import replace_file
from .sources import BY_HAND, SOURCES, Source

_CHUNK = 1 << 18
_TIMEOUT = 60.0

# Told after every chunk: the file's name, bytes so far, bytes in all (0 if the server doesn't say).
Progress = Callable[[str, int, int], None]


def fetch(
    name: str,
    root: Path,
    progress: Progress | None = None,
    *,
    sources: Sequence[Source] | None = None,
) -> list[Path]:
    """Downloads what is missing of a set into ``root``; returns its files. Files that are there and right stay.

    Edge cases: a cut connection is tried again from where it stopped, five times; a wrong digest, a full disk, a
    folder that can't be written and a second download of the same file at the same time are errors.
    """
    if sources is None:
        if name not in SOURCES:
            raise InputError(
                BY_HAND.get(name, f"{name} can't be fetched; these can: {', '.join(SOURCES)}")
            )
        sources = SOURCES[name]
    files: list[Path] = []
    for source in sources:
        try:
            files += (
                _archive(source, root, progress)
                if source.members
                else [_plain(source, root, progress)]
            )
        except OSError as error:
            raise InputError(
                f"cannot store {name} under {root}: {error}. Name another folder with --data-root"
            ) from error
    return files


def digest_of(path: Path, kind: str) -> str:
    """The hexadecimal digest of a file; ``kind`` is md5, sha1 or sha256."""
    digest = hashlib.new(kind, usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _matches(path: Path, digest: str) -> bool:
    kind, _, wanted = digest.partition(":")
    return path.is_file() and (not digest or digest_of(path, kind) == wanted)


def _plain(source: Source, root: Path, progress: Progress | None) -> Path:
    target = root / source.path
    if not _matches(target, source.digest):
        download(source.url, target, source.digest, progress)
    return target


def _archive(source: Source, root: Path, progress: Progress | None) -> list[Path]:
    """The members, each put in place whole; the archive is deleted when all are there."""
    targets = [root / path for _, path, _ in source.members]
    if all(_matches(root / path, digest) for _, path, digest in source.members):
        return targets
    archive = _plain(source, root, progress)
    try:
        with _opened(archive) as read:
            for member, path, digest in source.members:
                target = root / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with read(member) as inside, replace_file(target) as file:
                    shutil.copyfileobj(inside, file, _CHUNK)
                if not _matches(target, digest):
                    target.unlink()
                    raise InputError(
                        f"{member} of {archive} has not the digest that is published for it"
                    )
    except (KeyError, tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise InputError(f"cannot unpack {archive}: {error}") from error
    archive.unlink()
    return targets


@contextmanager
def _opened(archive: Path) -> Iterator[Callable[[str], IO[bytes]]]:
    """A function that opens one member by its exact name; nothing else of the archive is written anywhere."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as zipped:
            yield lambda member: zipped.open(member)
        return
    with tarfile.open(archive) as tarred:

        def read(member: str) -> IO[bytes]:
            inside = tarred.extractfile(member)
            if inside is None:
                raise KeyError(f"{member} is not a file")
            return inside

        yield read


def download(
    url: str,
    target: Path,
    digest: str,
    progress: Progress | None = None,
    *,
    attempts: int = 5,
    pause: float = 1.0,
    timeout: float = _TIMEOUT,
) -> None:
    """One file, whole and checked, or none. ``pause`` seconds, doubled each time, lie between two attempts."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    with _locked(part) as file:
        trouble = None
        for attempt in range(attempts):
            if attempt:
                time.sleep(pause * 2 ** (attempt - 1))
            trouble = _continue(url, file, target.name, progress, timeout)
            if trouble is None:
                break
        if trouble is not None:
            raise InputError(
                f"{url} could not be downloaded: {trouble}. What came so far is kept; the next fetch goes on from there"
            )
        file.flush()
        os.fsync(file.fileno())
        kind, _, wanted = digest.partition(":")
        found = digest_of(part, kind)
        if found != wanted:
            part.unlink()
            raise InputError(
                f"{url} has the {kind} {found}, but {wanted} is published; nothing was kept"
            )
        os.replace(part, target)


@contextmanager
def _locked(part: Path) -> Iterator[IO[bytes]]:
    """The unfinished file, open for appending by this process alone; an empty one is not left behind."""
    with open(part, "ab") as file:
        ours = (
            lock_descriptor(file.fileno(), blocking=False)
            and part.exists()
            and os.path.samestat(os.fstat(file.fileno()), part.stat())
        )
        if not ours:  # or it was finished, and renamed, between our opening and our locking it
            raise InputError(
                f"{part.name.removesuffix('.part')} is being downloaded by another process"
            )
        try:
            yield file
        finally:
            file.flush()
            if part.exists() and part.stat().st_size == 0:
                part.unlink()


def _continue(
    url: str, file: IO[bytes], name: str, progress: Progress | None, timeout: float
) -> str | None:
    """Appends what is missing; returns what went wrong if it may go better the next time."""
    have = file.seek(0, os.SEEK_END)
    request = urllib.request.Request(url, headers={"User-Agent": "zetaclip"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            if answer.status != 206 or not answer.headers.get("Content-Range", "").startswith(
                f"bytes {have}-"
            ):
                file.truncate(0)  # the server starts over
                have = 0
            length = answer.headers.get("Content-Length")
            total = have + int(length) if length else 0
            while chunk := answer.read(_CHUNK):
                file.write(chunk)
                have += len(chunk)
                if progress is not None:
                    progress(name, have, total)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing lies beyond what we have: it is whole, or of another file
            length = error.headers.get("Content-Range", "").rpartition("/")[2]
            if length == str(have):
                return None
            file.truncate(0)
            return "the server has another file than the one begun"
        if error.code in (408, 429) or error.code >= 500:
            return f"the server answers {error.code}"
        raise InputError(f"{url}: the server answers {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    return f"the connection was cut at {have} of {total} bytes" if total and have < total else None
