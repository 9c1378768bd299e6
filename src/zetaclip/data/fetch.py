"""Downloads that are resumed after an interruption, checked, and put in place atomically.

**Guarantee.** A file under its final name is complete and has the expected digest. An unfinished
download has ``.part`` added to its name; it is deleted if its digest is wrong.
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

# Called after every chunk with the file's name, bytes so far, and total bytes (0 if unknown).
Progress = Callable[[str, int, int], None]


def fetch(
    name: str,
    root: Path,
    progress: Progress | None = None,
    *,
    sources: Sequence[Source] | None = None,
) -> list[Path]:
    """Downloads the missing files of a set.

    Files that exist and have the right digest are not downloaded again.

    Args:
        name: A known set.
        root: The data root.
        progress: Called after every chunk.
        sources: Files to download, if not those of ``SOURCES``.

    Returns:
        The files of the set.

    Raises:
        InputError: The set cannot be downloaded by a program, the connection failed five times, a
            digest is wrong, the folder cannot be written, the disk is full, or another process
            downloads the same file.
    """
    if sources is None:
        if name not in SOURCES:
            raise InputError(
                BY_HAND.get(name, f"{name} cannot be fetched; these can: {', '.join(SOURCES)}")
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
    """Extracts the members atomically; the archive is deleted when all are extracted."""
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
                    raise InputError(f"{member} of {archive} does not have its published digest")
    except (KeyError, tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise InputError(f"cannot unpack {archive}: {error}") from error
    archive.unlink()
    return targets


@contextmanager
def _opened(archive: Path) -> Iterator[Callable[[str], IO[bytes]]]:
    """A function that opens one member by its exact name; nothing is extracted to disk."""
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
    """Downloads one file and checks it; if that fails, ``target`` is not created.

    Args:
        url: Address of the file.
        target: Where to put it.
        digest: Expected digest, "md5:...", "sha1:..." or "sha256:...".
        progress: Called after every chunk.
        attempts: How often to try; each attempt continues where the last one stopped.
        pause: Seconds between the first two attempts, doubled after each.
        timeout: Seconds without an answer after which an attempt fails.

    Raises:
        InputError: The download failed, has a wrong digest, or runs in another process.
    """
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
                f"{url} could not be downloaded: {trouble}. "
                "The part downloaded so far is kept; the next fetch continues from there"
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
    """The unfinished file, locked and open for appending; it is deleted at the end if empty."""
    with open(part, "ab") as file:
        ours = (
            lock_descriptor(file.fileno(), blocking=False)
            and part.exists()
            and os.path.samestat(os.fstat(file.fileno()), part.stat())
        )
        if not ours:  # also if it was finished and renamed between our open and our lock
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
    """Appends what is missing; returns an error message if another attempt may succeed."""
    have = file.seek(0, os.SEEK_END)
    request = urllib.request.Request(url, headers={"User-Agent": "zetaclip"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            if answer.status != 206 or not answer.headers.get("Content-Range", "").startswith(
                f"bytes {have}-"
            ):
                file.truncate(0)  # the server sends the file from the beginning
                have = 0
            length = answer.headers.get("Content-Length")
            total = have + int(length) if length else 0
            while chunk := answer.read(_CHUNK):
                file.write(chunk)
                have += len(chunk)
                if progress is not None:
                    progress(name, have, total)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # no bytes after ours: the file is complete, or another file
            length = error.headers.get("Content-Range", "").rpartition("/")[2]
            if length == str(have):
                return None
            file.truncate(0)
            return "the file on the server has changed since the download began"
        if error.code in (408, 429) or error.code >= 500:
            return f"the server answers {error.code}"
        raise InputError(f"{url}: the server answers {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    return f"the connection ended at {have} of {total} bytes" if total and have < total else None
