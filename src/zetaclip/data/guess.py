"""What the columns of a table seem to be, from their values.

A guess is a statistic of the data, without noise: whoever uses it lists it as inferred.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InputError
from .columns import has_no_value, is_missing
from .written import ISO, date_style, moment, number, number_style

# A column of single words with more different ones is treated as an identifier and left out.
_LARGEST_VOCABULARY = 100
# A target of integers with more different values is treated as a quantity.
_MOST_CLASSES = 20
_WORDS = 3.0  # free text has at least so many words on average, and hardly repeats
_NUMBERS = 0.9  # a column with this share of numbers is numeric, if few words stand beside them
_MOST_ODD_WORDS = 10
# Names of columns that say whose row it is, or which.
_IDENTIFIER = re.compile(
    r"(^|_|\b)(id|uuid|guid|patient|user|customer|client|person|subject|member|vehicle)$", re.I
)
_MARKS = {".": "points", ",": "commas", " ": "spaces", "'": "apostrophes"}


@dataclass(frozen=True)
class Guess:
    """What a column seems to be.

    Attributes:
        kind: A type of column, "text" for free text, or "ignore".
        decimal: Decimal mark of numbers.
        thousands: Mark between thousands.
        form: How dates are written.
        words: Words of the data that stand for a missing number.
        said: What was made of it, in words; empty if there is nothing to say.
        is_identifier: Left out because it seems to say whose row it is.
    """

    kind: str
    decimal: str = "."
    thousands: str = ""
    form: str = ISO
    words: tuple[str, ...] = ()
    said: str = ""
    is_identifier: bool = False

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
    values = [field for field in different if not has_no_value(field)]
    return (
        _numeric(name, values, _odd_words(values, present))
        or _date(name, values)
        or _words(name, present)
    )


def is_identifier(name: str) -> bool:
    """Whether the name of a column says whose row it is, or which."""
    return bool(_IDENTIFIER.search(name))


def _numeric(name: str, values: Sequence[str], odd: tuple[str, ...]) -> Guess | None:
    """A column of numbers; None if it is none."""
    written = [field for field in values if field.strip() not in odd]
    style = number_style(written) if written else None
    if style is None:
        return None
    if is_identifier(name) and len(written) > _LARGEST_VOCABULARY:
        return _identifier(name)
    if len({number(field, *style) for field in written}) == 1:
        return Guess("ignore", said=f"column {name} was left out: it is constant")
    decimal, thousands = style
    marks = ["a decimal comma"] if decimal == "," else []
    marks += [f"{_MARKS[thousands]} between thousands"] if thousands else []
    said = f"column {name} holds numbers with {' and '.join(marks)}" if marks else ""
    if odd:
        said = (said or f"column {name} holds numbers") + "; words among them count as missing"
    return Guess("numeric", decimal, thousands, words=odd, said=said)


def _odd_words(values: Sequence[str], present: Sequence[str]) -> tuple[str, ...]:
    """The few words that stand among many numbers; empty if it is not so."""
    odd: dict[str, None] = {}
    for field in values:
        if number_style([field]) is None:
            odd[field.strip()] = None
            if len(odd) > _MOST_ODD_WORDS:
                return ()
    numbers = sum(field.strip() not in odd for field in present)
    return tuple(odd) if numbers >= _NUMBERS * len(present) else ()


def _date(name: str, values: Sequence[str]) -> Guess | None:
    """A column of dates; None if it is none."""
    form = date_style(values)
    if form is None or len(values) < 2:
        return None
    return Guess("date", form=form, said=f"column {name} holds dates{_order(values, form)}")


def _words(name: str, present: Sequence[str]) -> Guess:
    """A column of categories, of free text, or one that is left out."""
    words = {field.strip() for field in present}
    if _is_text(present, words):
        return Guess("text", said=f"column {name} holds free text")
    if 2 <= len(words) <= _LARGEST_VOCABULARY:
        return Guess("categorical")
    if len(words) == 1:
        return Guess("ignore", said=f"column {name} was left out: it is constant")
    return _identifier(name)


def _identifier(name: str) -> Guess:
    why = f"it has more than {_LARGEST_VOCABULARY} different values, as names and identifiers do"
    return Guess("ignore", said=f"column {name} was left out: {why}", is_identifier=True)


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
    present = list({field for field in fields if not has_no_value(field)})
    style = number_style(present)
    if style is None:
        return False
    values = {number(field, *style) for field in present}
    return len(values) > _MOST_CLASSES or any(value != round(value) for value in values)


def marks_of(fields: Sequence[str]) -> tuple[str, str]:
    """The decimal mark and the mark of thousands of numbers, as they are written."""
    return number_style(list({field for field in fields if not has_no_value(field)})) or (".", "")


def distinct(fields: Sequence[str]) -> tuple[str, ...]:
    """Different values, in numeric order if all are numbers, otherwise in alphabetic order."""
    values = {field.strip() for field in fields if not is_missing(field)}
    numeric = bool(values) and number_style(list(values)) == (".", "")
    return tuple(sorted(values, key=lambda value: (number(value) if numeric else 0.0, value)))


def number_range(
    fields: Sequence[str], name: str, decimal: str = ".", thousands: str = ""
) -> tuple[float, float]:
    """The smallest and the largest number of a column.

    Args:
        fields: The fields as they are written.
        name: The column, for messages.
        decimal: The decimal point.
        thousands: What separates thousands; "" for nothing.

    Raises:
        InputError: They are not numbers, or all the same.
    """
    values = [number(field, decimal, thousands) for field in fields if not has_no_value(field)]
    if not values or not all(abs(value) < float("inf") for value in values):
        raise InputError(f"column {name} is not a column of finite numbers")
    if min(values) == max(values):
        raise InputError(f"column {name} is constant: declare its bounds, or leave it out")
    return min(values), max(values)


def day_range(fields: Sequence[str], name: str, form: str) -> tuple[str, str]:
    """The first and the last day of a column, as YYYY-MM-DD.

    Args:
        fields: The fields as they are written.
        name: The column, for messages.
        form: How dates are written, in ``strptime``'s notation.

    Raises:
        InputError: They are not dates, or all the same.
    """
    written = [field for field in fields if not has_no_value(field)]
    found = [moment(field, form) or moment(field, ISO) for field in written]
    days = [day.strftime("%Y-%m-%d") for day in found if day is not None]
    if not days or len(days) < len(found):
        raise InputError(f"column {name} is not a column of dates written as {form}")
    if min(days) == max(days):
        raise InputError(f"column {name} is constant: declare its bounds, or leave it out")
    return min(days), max(days)
