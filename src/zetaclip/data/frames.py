"""Tables in memory as text: pandas or polars frames, mappings of columns, lists of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InputError
from .written import Plain

Table = dict[str, list[str]]


def is_frame(source: Any) -> bool:
    """Whether it is a pandas or polars DataFrame, or behaves like one."""
    return (
        hasattr(source, "columns") and hasattr(source, "__getitem__") and hasattr(source, "shape")
    )


def table_of(source: Any) -> tuple[Table, list[int]]:
    """A table in memory as ``reading.read_table`` would give it.

    Args:
        source: A DataFrame, a mapping of columns, or a list of mappings, one per row.

    Returns:
        The fields by column as text, empty where a value is missing, and the number of each row
        from 1.

    Raises:
        InputError: It is something else, or its columns don't fit together.

    **Edge cases.** A float that is a whole number is written as one, because a column of whole
    numbers with a missing value is one of floats in pandas. The index of a DataFrame is not used.
    Spaces around the name of a column are left out, as in a file.
    """
    read: dict[Any, Any]
    if is_frame(source):
        read = {name: source[name] for name in source.columns}
        names = [str(name).strip() for name in source.columns]
    elif isinstance(source, Mapping):
        read = dict(source)
        names = [str(name).strip() for name in read]
    elif isinstance(source, Sequence) and source and all(isinstance(r, Mapping) for r in source):
        read = {name: [row.get(name) for row in source] for name in _keys(source)}
        names = [str(name).strip() for name in read]
    else:
        raise InputError(
            "a table is a DataFrame, a mapping of columns, or a list of mappings, one per row, not"
            f" {type(source).__name__}"
        )
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise InputError(f"two columns of the table are called {twice[0]!r}")
    columns = dict(zip(names, read.values(), strict=True))
    table = {
        name: [as_text(value) for value in _listed(column)] for name, column in columns.items()
    }
    lengths = {len(column) for column in table.values()}
    if len(lengths) > 1:
        raise InputError(f"the columns of the table have different lengths: {sorted(lengths)}")
    return table, list(range(1, max(lengths, default=0) + 1))


def _keys(rows: Sequence[Mapping[Any, Any]]) -> list[Any]:
    """The keys of all rows, in the order in which they come first."""
    return list(dict.fromkeys(name for row in rows for name in row))


def as_text(value: Any) -> str:
    """A value as it would be written in a CSV; empty if it is missing."""
    if value is None or value is getattr(_pandas(), "NA", None):
        return ""
    if isinstance(value, (float, np.floating)):
        number = float(value)
        if math.isnan(number):
            return ""
        whole = number.is_integer() and abs(number) < 2**53
        return Plain(int(number) if whole else repr(number))
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return Plain(value)
    if hasattr(value, "isoformat"):
        text: str = value.isoformat(sep=" ") if hasattr(value, "hour") else value.isoformat()
        return "" if text == "NaT" else text
    return str(value)


def _listed(column: Any) -> list[Any]:
    return list(column.to_list() if hasattr(column, "to_list") else column)


def _pandas() -> Any:
    """pandas, if somebody has imported it already."""
    import sys

    return sys.modules.get("pandas")
