"""What the columns of a table seem to be, from their values.

A guess is a statistic of the data, without noise: whoever uses it lists it as inferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InputError
from .columns import TYPES, is_missing
from .written import ISO, date_style, moment, number, number_style

# A column of single words with more different ones is treated as an identifier and left out.
_LARGEST_VOCABULARY = 100
# A target of integers with more different values is treated as a quantity.
_MOST_CLASSES = 20
_WORDS = 3.0  # free text has at least so many words on average, and hardly repeats
_MARKS = {".": "points", ",": "commas", " ": "spaces", "'": "apostrophes"}


@dataclass(frozen=True)
class Guess:
    """What a column seems to be.

    Attributes:
        kind: A type of column, "text" for free text, or "ignore".
        decimal: Decimal mark of numbers.
        thousands: Mark between thousands.
        form: How dates are written.
        said: What was made of it, in words; empty if there is nothing to say.
    """

    kind: str
    decimal: str = "."
    thousands: str = ""
    form: str = ISO
    said: str = ""

    def entry(self) -> dict[str, str]:
        """The part of a schema's entry that was guessed: type and form, no value of the data."""
        found = {"type": self.kind}
        if self.kind == "numeric" and self.decimal != ".":
            found["decimal"] = self.decimal
        if self.kind == "numeric" and self.thousands:
            found["thousands"] = self.thousands
        if self.kind == "date" and self.form != ISO:
            found["format"] = self.form
        return found


def guess(name: str, fields: Sequence[str]) -> Guess:
    """What a column seems to be.

    Args:
        name: The column.
        fields: Fields as text.
    """
    present = [field for field in fields if not is_missing(field)]
    different = list(dict.fromkeys(present))
    if not different:
        return Guess("ignore", said=f"column {name} was left out: it is empty")
    style = number_style(different)
    if style is not None:
        return _numeric(name, different, *style)
    form = date_style(different)
    if form is not None and len(different) > 1:
        return Guess("date", form=form, said=f"column {name} holds dates{_order(different, form)}")
    words = {field.strip() for field in different}
    if _is_text(present, words):
        if "text" in TYPES:
            return Guess("text", said=f"column {name} holds free text")
        return Guess("ignore", said=f"column {name} was left out: it is free text")
    if 2 <= len(words) <= _LARGEST_VOCABULARY:
        return Guess("categorical")
    why = "constant" if len(words) == 1 else "text that hardly repeats, like a name or a number"
    return Guess("ignore", said=f"column {name} was left out: it is {why}")


def _numeric(name: str, different: Sequence[str], decimal: str, thousands: str) -> Guess:
    if len({number(field, decimal, thousands) for field in different}) == 1:
        return Guess("ignore", said=f"column {name} was left out: it is constant")
    marks = ["a decimal comma"] if decimal == "," else []
    marks += [f"{_MARKS[thousands]} between thousands"] if thousands else []
    said = f"column {name} holds numbers with {' and '.join(marks)}" if marks else ""
    return Guess("numeric", decimal, thousands, said=said)


def _order(different: Sequence[str], form: str) -> str:
    """How dates are written, and that day and month may be the other way round."""
    if form == ISO:
        return ""
    other = form.replace("%d/%m", "%m/%d")
    if other != form and all(moment(field, other) is not None for field in different):
        return f', read as {form}; if the month comes first, declare format = "{other}"'
    return f", written as {form}"


def _is_text(present: Sequence[str], words: set[str]) -> bool:
    mean = sum(len(field.split()) for field in present) / len(present)
    return mean >= _WORDS and 2 * len(words) > len(present)


def is_quantity(fields: Sequence[str]) -> bool:
    """Whether a target looks like a quantity: it has fractions, or many different numbers."""
    present = list({field for field in fields if not is_missing(field)})
    style = number_style(present)
    if style is None:
        return False
    values = {number(field, *style) for field in present}
    return len(values) > _MOST_CLASSES or any(value != round(value) for value in values)


def distinct(fields: Sequence[str]) -> tuple[str, ...]:
    """Different values, in numeric order if all are numbers, otherwise in alphabetic order."""
    values = {field.strip() for field in fields if not is_missing(field)}
    numeric = bool(values) and number_style(list(values)) == (".", "")
    return tuple(sorted(values, key=lambda value: (number(value) if numeric else 0.0, value)))


def number_range(
    fields: Sequence[str], name: str, decimal: str = ".", thousands: str = ""
) -> tuple[float, float]:
    """The smallest and the largest number of a column.

    Raises:
        InputError: They are not numbers, or all the same.
    """
    values = [number(field, decimal, thousands) for field in fields if not is_missing(field)]
    if not values or not all(abs(value) < float("inf") for value in values):
        raise InputError(f"column {name} is not a column of finite numbers")
    if min(values) == max(values):
        raise InputError(f"column {name} is constant: declare its bounds, or leave it out")
    return min(values), max(values)


def day_range(fields: Sequence[str], name: str, form: str) -> tuple[str, str]:
    """The first and the last day of a column, as YYYY-MM-DD.

    Raises:
        InputError: They are not dates, or all the same.
    """
    found = [moment(field, form) or moment(field, ISO) for field in fields if not is_missing(field)]
    days = [day.strftime("%Y-%m-%d") for day in found if day is not None]
    if not days or len(days) < len(found):
        raise InputError(f"column {name} is not a column of dates written as {form}")
    if min(days) == max(days):
        raise InputError(f"column {name} is constant: declare its bounds, or leave it out")
    return min(days), max(days)
