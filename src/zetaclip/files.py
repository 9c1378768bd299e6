"""Atomic replacement of files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replace_file(path: str | os.PathLike[str], mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Opens a file that replaces ``path`` when the block ends without an exception.

    After an exception the old file is unchanged. The new file is created with its final mode, so it
    is never readable to more users than it should be.

    Args:
        path: The file to replace or to create.
        mode: Permissions, before the umask is applied.

    Yields:
        The new file, open for writing bytes.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # a file left by a killed process would keep its old mode
    try:
        with open(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
