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
from datetime import datetime
from typing import Any, ClassVar, Protocol

import numpy as np

from ..errors import InputError
from .text import Text
from .written import ISO, moment, number, number_style, plain_number

_MISSING = frozenset(("", "?", "na", "n/a", "nan", "null"))
# Words that can be a category, and say among numbers or dates that there is none.
_NO_VALUE = frozenset(
    ("-", "--", "---", "–", "—", ".", "none", "nil", "missing", "unknown", "not known")
    + ("not available", "n.a.", "n. a.", "nd", "n/d", "#n/a", "#na", "<na>", "nat", "k.a.", "k. a.")
    + ("keine angabe", "unbekannt", "inconnu", "desconocido")
)
_OR_MISSING = (
    "; if it means a missing value, leave the field empty, or declare the word in the schema:"
    " missing_values = [...]"
)
Lines = Sequence[int] | None


class Column(Protocol):
    """One column of a table, and how it becomes numbers.

    Attributes:
        kind: The word that a schema uses for the type.
        keys: What a schema can declare beside the type.
        needs: Those of the keys without which there is no column.
    """

    kind: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]
    needs: ClassVar[tuple[str, ...]]

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
        decimal: How the decimal mark is written.
        thousands: What separates thousands; empty for nothing.
        missing_values: Further fields that mean a missing value, such as "999".
    """

    kind: ClassVar[str] = "numeric"
    keys: ClassVar[tuple[str, ...]] = (
        "bounds",
        "log",
        "missing",
        "decimal",
        "thousands",
        "missing_values",
    )
    needs: ClassVar[tuple[str, ...]] = ("bounds",)
    name: str
    low: float
    high: float
    log: bool = False
    flag_missing: bool = False
    decimal: str = "."
    thousands: str = ""
    missing_values: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        """See ``Column``."""
        return (self.name, f"{self.name}: missing") if self.flag_missing else (self.name,)

    def encode(self, fields: Sequence[str], lines: Lines = None) -> np.ndarray:
        """See ``Column``."""
        fields = without(fields, self.missing_values)
        marks = self.decimal, self.thousands
        values = numbers(fields, self.name, lines, *marks, hint=_OR_MISSING)
        parts = [_scaled(values, self)]
        if self.flag_missing:
            parts.append(np.isnan(values).astype(np.float32))
        return np.stack(parts, axis=1)

    def entry(self) -> dict[str, Any]:
        """See ``Column``."""
        more: dict[str, Any] = {"log": True} if self.log else {}
        if self.flag_missing:
            more["missing"] = "flag"
        if self.decimal != ".":
            more["decimal"] = self.decimal
        if self.thousands:
            more["thousands"] = self.thousands
        if self.missing_values:
            more["missing_values"] = list(self.missing_values)
        return {"type": self.kind, "bounds": [self.low, self.high], **more}

    @classmethod
    def from_entry(cls, name: str, entry: Mapping[str, Any]) -> Numeric:
        """The column that ``entry`` describes."""
        low, high = entry["bounds"]
        return cls(
            name,
            float(low),
            float(high),
            bool(entry.get("log", False)),
            entry.get("missing") == "flag",
            entry.get("decimal", "."),
            entry.get("thousands", ""),
            tuple(entry.get("missing_values", ())),
        )


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
    keys: ClassVar[tuple[str, ...]] = ("values",)
    needs: ClassVar[tuple[str, ...]] = ("values",)
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


@dataclass(frozen=True)
class Date:
    """A day or a moment: its place in a declared range, and where it is in the year and the week.

    The place is mapped to [-1, 1], and clipped to it; year and week are a sine and a cosine each.
    A missing date is all zeros.

    Attributes:
        name: The column.
        first: The first day, as YYYY-MM-DD.
        last: The last day.
        form: How dates are written: "iso", or a format of ``datetime.strptime``.
        flag_missing: Add a column that is 1 where the date is missing.
        missing_values: Further fields that mean a missing date.
    """

    kind: ClassVar[str] = "date"
    keys: ClassVar[tuple[str, ...]] = ("bounds", "format", "missing", "missing_values")
    needs: ClassVar[tuple[str, ...]] = ("bounds",)
    name: str
    first: str
    last: str
    form: str = ISO
    flag_missing: bool = False
    missing_values: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        """See ``Column``."""
        parts = ("year sine", "year cosine", "week sine", "week cosine")
        more = ("missing",) if self.flag_missing else ()
        return (self.name, *(f"{self.name}: {part}" for part in (*parts, *more)))

    def encode(self, fields: Sequence[str], lines: Lines = None) -> np.ndarray:
        """See ``Column``."""
        low, high = days(self.first), days(self.last)
        found = np.zeros((len(fields), 5 + self.flag_missing), np.float32)
        for i, field in enumerate(without(fields, self.missing_values)):
            if has_no_value(field):
                found[i, 5:] = 1.0
                continue
            when = moment(field, self.form) or moment(field, ISO)
            if when is None:
                line = i + 1 if lines is None else lines[i]
                raise InputError(
                    f"line {line}: {field.strip()!r} in column {self.name} is not a date written as"
                    f" {self.form}{_OR_MISSING}"
                )
            day = when.toordinal() + (when.hour + when.minute / 60) / 24
            year = 2 * math.pi * (day - datetime(when.year, 1, 1).toordinal()) / 365.25
            week = 2 * math.pi * (day % 7) / 7
            place = 2 * (min(max(day, low), high) - low) / (high - low) - 1
            found[i, :5] = (place, math.sin(year), math.cos(year), math.sin(week), math.cos(week))
        return found

    def entry(self) -> dict[str, Any]:
        """See ``Column``."""
        more: dict[str, Any] = {} if self.form == ISO else {"format": self.form}
        if self.flag_missing:
            more["missing"] = "flag"
        if self.missing_values:
            more["missing_values"] = list(self.missing_values)
        return {"type": self.kind, "bounds": [self.first, self.last], **more}

    @classmethod
    def from_entry(cls, name: str, entry: Mapping[str, Any]) -> Date:
        """The column that ``entry`` describes."""
        first, last = (str(bound) for bound in entry["bounds"])
        flagged = entry.get("missing") == "flag"
        words = tuple(entry.get("missing_values", ()))
        return cls(name, first, last, entry.get("format", ISO), flagged, words)


# The types by the word that a schema uses.
TYPES: dict[str, Any] = {cls.kind: cls for cls in (Numeric, Categorical, Date, Text)}


def days(text: str) -> float:
    """The number of a day that is written as YYYY-MM-DD."""
    return float(datetime.fromisoformat(text).toordinal())


def is_missing(text: str) -> bool:
    """Whether a field has no value: empty, ?, NA, N/A, NaN or null, in upper or lower case."""
    return text.strip().lower() in _MISSING


def has_no_value(text: str) -> bool:
    """Whether a field among numbers or dates has none: it is missing, or "-", unknown, none, ..."""
    return is_missing(text) or text.strip().lower() in _NO_VALUE


def without(fields: Sequence[str], words: Sequence[str]) -> Sequence[str]:
    """Fields, empty where they are one of the words for a missing value."""
    return ["" if field.strip() in words else field for field in fields] if words else fields


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
    known = {plain_number(value): i for value, i in places.items()}
    numeric = {value: i for value, i in known.items() if math.isfinite(value)}
    found = np.empty(len(fields), np.int64)
    for i, field in enumerate(fields):
        word = field.strip()
        found[i] = places[word] if word in places else numeric.get(plain_number(word), -1)
    return found


def numbers(
    fields: Sequence[str],
    name: str,
    lines: Lines = None,
    decimal: str = ".",
    thousands: str = "",
    hint: str = "",
) -> np.ndarray:
    """Fields as numbers.

    Args:
        fields: Fields as text.
        name: The column, for error messages.
        lines: The line of each record in its file, for error messages.
        decimal: How the decimal mark is written.
        thousands: What separates thousands.
        hint: What may help if a field is no number, for error messages.

    Returns:
        A float64 array, NaN where a field is missing.

    Raises:
        InputError: A field is neither missing nor a finite number.
    """
    values = np.array([number(field, decimal, thousands) for field in fields], dtype=np.float64)
    for i in np.flatnonzero(~np.isfinite(values)).tolist():
        if not has_no_value(fields[i]):
            line = i + 1 if lines is None else lines[i]
            style = number_style([fields[i]])
            help_ = (
                f"; if it is written with the decimal mark {style[0]!r} and {style[1]!r} between"
                " thousands, declare decimal and thousands in the schema"
                if style
                else hint
            )
            raise InputError(
                f"line {line}: {fields[i].strip()!r} in column {name} is not a finite number{help_}"
            )
    return values


def _scaled(values: np.ndarray, column: Numeric) -> np.ndarray:
    clipped = np.clip(values, column.low, column.high) - column.low
    width = column.high - column.low
    share = np.log1p(clipped) / math.log1p(width) if column.log else clipped / width
    return np.nan_to_num(2.0 * share - 1.0, nan=0.0).astype(np.float32)
