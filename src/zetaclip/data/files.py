"""Reading idx files, and a cache for arrays that are slow to decode."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..errors import InputError
from ..files import replace_file

_IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def words(text: str) -> tuple[str, ...]:
    """A vocabulary written as one string."""
    return tuple(text.split())


def read_bytes(path: Path) -> bytes:
    """The content of a file, unpacked if its name ends in .gz.

    Raises:
        InputError: The file cannot be read.
    """
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def read_idx(path: Path) -> np.ndarray:
    """An array in MNIST's idx format.

    The format: two zero bytes, a type, the number of dimensions, the dimensions, the values.

    Raises:
        InputError: The file cannot be read, is not an idx file, or is damaged.
    """
    raw = read_bytes(path)
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _IDX_TYPES:
        raise InputError(f"{path} is not an idx file")
    dtype, rank = np.dtype(_IDX_TYPES[raw[2]]), raw[3]
    start = 4 + 4 * rank
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", rank, 4)) if len(raw) >= start else ()
    wanted = start + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not shape or len(raw) != wanted:
        raise InputError(f"{path} is truncated or damaged: {len(raw)} bytes instead of {wanted}")
    return np.frombuffer(raw, dtype, offset=start).reshape(shape)


def cache_folder() -> Path:
    """$ZETACLIP_CACHE, or the user's cache folder."""
    named = os.environ.get("ZETACLIP_CACHE")
    if named:
        return Path(named).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "zetaclip"


def cached(label: str, sources: Sequence[Path], decode: Callable[[], np.ndarray]) -> np.ndarray:
    """The result of ``decode``, from the cache if the same sources were decoded before.

    A cached file is a copy of the data, so only its owner can read it.

    Args:
        label: Name of the array. With each source's path, size and modification time it is the key.
        sources: The files that ``decode`` reads.
        decode: Computes the array.

    Returns:
        The array.

    **Edge cases.** If the cache cannot be written or a file in it is damaged, the array is decoded
    again.
    """
    key = hashlib.sha256(label.encode())
    for path in sources:
        stat = path.stat()
        key.update(f"\0{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    target = cache_folder() / f"{label}-{key.hexdigest()[:20]}.npy"
    try:
        return np.load(target, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        pass  # missing or damaged
    array = decode()
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replace_file(target, mode=0o600) as file:
            np.save(file, array)
    except OSError:
        pass  # disk full or no permission
    return array
