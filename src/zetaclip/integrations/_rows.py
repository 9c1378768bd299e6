"""The rows that an estimator gets, as numbers in [-1, 1], by declared constants."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..data.declared import read_schema
from ..data.frames import is_frame, table_of
from ..data.inputs import TableInput
from ..data.schema import columns_of
from ..errors import InputError

_PLAIN = "biuf"  # kinds of numpy types that are numbers
_TEXT = "text"  # the column of a list of strings


def declared(schema: Any) -> dict[str, Any]:
    """What a schema declares; empty without one.

    Raises:
        ValueError: The schema is wrong.
    """
    return {} if schema is None else read_schema(schema)


def has_words(X: Any) -> bool:
    """Whether a table has columns that are not numbers: words, or dates."""
    if is_frame(X):
        return any(_is_words(X[name]) for name in X.columns)
    dtype = getattr(X, "dtype", None)
    if dtype is not None:
        kind = getattr(dtype, "kind", "O")
        if kind in "US":
            return True
        return kind == "O" and np.ndim(X) in (1, 2) and _any_word(np.asarray(X).ravel())
    try:
        return any(isinstance(value, str) for row in X for value in row)
    except TypeError:
        return False


def _is_words(column: Any) -> bool:
    kind = getattr(getattr(column, "dtype", None), "kind", "O")
    if kind in _PLAIN:
        return False
    return kind == "M" or _any_word(column.to_list() if hasattr(column, "to_list") else column)


def _any_word(values: Any) -> bool:
    return any(isinstance(value, str) or hasattr(value, "isoformat") for value in values)


def as_texts(X: Any) -> list[str] | None:
    """The texts, if X is a list or an array of strings alone; else None."""
    if is_frame(X) or isinstance(X, str) or np.ndim(X) != 1:
        return None
    values = list(X)
    return values if values and all(isinstance(value, str) for value in values) else None


def as_table(X: Any) -> tuple[dict[str, list[str]], list[int]]:
    """Rows as text by column; the columns of an array are called x0, x1 and so on.

    A list of strings is one column, called text.

    Raises:
        ValueError: It is not a table.
    """
    if is_frame(X):
        return table_of(X)
    texts = as_texts(X)
    if texts is not None:
        return table_of({_TEXT: texts})
    array = np.asarray(X, dtype=object)
    if array.ndim != 2:
        raise ValueError(f"Expected 2D array, got {array.ndim}D array instead")
    return table_of({f"x{i}": array[:, i].tolist() for i in range(array.shape[1])})


def table_input(X: Any, columns: dict[str, Any]) -> tuple[TableInput, bool]:
    """How the rows of a table with words become numbers.

    Args:
        X: The rows.
        columns: The declared columns; empty if nothing is declared.

    Returns:
        The input, and whether something was inferred from the rows.

    Raises:
        InputError: The declarations don't fit, or no column is left.
    """
    if not columns and as_texts(X) is not None:
        columns = {_TEXT: {"type": "text"}}
    table, _ = as_table(X)
    used, ignored, found = columns_of(table, columns)
    if not used:
        raise InputError("no column is left to predict from")
    return TableInput(used, ignored), bool(found.inferred)
