"""The user's own tables: .csv, .csv.gz or .parquet."""

from __future__ import annotations

import csv
import gzip
import os
import re
import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError, OwnerWarning, PrivacyLeakWarning
from .columns import encode, feature_names, is_missing, numbers, positions
from .dataset import Dataset, Split
from .declared import read_schema
from .frames import as_text, table_of
from .holdout import held_out, held_out_owners, owner_numbers
from .inputs import TableInput
from .schema import Schema, complete, with_text

if TYPE_CHECKING:
    from torch import Tensor

_DELIMITERS = ",;\t|"
_FEWEST = 10
_ROWS_PER_UNIT = 10
# Names of columns that say whose row it is.
_IDENTIFIER = re.compile(
    r"(^|_|\b)(id|uuid|guid|patient|user|customer|client|person|subject|member|vehicle)$", re.I
)


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
        InputError: The file cannot be read or does not fit the schema. For a missing target, an
            undeclared class, text where a number is expected, or a wrong number of fields, the
            message gives the line.

    **Edge cases.** A number outside its bounds is clipped to them; a missing one is the middle of
    its range; a missing or unknown category is a group of zeros.
    """
    if isinstance(test_share, bool) or not 0 <= test_share < 1:
        raise InputError(f"test_share must be at least 0 and below 1, not {test_share!r}")
    if isinstance(source, Path):
        (table, lines), name = read_table(source, delimiter), source.name
    else:
        (table, lines), name = table_of(source), "table"
        _check_size(lines, "the table", _FEWEST)
    declared: Mapping[str, Any] = read_schema(schema) if schema is not None else {}
    owners = None
    if unit is not None:
        owners, declared = _owners(table, lines, unit, declared)
    elif rows_per_unit is not None:
        raise InputError("rows_per_unit needs unit, the column that says whose row it is")
    if text is not None:
        declared = with_text(declared, text, table)
    meaning = complete(table, declared, target, task)
    if unit is None:
        _warn_of_identifiers(table, meaning.target)
    if meaning.inferred:
        warnings.warn(
            f"{name}: inferred from the data, which ε does not cover: "
            f"{'; '.join(meaning.inferred)}. Declare them in a schema "
            "(`zetaclip data schema FILE` writes a template)"
            + (f". What was made of it: {'; '.join(meaning.notes)}" if meaning.notes else ""),
            PrivacyLeakWarning,
            stacklevel=3,
        )
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
        private_statistics=meaning.inferred,
        target_range=meaning.target_range,
        features=feature_names(meaning.columns),
        target=meaning.target,
        inputs=TableInput(
            meaning.columns, meaning.ignored if unit is None else (*meaning.ignored, unit)
        ),
        owners=kept,
        rows_per_unit=None if unit is None else (rows_per_unit or _ROWS_PER_UNIT),
    )


def read_table(
    path: Path, delimiter: str | None = None, fewest: int = _FEWEST
) -> tuple[dict[str, list[str]], list[int]]:
    """Reads a table as text.

    Args:
        path: The file.
        delimiter: Field separator of a text file; guessed from the first line if not given.
        fewest: The least number of records.

    Returns:
        The fields by column, and the line of each record.

    Raises:
        InputError: The file cannot be read, or has too few records.
    """
    names = "".join(path.suffixes[-2:]).lower()
    if names.endswith((".parquet", ".pq")):
        table = _parquet(path)
        lines = list(range(1, len(next(iter(table.values()), [])) + 1))
    elif names.endswith((".csv", ".csv.gz", ".tsv", ".txt")):
        table, lines = _csv(path, delimiter)
    else:
        raise InputError(f"{path} is not a .csv, .csv.gz, .tsv, .txt or .parquet file")
    _check_size(lines, str(path), fewest)
    return table, lines


def _check_size(lines: Sequence[int], where: str, fewest: int) -> None:
    if not lines:
        raise InputError(f"{where} has no records")
    if len(lines) < fewest:
        raise InputError(f"{where} has {len(lines)} records; at least {fewest} are needed")


def _csv(path: Path, delimiter: str | None) -> tuple[dict[str, list[str]], list[int]]:
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        with _open(path) as file:
            first = file.readline()
            file.seek(0)
            mark = delimiter or max(_DELIMITERS, key=first.count)
            reader = csv.reader(file, delimiter=mark, strict=True)
            header = [name.strip() for name in next(reader, [])]
            _check_header(path, header)
            for row in reader:
                if not row:
                    continue  # an empty line
                if len(row) != len(header):
                    raise InputError(
                        f"{path}, line {reader.line_num}: {len(row)} fields, "
                        f"but the header has {len(header)}"
                    )
                rows.append(row)
                lines.append(reader.line_num)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}") from error
    except (OSError, EOFError, zlib.error, csv.Error, TypeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    return {name: [row[i] for row in rows] for i, name in enumerate(header)}, lines


def _open(path: Path) -> IO[str]:
    options: dict[str, Any] = {"encoding": "utf-8-sig", "newline": ""}
    return gzip.open(path, "rt", **options) if path.suffix == ".gz" else open(path, **options)


def _check_header(path: Path, header: Sequence[str]) -> None:
    if not any(header):
        raise InputError(f"{path} is empty: the first line must name the columns")
    for i, name in enumerate(header):
        if not name:
            raise InputError(
                f"{path}: column {i + 1} has no name. If it is a row number, "
                "name it or write the file without it"
            )
        if name in header[:i]:
            raise InputError(f"{path}: two columns are called {name!r}")


def _parquet(path: Path) -> dict[str, list[str]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(
            "reading .parquet needs pyarrow: pip install 'zetaclip[parquet]'"
        ) from error
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    _check_header(path, table.column_names)
    return {
        name: [as_text(value) for value in table.column(name).to_pylist()]
        for name in table.column_names
    }


def _targets(fields: Sequence[str], meaning: Schema, lines: Sequence[int]) -> np.ndarray:
    for field, line in zip(fields, lines, strict=True):
        if is_missing(field) and field.strip() not in meaning.classes:
            raise InputError(
                f"line {line}: the target {meaning.target} is missing; "
                "remove such rows, or fill them in"
            )
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
        raise InputError(f"there is no column {unit!r} for the unit; there are: {', '.join(table)}")
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


def _warn_of_identifiers(table: dict[str, list[str]], target: str) -> None:
    """Tells the owner if rows seem to belong to the same people."""
    for name, fields in table.items():
        repeats = len(fields) - len(set(fields))
        if name != target and _IDENTIFIER.search(name) and repeats > len(fields) // 10:
            warnings.warn(
                f"column {name!r} looks like an identifier, and its values repeat. ε is for one row"
                f" then, not for one {name} with all its rows: `unit` (--unit {name}) protects"
                " these. To protect rows, leave the column out with a schema",
                OwnerWarning,
                stacklevel=4,
            )


def _treatments(meaning: Schema, share: float, seed: int, unit: str | None) -> tuple[str, ...]:
    """How unusual values are treated. The text is the same for all data: counts are private."""
    notes = [
        "numbers are clipped to their bounds, a missing one is the middle of them; "
        "a missing or unknown category is a group of zeros"
    ]
    if meaning.target_range is not None:
        low, high = meaning.target_range
        notes.append(f"the target is clipped to {low:g} to {high:g}")
    if share:
        notes.append(
            f"about a share of {share:g} is held out for testing, "
            + ("each row by its content" if unit is None else f"each {unit} by its name")
            + f" and the public seed {seed}"
        )
    return tuple(notes)
