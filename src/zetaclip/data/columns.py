"""From columns of text to columns of numbers, by declared ranges and vocabularies only.

**Guarantee.** The encoding of a row depends on no other row, so preparing the data releases
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InputError

_MISSING = frozenset(("", "?", "na", "n/a", "nan", "null"))


@dataclass(frozen=True)
class Numeric:
    """A number with declared bounds: clipped to them and mapped to [-1, 1].

    A missing value becomes 0, the middle.

    Attributes:
        name: The column.
        low: Lower bound.
        high: Upper bound.
        log: Map log(1 + value - low) instead of the value.
        flag_missing: Add a column that is 1 where the value is missing.
    """

    name: str
    low: float
    high: float
    log: bool = False
    flag_missing: bool = False


@dataclass(frozen=True)
class Categorical:
    """A word from a declared vocabulary, as one-hot columns.

    A missing or unknown word is all zeros.

    Attributes:
        name: The column.
        values: The vocabulary.
    """

    name: str
    values: tuple[str, ...]


Column = Numeric | Categorical


def is_missing(text: str) -> bool:
    """Whether a field has no value: empty, ?, NA, N/A, NaN or null, in upper or lower case."""
    return text.strip().lower() in _MISSING


def encode(
    columns: Sequence[Column],
    table: Mapping[str, Sequence[str]],
    lines: Sequence[int] | None = None,
) -> np.ndarray:
    """Encodes a table.

    Args:
        columns: Encodings, in the order of the result.
        table: Fields as text, by column.
        lines: The line of each record in its file, for error messages.

    Returns:
        A float32 array, one row per record.

    Raises:
        InputError: A number is expected and the field is something else.
    """
    parts: list[np.ndarray] = []
    for column in columns:
        fields = table[column.name]
        if isinstance(column, Numeric):
            values = numbers(fields, column.name, lines)
            parts.append(_scaled(values, column)[:, None])
            if column.flag_missing:
                parts.append(np.isnan(values).astype(np.float32)[:, None])
        else:
            places = {value: i for i, value in enumerate(column.values)}
            found = np.array([places.get(field.strip(), -1) for field in fields], np.int64)
            parts.append((found[:, None] == np.arange(len(column.values))).astype(np.float32))
    return np.concatenate(parts, axis=1)


def feature_names(columns: Sequence[Column]) -> tuple[str, ...]:
    """The names of the columns that ``encode`` returns."""
    names: list[str] = []
    for column in columns:
        if isinstance(column, Numeric):
            names += [column.name] + ([f"{column.name}: missing"] if column.flag_missing else [])
        else:
            names += [f"{column.name}={value}" for value in column.values]
    return tuple(names)


def numbers(fields: Sequence[str], name: str, lines: Sequence[int] | None = None) -> np.ndarray:
    """Fields as numbers.

    Args:
        fields: Fields as text.
        name: The column, for error messages.
        lines: The line of each record in its file, for error messages.

    Returns:
        A float64 array, NaN where a field is missing.

    Raises:
        InputError: A field is neither missing nor a finite number.
    """
    values = np.array([number(field) for field in fields], dtype=np.float64)
    for i in np.flatnonzero(~np.isfinite(values)).tolist():
        if not is_missing(fields[i]):
            line = i + 1 if lines is None else lines[i]
            raise InputError(
                f"line {line}: {fields[i].strip()!r} in column {name} is not a finite number"
            )
    return values


def number(field: str) -> float:
    """A field as a number; NaN if it is missing or not a number."""
    try:
        return float(field)
    except ValueError:
        return math.nan


def _scaled(values: np.ndarray, column: Numeric) -> np.ndarray:
    clipped = np.clip(values, column.low, column.high) - column.low
    width = column.high - column.low
    share = np.log1p(clipped) / math.log1p(width) if column.log else clipped / width
    return np.nan_to_num(2.0 * share - 1.0, nan=0.0).astype(np.float32)
