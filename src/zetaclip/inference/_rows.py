"""New records, from wherever they are, as the rows that a network takes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.frames import is_frame, table_of
from ..data.inputs import ImageInput, Input, TableInput
from ..errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


def prepared(
    source: Input, rows: Any, broken: dict[Path, str] | None = None
) -> tuple[Tensor, list[str] | None]:
    """New records as rows of ``x``.

    Args:
        source: How the training records were prepared.
        rows: The records; see ``Run.predict``.
        broken: Gets the picture files that can't be read, which are then left out. None makes
            such a file an error.

    Returns:
        The rows, and the names of the picture files, if it was files.

    Raises:
        InputError: The records can't be read, or don't fit.
    """
    if isinstance(source, TableInput):
        return _table(source, rows), None
    return _pictures(source, rows, broken)


def _table(source: TableInput, rows: Any) -> Tensor:
    if isinstance(rows, (str, os.PathLike)):
        from ..data.reading import read_table

        path = _existing(rows)
        if path.is_dir():
            raise InputError(f"{path} is a folder, and the run was trained on a table")
        return source.prepare(*read_table(path, fewest=1))
    if is_frame(rows) or not hasattr(rows, "shape"):
        table, lines = table_of(rows)
    else:
        array = np.asarray(rows)
        names = [column.name for column in source.columns]
        if array.ndim != 2 or array.shape[1] != len(names):
            raise InputError(
                f"an array of shape {array.shape} was given; the run takes the {len(names)} columns"
                f" {', '.join(names[:20])}, in this order"
            )
        table, lines = table_of({name: array[:, i].tolist() for i, name in enumerate(names)})
    if not lines:
        raise InputError("the table has no rows")
    return source.prepare(table, lines)


def _pictures(
    source: ImageInput, rows: Any, broken: dict[Path, str] | None
) -> tuple[Tensor, list[str] | None]:
    if isinstance(rows, (str, os.PathLike)):
        from ..data.pictures import picture_files

        path = _existing(rows)
        files = picture_files(path) if path.is_dir() else [path]
        if not files:
            raise InputError(f"{path} has no pictures")
        top = path if path.is_dir() else path.parent
        x = _decoded(source, files, broken)
        kept = [str(file.relative_to(top)) for file in files if not broken or file not in broken]
        return x, kept
    if isinstance(rows, Sequence) and rows and isinstance(rows[0], (str, os.PathLike)):
        files = [_existing(row) for row in rows]
        x = _decoded(source, files, broken)
        return x, [str(file) for file in files if not broken or file not in broken]
    if is_frame(rows) or isinstance(rows, Mapping):
        raise InputError("a table was given, and the run was trained on pictures")
    pixels = np.asarray(rows)
    if pixels.ndim < 3 or not len(pixels):
        raise InputError(f"pictures are an array (n, channels, height, width), not {pixels.shape}")
    return source.prepare(pixels), None


def _decoded(source: ImageInput, files: Sequence[Path], broken: dict[Path, str] | None) -> Tensor:
    from ..data.pictures import decode_pictures

    pixels = decode_pictures(files, source.shape, broken)
    if broken:
        if len(broken) == len(files):
            raise InputError(next(iter(broken.values())))
        pixels = pixels[[file not in broken for file in files]]
    return source.prepare(pixels, white=255.0)


def _existing(name: str | os.PathLike[str]) -> Path:
    path = Path(name).expanduser()
    if not path.exists():
        raise InputError(f"{path} does not exist")
    return path
