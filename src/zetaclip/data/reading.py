"""Reads tables as text: .csv, .csv.gz, .tsv, .txt and .parquet."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Sequence
from pathlib import Path

from ..errors import InputError
from .frames import as_text

FEWEST = 10  # records that a training needs
GUESSED = "cp1252"  # what spreadsheet programs on Windows write if they do not write UTF-8
_DELIMITERS = ",;\t|"


def read_table(
    path: Path, delimiter: str | None = None, fewest: int = FEWEST, encoding: str | None = None
) -> tuple[dict[str, list[str]], list[int]]:
    """Reads a table as text.

    Args:
        path: The file.
        delimiter: Field separator of a text file; guessed from the first line if not given.
        fewest: The least number of records.
        encoding: How letters are written in a text file; ``encoding_of`` if not given.

    Returns:
        The fields by column, and the line of each record.

    Raises:
        InputError: The file cannot be read, or has too few records.
    """
    names = _suffixes(path)
    if names.endswith((".parquet", ".pq")):
        table = _parquet(path)
        lines = list(range(1, len(next(iter(table.values()), [])) + 1))
    elif _is_text(path):
        table, lines = _csv(path, delimiter, encoding or encoding_of(path))
    else:
        sheet = names.endswith((".xlsx", ".xls", ".ods"))
        raise InputError(
            f"{path} is not a .csv, .csv.gz, .tsv, .txt or .parquet file"
            + ("; save the sheet as CSV first" if sheet else "")
        )
    check_size(lines, str(path), fewest)
    return table, lines


def encoding_of(path: Path) -> str:
    """How letters are written in a text file: UTF-8, UTF-16 with a mark, or else ``GUESSED``.

    Raises:
        InputError: The file cannot be read.
    """
    if not _is_text(path):
        return "utf-8-sig"
    content = _bytes(path)
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    try:
        content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return GUESSED
    return "utf-8-sig"


def check_size(lines: Sequence[int], where: str, fewest: int = FEWEST) -> None:
    """Refuses a table with too few records.

    Args:
        lines: The numbers of the lines that hold records.
        where: The table, for messages.
        fewest: How many there must be.

    Raises:
        InputError: It has fewer than ``fewest``.
    """
    if not lines:
        raise InputError(f"{where} has no records")
    if len(lines) < fewest:
        raise InputError(f"{where} has {len(lines)} records; at least {fewest} are needed")


def _suffixes(path: Path) -> str:
    return "".join(path.suffixes[-2:]).lower()


def _is_text(path: Path) -> bool:
    return _suffixes(path).endswith((".csv", ".csv.gz", ".tsv", ".txt"))


def _bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def _csv(
    path: Path, delimiter: str | None, encoding: str
) -> tuple[dict[str, list[str]], list[int]]:
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        text = _bytes(path).decode(encoding)
        first = text.partition("\n")[0]
        mark = delimiter or max(_DELIMITERS, key=first.count)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True)
        header = [name.strip() for name in next(reader, [])]
        _check_header(path, header)
        for row in reader:
            if not row:
                continue  # an empty line
            if len(row) != len(header):
                raise InputError(
                    f"{path}, line {reader.line_num}: {len(row)} fields, "
                    f"but the header has {len(header)}"
                )
            rows.append(row)
            lines.append(reader.line_num)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not text in {encoding}: save it as UTF-8, or name its encoding in the"
            ' schema, such as encoding = "cp1252"'
        ) from error
    except (csv.Error, TypeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    return {name: [row[i] for row in rows] for i, name in enumerate(header)}, lines


def _check_header(path: Path, header: Sequence[str]) -> None:
    if not any(header):
        raise InputError(f"{path} is empty: the first line must name the columns")
    for i, name in enumerate(header):
        if not name:
            raise InputError(
                f"{path}: column {i + 1} has no name. If it is a row number, name it, or write the"
                " file without it (in pandas: to_csv(..., index=False))"
            )
        if name in header[:i]:
            raise InputError(f"{path}: two columns are called {name!r}")


def _parquet(path: Path) -> dict[str, list[str]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(
            "reading .parquet needs pyarrow: pip install 'zetaclip[parquet]'"
        ) from error
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    _check_header(path, table.column_names)
    return {
        name: [as_text(value) for value in table.column(name).to_pylist()]
        for name in table.column_names
    }
