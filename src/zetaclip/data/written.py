"""How numbers and dates are written: decimal commas, thousands, and orders of day and month."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import cache

DECIMALS = (".", ",")
THOUSANDS = ("", ",", ".", " ", "'")
ISO = "iso"  # as Python's datetime.fromisoformat reads it
# Ways to write a number that are tried, in this order: the decimal mark, and that of thousands.
_NUMBERS = ((".", ""), (".", ","), (",", "."), (",", " "), (".", " "), (".", "'"), (",", "'"))
_DAYS = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%Y/%m/%d", "%d.%m.%y", "%d %b %Y")
_TIMES = ("", " %H:%M", " %H:%M:%S")
_DATES = (ISO, *(day + time for time in _TIMES for day in _DAYS))
_SPACES = "\u00a0\u202f\u2009"  # that separate thousands in print
_SIGN = re.compile(r"^([+-]?)\s*[$€£¥]\s*|\s*[$€£¥%]$")  # of a currency, or of percent


class Plain(str):
    """A number that was no text before, written with a point whatever a column declares."""


def number(field: str, decimal: str = ".", thousands: str = "") -> float:
    """A field as a number.

    Args:
        field: The text.
        decimal: The decimal mark.
        thousands: The mark between groups of three digits; empty for none.

    Returns:
        The number; NaN if the field is missing, or not written this way.

    **Edge cases.** The sign of a currency or of percent is left out: $5 and 5 % are 5.
    """
    if isinstance(field, Plain):
        return plain_number(field)
    text = _SIGN.sub(r"\1", field.strip())
    if decimal == "." and not thousands:
        return plain_number(text)
    for space in _SPACES:
        text = text.replace(space, " ")
    if not _pattern(decimal, thousands).fullmatch(text):
        return math.nan
    return plain_number(text.replace(thousands, "").replace(decimal, "."))


def plain_number(text: str) -> float:
    """A number as Python writes it; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def number_style(fields: Sequence[str]) -> tuple[str, str] | None:
    """The decimal mark and the mark of thousands with which all fields are numbers.

    Returns:
        None if there are no such marks. Whole numbers in groups of three, such as 1,234, count as
        thousands.
    """
    for decimal, thousands in _NUMBERS:
        if all(math.isfinite(number(field, decimal, thousands)) for field in fields):
            # Not marked anywhere: the simplest form that says the same.
            used = thousands and any(thousands in _plain_spaces(field) for field in fields)
            return decimal, thousands if used else ""
    return None


def moment(field: str, form: str) -> datetime | None:
    """A field as a date; None if it is not written in this form.

    Args:
        field: The text.
        form: ``ISO``, or a format of ``datetime.strptime``.

    **Edge cases.** A time with a zone is turned into that of UTC.
    """
    text = field.strip()
    try:
        if form != ISO:
            return datetime.strptime(text, form)
        if len(text) < 8:  # fromisoformat also reads a week, or a year with a week
            return None
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo is None else found.astimezone(timezone.utc).replace(tzinfo=None)


def date_style(fields: Sequence[str]) -> str | None:
    """The first form in which all fields are dates; None if there is none."""
    if not fields or all(math.isfinite(number(field)) for field in fields):
        return None  # 20240131 is a date for Python, and a number for everybody else
    for form in _DATES:
        if all(moment(field, form) is not None for field in fields):
            return form
    return None


def _plain_spaces(field: str) -> str:
    text = field.strip()
    for space in _SPACES:
        text = text.replace(space, " ")
    return text


@cache
def _pattern(decimal: str, thousands: str) -> re.Pattern[str]:
    point, group = re.escape(decimal), re.escape(thousands)
    whole = rf"(\d+|\d{{1,3}}({group}\d{{3}})+)" if thousands else r"\d+"
    return re.compile(rf"[+-]?({whole}({point}\d*)?|{point}\d+)([eE][+-]?\d+)?")
