"""Files that are replaced whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replace_file(path: str | os.PathLike[str], mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A file that takes the place of ``path`` when the block ends well; otherwise the old one stays.

    It is created with its mode (less the umask), so at no moment can anybody read it who shouldn't.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # one left by a killed process would keep its own mode
    try:
        with open(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
