"""The first sheet of an .xlsx file, without a further dependency."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import InputError

_MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"


def sheet(path: Path) -> list[list[str]]:
    """The first sheet of an .xlsx file as text."""
    try:
        with zipfile.ZipFile(path) as archive:
            shared = [
                "".join(text.text or "" for text in item.iter(f"{_MAIN}t"))
                for item in ElementTree.fromstring(archive.read("xl/sharedStrings.xml")).iter(
                    f"{_MAIN}si"
                )
            ]
            first = ElementTree.fromstring(archive.read("xl/worksheets/sheet1.xml"))
    except (OSError, KeyError, zipfile.BadZipFile, ElementTree.ParseError) as error:
        raise InputError(f"cannot read {path} as an .xlsx table: {error}") from error
    rows = [dict(_cells(row, shared)) for row in first.iter(f"{_MAIN}row")]
    width = max((column for row in rows for column in row), default=-1) + 1
    if not width:
        raise InputError(f"{path} is empty")
    return [[row.get(column, "") for column in range(width)] for row in rows]


def _cells(row: ElementTree.Element, shared: list[str]) -> Iterator[tuple[int, str]]:
    for cell in row.iter(f"{_MAIN}c"):
        letters = re.match(r"[A-Z]+", cell.get("r", ""))
        value = cell.find(f"{_MAIN}v")
        if letters is None or value is None or value.text is None:
            continue
        column = 0
        for letter in letters.group():
            column = 26 * column + ord(letter) - ord("A") + 1
        yield column - 1, (shared[int(value.text)] if cell.get("t") == "s" else value.text)
