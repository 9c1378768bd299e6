"""What the columns of a table mean: declared in a TOML or JSON file, or inferred with a warning.

Bounds and vocabularies inferred from private data are statistics of it, without noise. So
everything that was not declared and had to be inferred is listed.
"""

from __future__ import annotations

import difflib
import importlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from .columns import Categorical, Column, Numeric, is_missing, number

# A text column with more different values is treated as an identifier and left out.
_LARGEST_VOCABULARY = 100
# A target of integers with more different values is treated as a quantity.
_MOST_CLASSES = 20

_KEYS = ("target", "task", "classes", "target_bounds", "columns")
_COLUMN_KEYS = {
    "numeric": ("type", "bounds", "log", "missing"),
    "categorical": ("type", "values"),
    "ignore": ("type",),
}
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
        inferred: What was inferred from the data, in words.
        notes: Treatments to be stated in the result.
        ignored: Columns that are not used.
    """

    target: str
    task: str
    columns: tuple[Column, ...]
    classes: tuple[str, ...] = ()
    target_range: tuple[float, float] | None = None
    inferred: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def read_schema(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Reads a schema and checks what can be checked without the data.

    Args:
        source: A .toml or .json file, or its content as a mapping.

    Returns:
        The declared values.

    Raises:
        InputError: The file cannot be read, or a declaration is not valid.
    """
    if isinstance(source, Mapping):
        declared, where = dict(source), "the schema"
    else:
        path = Path(source).expanduser()
        declared, where = _parse(path), str(path)
    strange = [key for key in declared if key not in _KEYS]
    if strange:
        raise InputError(f"{where} has an unknown key {strange[0]!r}; known: {', '.join(_KEYS)}")
    if declared.get("task", "classification") not in ("classification", "binary", "regression"):
        raise InputError(
            f"{where}: task must be classification or regression, not {declared['task']!r}"
        )
    if "classes" in declared:
        declared["classes"] = _vocabulary(declared["classes"], "classes", where)
    if "target_bounds" in declared:
        declared["target_bounds"] = _bounds(declared["target_bounds"], "target_bounds", where)
    columns = declared.get("columns", {})
    if not isinstance(columns, Mapping):
        raise InputError(f"{where}: columns must be a table with one entry per column")
    declared["columns"] = {
        name: _declared_column(name, entry, where) for name, entry in columns.items()
    }
    return declared


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
        InputError: The declarations do not fit the table.
    """
    target = target or declared.get("target")
    if not target:
        raise InputError(f"name the column to predict with target; the file has {', '.join(table)}")
    if target not in table:
        raise InputError(_no_column(target, table))
    entries: Mapping[str, Mapping[str, Any]] = declared.get("columns", {})
    for name in entries:
        if name not in table:
            raise InputError(
                f"the schema names a column that the file lacks. {_no_column(name, table)}"
            )
    inferred: list[str] = []
    notes: list[str] = []
    columns: list[Column] = []
    for name, fields in table.items():
        if name == target:
            continue
        if entries and name not in entries:
            raise InputError(
                f"column {name!r} is not in the schema: declare it, "
                'or leave it out with type = "ignore"'
            )
        column = _column(name, fields, entries.get(name, {}), inferred, notes)
        if column is not None:
            columns.append(column)
    if not columns:
        raise InputError("no column is left to predict from")
    task = task or declared.get("task")
    task, classes, target_range = _target(target, table[target], task, declared, inferred)
    used = {column.name for column in columns}
    return Schema(
        target,
        task,
        tuple(columns),
        classes,
        target_range,
        tuple(inferred),
        tuple(notes),
        tuple(name for name in table if name != target and name not in used),
    )


def template(table: Table, target: str | None = None) -> str:
    """A schema file to fill in: columns and guessed types, without any value of the data.

    Args:
        table: Fields as text, by column.
        target: The column to predict, if known.

    Returns:
        The text of a .toml file.

    Raises:
        InputError: There is no such target.
    """
    if target is not None and target not in table:
        raise InputError(_no_column(target, table))
    lines = [
        "# The types below are guesses from the data. Fill in bounds and values from what a column",
        "# means, not from what is in the file: whatever is left open will be inferred from the",
        "# private data, with a warning.",
        "",
        f"target = {_quoted(target)}" if target else '# target = "COLUMN"',
        '# task = "classification"        # or "regression"',
        '# classes = ["...", "..."]       # for classification: every class there can be',
        "# target_bounds = [0.0, 1.0]     # for regression: the range the target can have",
    ]
    for name, fields in table.items():
        if name == target:
            continue
        kind = _kind(fields)
        lines += ["", f"[columns.{_quoted(name)}]", f"type = {_quoted(kind)}"]
        if kind == "numeric":
            lines += [
                "# bounds = [0.0, 1.0]",
                '# missing = "flag"             # a further column that marks missing values',
            ]
        elif kind == "categorical":
            lines += ['# values = ["...", "..."]']
    return "\n".join(lines) + "\n"


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            parsed = json.loads(text)
        elif path.suffix == ".toml":
            parsed = _toml(text)
        else:
            raise InputError(f"a schema is a .toml or .json file, not {path}")
    except OSError as error:
        raise InputError(f"cannot read the schema {path}: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is not valid: {error}") from error
    if not isinstance(parsed, dict):
        raise InputError(f"{path} must contain a table of keys")
    return parsed


def _toml(text: str) -> dict[str, Any]:
    parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    parsed: dict[str, Any] = parser.loads(text)
    return parsed


def _declared_column(name: str, entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, Mapping) or entry.get("type") not in _COLUMN_KEYS:
        raise InputError(f"{where}: column {name!r} needs a type, one of {', '.join(_COLUMN_KEYS)}")
    known = _COLUMN_KEYS[entry["type"]]
    for key in entry:
        if key not in known:
            raise InputError(
                f"{where}: a {entry['type']} column such as {name!r} has no {key!r}; "
                f"it has {', '.join(known)}"
            )
    checked = dict(entry)
    if "bounds" in entry:
        checked["bounds"] = _bounds(entry["bounds"], f"bounds of {name!r}", where)
    if "values" in entry:
        checked["values"] = _vocabulary(entry["values"], f"values of {name!r}", where)
    if not isinstance(entry.get("log", False), bool):
        raise InputError(f"{where}: log of {name!r} must be true or false")
    if entry.get("missing", "middle") not in ("middle", "flag"):
        raise InputError(f'{where}: missing of {name!r} must be "middle" or "flag"')
    return checked


def _bounds(value: Any, what: str, where: str) -> tuple[float, float]:
    good = isinstance(value, list | tuple) and len(value) == 2
    good = good and all(
        isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in value
    )
    if not good or not value[0] < value[1]:
        raise InputError(f"{where}: {what} must be two numbers, the lower first, not {value!r}")
    return float(value[0]), float(value[1])


def _vocabulary(value: Any, what: str, where: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise InputError(f"{where}: {what} must be a list, not {value!r}")
    if any(not isinstance(v, str | int | float) or isinstance(v, bool) for v in value):
        raise InputError(f"{where}: {what} must be words or numbers, written as in the data")
    words = tuple(str(v) for v in value)
    if len(set(words)) < max(2, len(words)):
        raise InputError(f"{where}: {what} must be at least two different ones")
    return words


def _column(
    name: str,
    fields: Sequence[str],
    entry: Mapping[str, Any],
    inferred: list[str],
    notes: list[str],
) -> Column | None:
    """A column's encoding; None if it is left out. What is inferred is added to ``inferred``."""
    kind = entry.get("type")
    if kind is None:
        kind = _kind(fields)
        inferred.append(f"type of {name}")
        if kind == "ignore":
            notes.append(
                f"column {name} was left out: it is constant, empty, or text that hardly repeats"
            )
    if kind == "ignore":
        return None
    if kind == "categorical":
        if "values" in entry:
            return Categorical(name, entry["values"])
        inferred.append(f"values of {name}")
        found = _distinct(fields)
        if not found:
            raise InputError(
                f"column {name!r} is empty: declare its values, "
                'or leave it out with type = "ignore"'
            )
        return Categorical(name, found)
    flag = entry.get("missing") == "flag" if entry else any(is_missing(field) for field in fields)
    if "bounds" in entry:
        low, high = entry["bounds"]
    else:
        inferred.append(f"bounds of {name}")
        low, high = _range(fields, name)
    return Numeric(name, low, high, log=entry.get("log", False), flag_missing=flag)


