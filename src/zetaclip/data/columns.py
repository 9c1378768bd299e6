"""From columns of text to columns of numbers, by declared ranges and vocabularies alone.

Guarantee: a row is encoded without looking at any other row, so preparing the data releases nothing.
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
    """A number with declared bounds: clipped to them and mapped to [-1, 1]; ``log`` maps log(1 + value - low) instead.

    A missing value becomes 0, the middle. With ``flag_missing`` a further column is 1 where it was missing.
    """

    name: str
    low: float
    high: float
    log: bool = False
    flag_missing: bool = False


@dataclass(frozen=True)
class Categorical:
    """A word out of a declared vocabulary: one column a word. A missing or unknown word is all zeros."""

    name: str
    values: tuple[str, ...]


Column = Numeric | Categorical


def is_missing(text: str) -> bool:
    """Whether a field holds no value: empty, ?, NA, N/A, NaN or null, in any case."""
    return text.strip().lower() in _MISSING


def encode(
    columns: Sequence[Column],
    table: Mapping[str, Sequence[str]],
    lines: Sequence[int] | None = None,
) -> np.ndarray:
    """The table as float32, one row a record. ``lines`` are the records' lines in their file, for messages."""
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
    """The names of the columns that ``encode`` makes."""
    names: list[str] = []
    for column in columns:
        if isinstance(column, Numeric):
            names += [column.name] + ([f"{column.name}: missing"] if column.flag_missing else [])
        else:
            names += [f"{column.name}={value}" for value in column.values]
    return tuple(names)


def numbers(fields: Sequence[str], name: str, lines: Sequence[int] | None = None) -> np.ndarray:
    """Fields as float64, nan where missing; anything else that is no finite number is an error with its line."""
    values = np.array([number(field) for field in fields], dtype=np.float64)
    for i in np.flatnonzero(~np.isfinite(values)).tolist():
        if not is_missing(fields[i]):
            line = i + 1 if lines is None else lines[i]
            raise InputError(
                f"line {line}: {fields[i].strip()!r} in column {name} is not a finite number"
            )
    return values


def number(field: str) -> float:
    """A field as a number; nan if it is missing or none."""
    try:
        return float(field)
    except ValueError:
        return math.nan


def _scaled(values: np.ndarray, column: Numeric) -> np.ndarray:
    clipped = np.clip(values, column.low, column.high) - column.low
    width = column.high - column.low
    share = np.log1p(clipped) / math.log1p(width) if column.log else clipped / width
    return np.nan_to_num(2.0 * share - 1.0, nan=0.0).astype(np.float32)
