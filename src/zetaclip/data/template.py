"""A schema file to start from: the columns of a table with guessed types."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from .columns import without
from .guess import Guess, day_range, distinct, is_quantity, marks_of, number_range
from .schema import Table, guesses

_OPEN = """\
# A guess from the data: the types of columns, and how numbers and dates are written. Fill in bounds
# and values from what a column means, not from what is in the file: whatever is left open will be
# inferred from the private data, with a warning.
"""
_FILLED = """\
# WARNING: bounds, values and classes below were read from the data. ε does not cover what they
# reveal: a bound is the value of one record, and a rare word may name a person. Go through all of
# them and replace them by what you know without the file, before you train on private data.
"""


def template(
    table: Table, target: str | None = None, values: bool = False, encoding: str = ""
) -> str:
    """A schema file to start from.

    Args:
        table: Fields as text, by column.
        target: The column to predict, if known.
        values: Fill in bounds, values and classes from the data, with a warning. Without it, no
            value of the data is in the text.
        encoding: How letters are written in the file, if it must be declared.

    Returns:
        The text of a .toml file.

    Raises:
        InputError: There is no such target.
    """
    lines = [_FILLED if values else _OPEN]
    lines += [f"encoding = {_quoted(encoding)}"] if encoding else []
    lines += [f"target = {_quoted(target)}" if target else '# target = "COLUMN"']
    lines += _target(table[target], target, values) if target in table and target else _NO_TARGET
    for name, seen in guesses(table, target).items():
        lines += ["", f"[columns.{_quoted(name)}]"]
        if seen.said:
            lines.append(f"# {seen.said}")
        lines += [f"{key} = {_quoted(value)}" for key, value in seen.entry().items()]
        lines += _rest(name, table[name], seen, values)
    return "\n".join(lines) + "\n"


_NO_TARGET = [
    '# task = "classification"        # or "regression"',
    '# classes = ["...", "..."]       # for classification: every class there can be',
    "# target_bounds = [0.0, 1.0]     # for regression: the range the target can have",
]


_WORDS = '# missing_values = ["..."]     # words among the numbers that mean a missing value'


def _target(fields: Sequence[str], name: str, values: bool) -> list[str]:
    if not is_quantity(fields):
        if values:
            return ['task = "classification"', f"classes = {_list(distinct(fields))}"]
        return ['task = "classification"        # or "regression"', _NO_TARGET[1]]
    decimal, thousands = marks_of(fields)
    marks = [f"target_decimal = {_quoted(decimal)}"] * (decimal != ".")
    marks += [f"target_thousands = {_quoted(thousands)}"] * bool(thousands)
    bounds = "# target_bounds = [0.0, 1.0]     # the range that the target can have"
    if values:
        low, high = _rounded(*number_range(fields, name, decimal, thousands))
        bounds = f"target_bounds = [{low!r}, {high!r}]"
    return ['task = "regression"', bounds, *marks]


def _rest(name: str, fields: Sequence[str], seen: Guess, values: bool) -> list[str]:
    """What a column needs beside its type."""
    flag = '# missing = "flag"             # a further column that marks missing values'
    if seen.kind == "numeric":
        bounds = "# bounds = [0.0, 1.0]"
        if values:
            written = without(fields, seen.words)
            low, high = _rounded(*number_range(written, name, seen.decimal, seen.thousands))
            bounds = f"bounds = [{low!r}, {high!r}]"
        words = f"missing_values = {_list(seen.words)}" if values else _WORDS
        return [bounds, flag, *([words] if seen.words else [])]
    if seen.kind == "date":
        bounds = "# bounds = [2000-01-01, 2030-12-31]"
        if values:
            first, last = day_range(fields, name, seen.form)
            bounds = f"bounds = [{first[:4]}-01-01, {last[:4]}-12-31]"
        return [bounds, flag]
    if seen.kind == "categorical":
        return [f"values = {_list(distinct(fields))}" if values else '# values = ["...", "..."]']
    return []


def _rounded(low: float, high: float) -> tuple[float, float]:
    """Bounds moved outwards to two digits of their width."""
    unit = 10.0 ** (math.floor(math.log10(high - low)) - 1)
    return round(math.floor(low / unit) * unit, 12), round(math.ceil(high / unit) * unit, 12)


def _list(values: Sequence[Any]) -> str:
    return json.dumps(list(values), ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