def _target(
    name: str,
    fields: Sequence[str],
    task: str | None,
    declared: Mapping[str, Any],
    inferred: list[str],
) -> tuple[str, tuple[str, ...], tuple[float, float] | None]:
    if task is None:
        if "classes" in declared or "target_bounds" in declared:
            task = "classification" if "classes" in declared else "regression"
        else:
            task = "regression" if _is_quantity(fields) else "classification"
            inferred.append(f"task, from the values of {name}")
    if task not in ("classification", "binary", "regression"):
        raise InputError(f"task must be classification or regression, not {task!r}")
    if task == "regression":
        if "target_bounds" in declared:
            return task, (), declared["target_bounds"]
        inferred.append(f"bounds of the target {name}")
        return task, (), _range(fields, name)
    classes = declared.get("classes")
    if classes is None:
        inferred.append(f"classes of {name}")
        classes = _distinct(fields)
    if len(classes) < 2:
        raise InputError(f"column {name} has one class only; a classification needs at least two")
    if task == "binary" and len(classes) != 2:
        raise InputError(f"a binary task needs two classes; column {name} has {len(classes)}")
    return "binary" if len(classes) == 2 else "classification", tuple(classes), None


def _kind(fields: Sequence[str]) -> str:
    present = [field for field in fields if not is_missing(field)]
    if all(math.isfinite(number(field)) for field in present):
        return "numeric" if len({float(field) for field in present}) > 1 else "ignore"
    return (
        "categorical"
        if 2 <= len({field.strip() for field in present}) <= _LARGEST_VOCABULARY
        else "ignore"
    )


def _is_quantity(fields: Sequence[str]) -> bool:
    values = {number(field) for field in fields if not is_missing(field)}
    if not all(math.isfinite(value) for value in values):
        return False
    return len(values) > _MOST_CLASSES or any(value != round(value) for value in values)


def _distinct(fields: Sequence[str]) -> tuple[str, ...]:
    """Different values, in numeric order if all are numbers, otherwise in alphabetic order."""
    values = {field.strip() for field in fields if not is_missing(field)}
    numeric = all(math.isfinite(number(value)) for value in values)
    return tuple(sorted(values, key=lambda value: (number(value) if numeric else 0.0, value)))


def _range(fields: Sequence[str], name: str) -> tuple[float, float]:
    values = [number(field) for field in fields if not is_missing(field)]
    if not values or not all(math.isfinite(value) for value in values):
        raise InputError(f"column {name} is not a column of finite numbers")
    if min(values) == max(values):
        raise InputError(f"column {name} is constant: declare its bounds, or leave it out")
    return min(values), max(values)


def _no_column(name: str, table: Table) -> str:
    return f"{near_column(name, table)} The file has {', '.join(table)}"


def near_column(name: str, table: Table) -> str:
    """That a column is missing, and which one may be meant."""
    near = difflib.get_close_matches(name, table, n=1)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    return f"there is no column {name!r}.{guess}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
