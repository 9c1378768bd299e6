"""The user's own tables: a file, or a table in memory, and a schema -> a ``Dataset``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError, OwnerWarning, PrivacyLeakWarning
from ..words import counted, grouped
from .columns import encode, feature_names, has_no_value, is_missing, numbers, positions
from .dataset import Dataset, Split
from .declared import read_schema
from .frames import table_of
from .guess import guess, is_identifier
from .holdout import held_out, held_out_owners, owner_numbers
from .inputs import TableInput
from .reading import GUESSED, check_size, encoding_of, read_table
from .schema import Schema, complete, near_column, with_text

if TYPE_CHECKING:
    from torch import Tensor

_ROWS_PER_UNIT = 10


def own_table(
    source: Any,
    *,
    target: str | None = None,
    task: str | None = None,
    text: str | None = None,
    schema: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    test_share: float = 0.2,
    seed: int = 0,
    delimiter: str | None = None,
    unit: str | None = None,
    rows_per_unit: int | None = None,
) -> Dataset:
    """A table as a ``Dataset``; one record is one row, and a unit is a row or several of them.

    Args:
        source: The file, or a table in memory: see ``frames.table_of``.
        target: The column to predict, if the schema does not declare it.
        task: "classification", "binary" or "regression", if the schema does not declare it.
        text: A column of free text to predict from. Without a schema no other column is used.
        schema: Types, bounds and vocabularies of the columns, as a file or a mapping. What is not
            declared is inferred from the data, with a ``PrivacyLeakWarning``.
        test_share: Expected share of the rows that is held out for testing. Each row is chosen by
            its content and the public seed, so that one more row does not move others. 0 holds out
            nothing.
        seed: Public seed of the split.
        delimiter: Field separator of a text file; guessed from the first line if not given.
        unit: The column that says whose row it is. It is no feature; the split goes by it.
        rows_per_unit: The largest number of rows that a unit brings into a batch (default: 10).

    Returns:
        The data.

    Raises:
        InputError: The file cannot be read or does not fit the schema. For an undeclared class,
            text where a number is expected, or a wrong number of fields, the message gives the
            line.

    **Edge cases.** A number outside its bounds is clipped to them; a missing one is the middle of
    its range; a missing or unknown category is a group of zeros. A row without a target is left
    out, with an ``OwnerWarning``; that depends on this row alone, so ε holds.
    """
    if isinstance(test_share, bool) or not 0 <= test_share < 1:
        raise InputError(f"test_share must be at least 0 and below 1, not {test_share!r}")
    declared: Mapping[str, Any] = read_schema(schema) if schema is not None else {}
    inferred: tuple[str, ...] = ()
    if isinstance(source, Path):
        encoding = declared.get("encoding") or encoding_of(source)
        (table, lines), name = read_table(source, delimiter, encoding=encoding), source.name
        if encoding == GUESSED and "encoding" not in declared:
            inferred = (f"encoding of the file ({GUESSED}, because it is not UTF-8)",)
    else:
        (table, lines), name = table_of(source), "table"
        check_size(lines, "the table")
    owners = None
    if unit is not None:
        owners, declared = _owners(table, lines, unit, declared)
    elif rows_per_unit is not None:
        raise InputError("rows_per_unit needs unit, the column that says whose row it is")
    used = declared if text is None else with_text(declared, text, table)
    meaning = complete(table, used, target, task)
    if unit is None:
        _warn_of_identifiers(table, meaning.target, declared)
    inferred = (*meaning.inferred, *inferred)
    if inferred:
        warnings.warn(
            f"{name}: inferred from the data, which ε does not cover: {grouped(inferred)}. Declare"
            " them in a schema (`zetaclip data schema FILE` writes a template)"
            + "".join(f"\n- {note}" for note in meaning.notes),
            PrivacyLeakWarning,
            stacklevel=3,
        )
    table, lines, owners = _with_target(table, lines, owners, meaning)
    check_size(lines, f"{name}, without the rows that have no {meaning.target},")
    x = encode(meaning.columns, table, lines)
    y = _targets(table[meaning.target], meaning, lines)
    train, test, kept = _parts(x, y, test_share, seed, owners)
    return Dataset(
        name=name,
        task=meaning.task,
        train=train,
        test=test,
        outputs=len(meaning.classes) if meaning.task == "classification" else 1,
        unit="one row" if unit is None else f"one {unit} with all its rows",
        classes=meaning.classes,
        public=False,
        notes=(*_treatments(meaning, test_share, seed, unit), *meaning.notes),
        private_statistics=inferred,
        target_range=meaning.target_range,
        features=feature_names(meaning.columns),
        target=meaning.target,
        inputs=TableInput(
            meaning.columns, meaning.ignored if unit is None else (*meaning.ignored, unit)
        ),
        owners=kept,
        rows_per_unit=None if unit is None else (rows_per_unit or _ROWS_PER_UNIT),
    )


def _with_target(
    table: dict[str, list[str]], lines: list[int], owners: np.ndarray | None, meaning: Schema
) -> tuple[dict[str, list[str]], list[int], np.ndarray | None]:
    """The rows that have a target, with their lines and owners."""
    missing = is_missing if meaning.target_range is None else has_no_value
    known = set(meaning.classes)
    kept = [
        i
        for i, field in enumerate(table[meaning.target])
        if not missing(field) or field.strip() in known
    ]
    if len(kept) == len(lines):
        return table, lines, owners
    warnings.warn(
        f"{counted(len(lines) - len(kept), 'row')} without {meaning.target} left out. The number is"
        " private; no file of the run has it",
        OwnerWarning,
        stacklevel=4,
    )
    table = {name: [fields[i] for i in kept] for name, fields in table.items()}
    return table, [lines[i] for i in kept], None if owners is None else owners[kept]


def _targets(fields: Sequence[str], meaning: Schema, lines: Sequence[int]) -> np.ndarray:
    if meaning.target_range is not None:
        values = numbers(fields, meaning.target, lines, *meaning.target_marks)
        return np.clip(values, *meaning.target_range).astype(np.float32)
    labels = positions(fields, meaning.classes)
    for i in np.flatnonzero(labels < 0).tolist():
        raise InputError(
            f"line {lines[i]}: {fields[i].strip()!r} is not among the declared classes "
            f"{', '.join(meaning.classes)}"
        )
    if labels.min() == labels.max():
        # Not an error: otherwise the existence of a result would reveal a record of another class.
        warnings.warn(
            f"every record is of the class {meaning.classes[labels[0]]!r}",
            OwnerWarning,
            stacklevel=2,
        )
    return labels.astype(np.float32) if meaning.task == "binary" else labels


def _parts(
    x: np.ndarray, y: np.ndarray, share: float, seed: int, owners: np.ndarray | None
) -> tuple[Split, Split | None, Tensor | None]:
    """The records for training and for testing, and the owners of the first."""
    import torch

    testing = (
        held_out(x, y, share, seed, "test")
        if owners is None
        else held_out_owners(owners, share, seed, "test")
    )
    if testing.all() or (share and not testing.any()):
        raise InputError(
            f"{len(y)} records are too few to hold out a share of {share:g}, or take another seed"
        )
    train, test = (
        Split(torch.from_numpy(x[rows]), torch.from_numpy(y[rows])) for rows in (~testing, testing)
    )
    kept = None if owners is None else torch.from_numpy(owners[~testing])
    return train, test if share else None, kept


def _owners(
    table: dict[str, list[str]], lines: list[int], unit: str, declared: Mapping[str, Any]
) -> tuple[np.ndarray, Mapping[str, Any]]:
    """Takes the column of units out of the table, and out of the schema if it is there.

    Raises:
        InputError: There is no such column, or a row has no unit.
    """
    if unit not in table:
        raise InputError(f"{near_column(unit, table)} For the unit there are: {', '.join(table)}")
    names = table.pop(unit)
    for name, line in zip(names, lines, strict=True):
        if is_missing(name):
            raise InputError(
                f"line {line} has no {unit}: say whose row it is, or leave the row out"
            )
    columns = {name: entry for name, entry in declared.get("columns", {}).items() if name != unit}
    return owner_numbers(names), {
        **declared,
        **({"columns": columns} if columns else {}),
    }


def _warn_of_identifiers(
    table: dict[str, list[str]], target: str, declared: Mapping[str, Any]
) -> None:
    """Tells the owner if rows seem to belong to the same people."""
    entries = declared.get("columns", {})
    for name, fields in table.items():
        if name == target or entries.get(name, {}).get("type") == "ignore":
            continue
        repeats = len(fields) - len(set(fields))
        if repeats <= len(fields) // 10:
            continue
        unnamed = name not in entries and guess(name, fields).is_identifier
        if is_identifier(name) or unnamed:
            warnings.warn(
                f"column {name!r} looks like an identifier, and its values repeat. ε is for one row"
                f" then, not for one {name} with all its rows: unit={name!r} protects these. To"
                ' protect rows, declare the column in a schema with type = "ignore"',
                OwnerWarning,
                stacklevel=4,
            )


def _treatments(meaning: Schema, share: float, seed: int, unit: str | None) -> tuple[str, ...]:
    """How unusual values are treated. The text is the same for all data: counts are private."""
    notes = [
        "numbers are clipped to their bounds, a missing one is the middle of them; "
        "a missing or unknown category is a group of zeros; a row without a target is left out"
    ]
    if meaning.target_range is not None:
        low, high = meaning.target_range
        # Inferred bounds are the targets of two records: a note would publish them.
        inferred = any(what.startswith("bounds of the target") for what in meaning.inferred)
        bounds = "its inferred bounds" if inferred else f"{low:g} to {high:g}"
        notes.append(f"the target is clipped to {bounds}")
    if share:
        notes.append(
            f"about a share of {share:g} is held out for testing, "
            + ("each row by its content" if unit is None else f"each {unit} by its name")
            + f" and the public seed {seed}"
        )
    return tuple(notes)
