"""Reads a schema file and checks what can be checked without the data; tells all errors at once."""

from __future__ import annotations

import codecs
import importlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

from ..errors import InputError
from .columns import TYPES
from .written import DECIMALS, THOUSANDS

_KEYS = (
    "target",
    "task",
    "classes",
    "target_bounds",
    "target_decimal",
    "target_thousands",
    "encoding",
    "columns",
)
_TASKS = ("classification", "binary", "regression")


def read_schema(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Reads a schema and checks what can be checked without the data.

    Args:
        source: A .toml or .json file, or its content as a mapping.

    Returns:
        The declared values.

    Raises:
        InputError: The file cannot be read, or declarations are not valid; the message has all of
            them.
    """
    if isinstance(source, Mapping):
        declared, where = dict(source), "the schema"
    else:
        path = Path(source).expanduser()
        declared, where = _parse(path), str(path)
    wrong: list[str] = []
    for key in declared:
        if key not in _KEYS:
            wrong.append(f"unknown key {key!r}; known: {', '.join(_KEYS)}")
    if declared.get("task", _TASKS[0]) not in _TASKS:
        wrong.append(f"task must be classification or regression, not {declared['task']!r}")
    if "classes" in declared:
        declared["classes"] = _vocabulary(declared["classes"], "classes", wrong)
    if "target_bounds" in declared:
        declared["target_bounds"] = _bounds(declared["target_bounds"], "target_bounds", wrong)
    _marks(declared, "target_", "the target", wrong)
    _encoding(declared.get("encoding", "utf-8"), wrong)
    columns = declared.get("columns", {})
    if not isinstance(columns, Mapping):
        wrong.append("columns must be a table with one entry per column")
        columns = {}
    declared["columns"] = {name: _column(name, entry, wrong) for name, entry in columns.items()}
    raise_all(wrong, where)
    return declared


def raise_all(wrong: Sequence[str], where: str) -> None:
    """Raises one error for everything that is wrong, if anything is.

    Raises:
        InputError: Something is wrong.
    """
    if len(wrong) == 1:
        raise InputError(f"{where}: {wrong[0]}")
    if wrong:
        raise InputError(f"{where} has {len(wrong)} errors:\n" + "\n".join(f"- {w}" for w in wrong))


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


def _column(name: str, entry: Any, wrong: list[str]) -> dict[str, Any]:
    """A column's declaration, checked; what is wrong is added to ``wrong``."""
    kinds = (*TYPES, "ignore")
    if not isinstance(entry, Mapping) or entry.get("type") not in kinds:
        wrong.append(f"column {name!r} needs a type, one of {', '.join(kinds)}")
        return {"type": "ignore"}
    kind = entry["type"]
    known = ("type",) if kind == "ignore" else ("type", *TYPES[kind].keys)
    before = len(wrong)
    for key in entry:
        if key not in known:
            wrong.append(
                f"a {kind} column such as {name!r} has no {key!r}; it has {', '.join(known)}"
            )
    checked = dict(entry)
    if "bounds" in entry and "bounds" in known:
        read = _days if kind == "date" else _bounds
        checked["bounds"] = read(entry["bounds"], f"bounds of {name!r}", wrong)
    if "values" in entry and "values" in known:
        checked["values"] = _vocabulary(entry["values"], f"values of {name!r}", wrong)
    if "missing_values" in entry and "missing_values" in known:
        words = entry["missing_values"]
        checked["missing_values"] = _words(words, f"missing_values of {name!r}", wrong)
    if not isinstance(entry.get("log", False), bool):
        wrong.append(f"log of {name!r} must be true or false")
    if entry.get("missing", "middle") not in ("middle", "flag"):
        wrong.append(f'missing of {name!r} must be "middle" or "flag"')
    if not isinstance(entry.get("format", ""), str):
        wrong.append(f"format of {name!r} must be text, such as '%d.%m.%Y'")
    _marks(entry, "", f"column {name!r}", wrong)
    if kind != "ignore" and len(wrong) == before and all(k in checked for k in TYPES[kind].needs):
        try:
            TYPES[kind].from_entry(name, checked)
        except (TypeError, ValueError, KeyError) as error:
            wrong.append(f"column {name!r}: {error}")
    return checked


def _marks(entry: Mapping[str, Any], prefix: str, what: str, wrong: list[str]) -> None:
    """Checks how numbers are written."""
    decimal, thousands = (
        entry.get(f"{prefix}decimal", "."),
        entry.get(f"{prefix}thousands", ""),
    )
    if decimal not in DECIMALS:
        wrong.append(f"{prefix}decimal of {what} must be '.' or ',', not {decimal!r}")
    if thousands not in THOUSANDS or thousands == decimal:
        wrong.append(
            f"{prefix}thousands of {what} must be empty, a comma, a point, a space or an"
            f" apostrophe, and not the decimal mark, not {thousands!r}"
        )


def _encoding(name: Any, wrong: list[str]) -> None:
    try:
        codecs.lookup(name)
    except (LookupError, TypeError):
        wrong.append(f"encoding must be a name such as utf-8 or cp1252, not {name!r}")


def _bounds(value: Any, what: str, wrong: list[str]) -> tuple[float, float]:
    good = isinstance(value, list | tuple) and len(value) == 2
    good = good and all(
        isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in value
    )
    if not good or not value[0] < value[1]:
        wrong.append(f"{what} must be two numbers, the lower first, not {value!r}")
        return 0.0, 1.0
    return float(value[0]), float(value[1])


def _days(value: Any, what: str, wrong: list[str]) -> tuple[str, str]:
    try:
        first, last = (
            (v if isinstance(v, date) else datetime.fromisoformat(v)).strftime("%Y-%m-%d")
            for v in value
        )
    except (TypeError, ValueError):
        first = last = ""
    if not first < last:
        wrong.append(f"{what} must be two dates as YYYY-MM-DD, the earlier first, not {value!r}")
        return "2000-01-01", "2001-01-01"
    return first, last


def _words(value: Any, what: str, wrong: list[str]) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value:
        wrong.append(f"{what} must be a list, not {value!r}")
        return ()
    if any(not isinstance(v, str | int | float) or isinstance(v, bool) for v in value):
        wrong.append(f"{what} must be words or numbers, written as in the data")
        return ()
    return tuple(str(v) for v in value)


def _vocabulary(value: Any, what: str, wrong: list[str]) -> tuple[str, ...]:
    words = _words(value, what, wrong)
    if not words:
        return ()
    if len(set(words)) < max(2, len(words)):
        wrong.append(f"{what} must be at least two different ones")
    return words
