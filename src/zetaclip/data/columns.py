"""From columns of text to columns of numbers, by declared ranges and vocabularies only.

Each type of column is a frozen class with the same members, listed in ``TYPES``: ``entry`` is the
column as a schema declares it, ``from_entry`` reads it back, ``names`` and ``encode`` give its
columns of numbers.

**Guarantee.** The encoding of a row depends on no other row, so preparing the data releases
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from ..errors import InputError

_MISSING = frozenset(("", "?", "na", "n/a", "nan", "null"))
Lines = Sequence[int] | None


class Column(Protocol):
    """One column of a table, and how it becomes numbers."""

    kind: ClassVar[str]

    @property
    def name(self) -> str:
        """The column in the table."""

    def names(self) -> tuple[str, ...]:
        """The names of the columns that ``encode`` returns."""

    def encode(self, fields: Sequence[str], lines: Lines = None) -> np.ndarray:
        """Fields as float32, one row per record.

        Args:
            fields: Fields as text.
            lines: The line of each record in its file, for error messages.

        Raises:
            InputError: A field can't be read as what was declared.
        """

    def entry(self) -> dict[str, Any]:
        """The column as a schema declares it."""


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

    kind: ClassVar[str] = "numeric"
    name: str
    low: float
    high: float
    log: bool = False
    flag_missing: bool = False

    def names(self) -> tuple[str, ...]:
        """See ``Column``."""
        return (self.name, f"{self.name}: missing") if self.flag_missing else (self.name,)

    def encode(self, fields: Sequence[str], lines: Lines = None) -> np.ndarray:
        """See ``Column``."""
        values = numbers(fields, self.name, lines)
        parts = [_scaled(values, self)]
        if self.flag_missing:
            parts.append(np.isnan(values).astype(np.float32))
        return np.stack(parts, axis=1)

    def entry(self) -> dict[str, Any]:
        """See ``Column``."""
        more: dict[str, Any] = {"log": True} if self.log else {}
        if self.flag_missing:
            more["missing"] = "flag"
        return {"type": self.kind, "bounds": [self.low, self.high], **more}

    @classmethod
    def from_entry(cls, name: str, entry: Mapping[str, Any]) -> Numeric:
        """The column that ``entry`` describes."""
        low, high = entry["bounds"]
        flag = entry.get("missing") == "flag"
        return cls(name, float(low), float(high), bool(entry.get("log", False)), flag)


@dataclass(frozen=True)
class Categorical:
    """A word from a declared vocabulary, as one-hot columns.

    A missing or unknown word is all zeros. A number counts as the same word however it is written:
    1.0 is found as 1.

    Attributes:
        name: The column.
        values: The vocabulary.
    """

    kind: ClassVar[str] = "categorical"
    name: str
    values: tuple[str, ...]

    def names(self) -> tuple[str, ...]:
        """See ``Column``."""
        return tuple(f"{self.name}={value}" for value in self.values)

    def encode(self, fields: Sequence[str], lines: Lines = None) -> np.ndarray:
        """See ``Column``."""
        found = positions(fields, self.values)
        return (found[:, None] == np.arange(len(self.values))).astype(np.float32)

    def entry(self) -> dict[str, Any]:
        """See ``Column``."""
        return {"type": self.kind, "values": list(self.values)}

    @classmethod
    def from_entry(cls, name: str, entry: Mapping[str, Any]) -> Categorical:
        """The column that ``entry`` describes."""
        return cls(name, tuple(str(value) for value in entry["values"]))


# The types by the word that a schema uses.
TYPES: dict[str, Any] = {cls.kind: cls for cls in (Numeric, Categorical)}


def is_missing(text: str) -> bool:
    """Whether a field has no value: empty, ?, NA, N/A, NaN or null, in upper or lower case."""
    return text.strip().lower() in _MISSING


def encode(
    columns: Sequence[Column], table: Mapping[str, Sequence[str]], lines: Lines = None
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
    return np.concatenate([column.encode(table[column.name], lines) for column in columns], axis=1)


def feature_names(columns: Sequence[Column]) -> tuple[str, ...]:
    """The names of the columns that ``encode`` returns."""
    return tuple(name for column in columns for name in column.names())


def positions(fields: Sequence[str], values: Sequence[str]) -> np.ndarray:
    """The place of each field in a vocabulary; -1 where it is missing or unknown."""
    places = {value: i for i, value in enumerate(values)}
    numeric = {number(value): i for value, i in places.items() if math.isfinite(number(value))}
    found = np.empty(len(fields), np.int64)
    for i, field in enumerate(fields):
        word = field.strip()
        found[i] = places[word] if word in places else numeric.get(number(word), -1)
    return found


def numbers(fields: Sequence[str], name: str, lines: Lines = None) -> np.ndarray:
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
