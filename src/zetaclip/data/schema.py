"""What the columns of a table mean: declared in a TOML or JSON file, or inferred with a warning.

Bounds and vocabularies inferred from private data are statistics of it, without noise. So
everything that was not declared and had to be inferred is listed.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError
from .columns import TYPES, Column, has_no_value, is_missing, without
from .declared import raise_all
from .guess import Guess, day_range, distinct, guess, is_quantity, marks_of, number_range
from .written import ISO

Table = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Schema:
    """The complete meaning of a table.

    Attributes:
        target: The column to predict.
        task: "classification", "binary" or "regression".
        columns: Encodings of the other columns that are used.
        classes: Names of the classes.
        target_range: Bounds of a regression's target.
        target_marks: Decimal mark and mark of thousands of the target.
        inferred: What was inferred from the data, in words.
        notes: What was made of the columns, to be stated in the result.
        ignored: Columns that are not used.
    """

    target: str
    task: str
    columns: tuple[Column, ...]
    classes: tuple[str, ...] = ()
    target_range: tuple[float, float] | None = None
    target_marks: tuple[str, str] = (".", "")
    inferred: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


@dataclass
class _Findings:
    """What comes to light while a schema is completed."""

    inferred: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def complete(
    table: Table, declared: Mapping[str, Any], target: str | None = None, task: str | None = None
) -> Schema:
    """A complete schema for a table: what was declared, and the rest inferred from the data.

    Args:
        table: Fields as text, by column.
        declared: What ``read_schema`` returned; may be empty.
        target: The column to predict; takes precedence over the declared one.
        task: The task; takes precedence over the declared one.

    Returns:
        The schema.

    Raises:
        InputError: The declarations do not fit the table; the message has all that does not.
    """
    target = target or declared.get("target")
    if not target:
        raise InputError(
            f"name the column to predict with target=; the file has {', '.join(table)}"
        )
    if target not in table:
        raise InputError(_no_column(target, table))
    columns, ignored, found = columns_of(table, declared.get("columns", {}), target)
    if not columns:
        raise InputError("no column is left to predict from")
    task, classes, target_range, marks = _target(
        target, table[target], task or declared.get("task"), declared, found
    )
    return Schema(
        target,
        task,
        columns,
        classes,
        target_range,
        marks,
        tuple(found.inferred),
        tuple(found.notes),
        ignored,
    )


def with_text(declared: Mapping[str, Any], name: str, table: Table) -> dict[str, Any]:
    """A schema in which a column is free text; if no column is declared, it is the only one.

    Args:
        declared: What ``read_schema`` returned; may be empty.
        name: The column of free text.
        table: Fields as text, by column.

    Raises:
        InputError: There is no such column.
    """
    if name not in table:
        raise InputError(_no_column(name, table))
    entries = dict(declared.get("columns", {})) or {other: {"type": "ignore"} for other in table}
    if entries.get(name, {}).get("type") != "text":
        entries[name] = {"type": "text"}
    return {**declared, "columns": entries}


def columns_of(
    table: Table, entries: Mapping[str, Mapping[str, Any]], target: str | None = None
) -> tuple[tuple[Column, ...], tuple[str, ...], _Findings]:
    """The encodings of a table's columns: as declared, or inferred if nothing is declared.

    Args:
        table: Fields as text, by column.
        entries: The declared columns; empty if nothing is declared.
        target: A column that is left out.

    Returns:
        The columns that are used, the names of those that are not, and what was inferred.

    Raises:
        InputError: The declarations do not fit the table.
    """
    found = _Findings()
    for name in entries:
        if name not in table:
            found.wrong.append(f"it names a column that the file lacks. {_no_column(name, table)}")
    columns: list[Column] = []
    for name, fields in table.items():
        if name == target:
            continue
        if entries and name not in entries:
            found.wrong.append(
                f"column {name!r} is not in the schema: declare it, "
                'or leave it out with type = "ignore"'
            )
            continue
        try:
            column = _column(name, fields, entries.get(name), found)
        except InputError as error:
            found.wrong.append(str(error))
            continue
        if column is not None:
            columns.append(column)
    raise_all(found.wrong, "the schema" if entries else "the table")
    used = {column.name for column in columns}
    ignored = tuple(name for name in table if name != target and name not in used)
    return tuple(columns), ignored, found


def _column(
    name: str, fields: Sequence[str], declared: Mapping[str, Any] | None, found: _Findings
) -> Column | None:
    """A column's encoding; None if it is left out."""
    if declared is None:
        seen = guess(name, fields)
        entry: dict[str, Any] = seen.entry()
        found.inferred.append(f"type of {name}")
        if seen.said:
            found.notes.append(seen.said)
        if seen.words:
            found.inferred.append(f"words for a missing value of {name}")
            entry["missing_values"] = seen.words
        if seen.kind in ("numeric", "date") and (seen.words or any(map(has_no_value, fields))):
            entry["missing"] = "flag"
    else:
        entry = dict(declared)
    kind = entry["type"]
    if kind == "ignore":
        return None
    if kind == "categorical" and "values" not in entry:
        found.inferred.append(f"values of {name}")
        entry["values"] = distinct(fields)
        if not entry["values"]:
            raise InputError(
                f"column {name!r} is empty: declare its values, "
                'or leave it out with type = "ignore"'
            )
    if kind in ("numeric", "date") and "bounds" not in entry:
        found.inferred.append(f"bounds of {name}")
        fields = without(fields, entry.get("missing_values", ()))
        if kind == "date":
            entry["bounds"] = day_range(fields, name, entry.get("format", ISO))
        else:
            marks = entry.get("decimal", "."), entry.get("thousands", "")
            entry["bounds"] = number_range(fields, name, *marks)
    column: Column = TYPES[kind].from_entry(name, entry)
    return column


def _target(
    name: str,
    fields: Sequence[str],
    task: str | None,
    declared: Mapping[str, Any],
    found: _Findings,
) -> tuple[str, tuple[str, ...], tuple[float, float] | None, tuple[str, str]]:
    if task is None:
        if "classes" in declared or "target_bounds" in declared:
            task = "classification" if "classes" in declared else "regression"
        else:
            task = "regression" if is_quantity(fields) else "classification"
            found.inferred.append(f"task, from the values of {name}")
    if task not in ("classification", "binary", "regression"):
        raise InputError(f"task must be classification or regression, not {task!r}")
    if task == "regression":
        marks = _target_marks(fields, declared)
        if "target_bounds" in declared:
            return task, (), declared["target_bounds"], marks
        found.inferred.append(f"bounds of the target {name}")
        return task, (), number_range(fields, name, *marks), marks
    classes = declared.get("classes")
    if classes is None:
        found.inferred.append(f"classes of {name}")
        classes = distinct(fields)
        _check_classes(name, fields, classes)
    if len(classes) < 2:
        raise InputError(f"column {name} has one class only; a classification needs at least two")
    if task == "binary" and len(classes) != 2:
        raise InputError(f"a binary task needs two classes; column {name} has {len(classes)}")
    return "binary" if len(classes) == 2 else "classification", tuple(classes), None, (".", "")


def _target_marks(fields: Sequence[str], declared: Mapping[str, Any]) -> tuple[str, str]:
    """How the numbers of the target are written: as declared, or as they are in the file."""
    if "target_decimal" in declared or "target_thousands" in declared:
        return declared.get("target_decimal", "."), declared.get("target_thousands", "")
    if declared:
        return ".", ""
    return marks_of(fields)


def _check_classes(name: str, fields: Sequence[str], classes: Sequence[str]) -> None:
    """Refuses a target that hardly repeats: nothing can be learned about its classes.

    Raises:
        InputError: There are more than half as many classes as rows.
    """
    rows = sum(not is_missing(field) for field in fields)
    if len(classes) > 2 and 2 * len(classes) > rows:
        every = "in every row" if len(classes) == rows else "in most rows"
        raise InputError(
            f"the target {name} has another value {every}, so there is nothing to learn about its"
            " classes. Choose another target; if it is a quantity, say task='regression'; if the"
            " classes are right, declare them in a schema"
        )


def guesses(table: Table, target: str | None = None) -> dict[str, Guess]:
    """What every column but the target seems to be.

    Raises:
        InputError: There is no such target.
    """
    if target is not None and target not in table:
        raise InputError(_no_column(target, table))
    return {name: guess(name, fields) for name, fields in table.items() if name != target}


def _no_column(name: str, table: Table) -> str:
    return f"{near_column(name, table)} The file has {', '.join(table)}"


def near_column(name: str, table: Table) -> str:
    """That a column is missing, and which one may be meant."""
    near = difflib.get_close_matches(name, table, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"there is no column {name!r}.{hint}"
