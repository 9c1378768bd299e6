"""Reads what ``zetaclip reproduce`` writes; no other code of the report knows its files.

These are ``table.json`` and ``runs.csv`` in a folder named after the experiment, and the run
folders beside it.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CommandError
from .lines import number, parse_object


@dataclass(frozen=True)
class Place:
    """One cell of the table.

    Args:
        ours: Our mean over seeds.
        spread: Our standard deviation.
        seeds: The number of seeds.
        theirs: The paper's mean.
        their_spread: The paper's standard deviation.
        difference: Our paired difference from the baseline.
        interval: The 95 % interval of the difference.
        better: Whether the difference is an improvement.
        finished: The number of finished runs.
        diverged: How many of them diverged.
    """

    ours: float | None = None
    spread: float | None = None
    seeds: int = 0
    theirs: float | None = None
    their_spread: float | None = None
    difference: float | None = None
    interval: tuple[float, float] | None = None
    better: bool | None = None
    finished: int = 0
    diverged: int = 0

    @property
    def decided(self) -> bool:
        """Whether the interval excludes zero; only then may anything be printed bold."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


@dataclass(frozen=True)
class Line:
    """A row of the table."""

    label: str
    group: str
    cells: tuple[Place | None, ...]


@dataclass(frozen=True)
class Experiment:
    """The results of one experiment.

    Args:
        name: The experiment's name.
        folder: Where its table is.
        title: One line about it.
        command: The command that made it.
        commit: The commit it was made with.
        baseline: The row that others are compared with.
        columns: The headings.
        lines: The rows.
        notes: Remarks for the reader.
        runs: The rows of runs.csv.
        folders: The run folder of each of ``runs``, or None.
        planned: How many runs were planned.
    """

    name: str
    folder: Path
    title: str
    command: str
    commit: str
    baseline: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...]
    runs: tuple[dict[str, str], ...]
    folders: tuple[Path | None, ...]
    planned: int


def read_experiment(root: Path, name: str) -> Experiment:
    """What ``zetaclip reproduce NAME --out ROOT`` wrote.

    Args:
        root: The folder of results.
        name: The experiment.

    Raises:
        CommandError: Results are missing or damaged; the message says which.
    """
    folder = root / name
    path = folder / "table.json"
    if not path.is_file():
        raise CommandError(_missing(root, name))
    found = parse_object(path.read_bytes())
    rows = found.get("rows") if found else None
    columns = found.get("columns") if found else None
    if found is None or not isinstance(rows, list) or not isinstance(columns, list):
        raise CommandError(f"{path} is damaged; write it again with `zetaclip reproduce {name}`")
    lines = [_line(row, len(columns)) for row in rows if isinstance(row, dict)]
    runs = _runs(folder / "runs.csv")
    notes = found.get("notes")
    totals = found.get("runs")
    planned = number(totals.get("planned")) if isinstance(totals, dict) else None
    return Experiment(
        name,
        folder,
        str(found.get("title") or name),
        str(found.get("command") or f"zetaclip reproduce {name}"),
        str(found.get("commit") or "unknown"),
        str(found.get("baseline") or ""),
        tuple(str(column) for column in columns),
        tuple(lines),
        tuple(str(note) for note in notes) if isinstance(notes, list) else (),
        tuple(runs),
        tuple(_folder(root, folder, row) for row in runs),
        int(planned) if planned is not None else len(runs),
    )


def _missing(root: Path, name: str) -> str:
    if not root.is_dir():
        return f"{root}: no such folder; give the one that `zetaclip reproduce --out` wrote"
    there = sorted(child.name for child in root.iterdir() if (child / "table.json").is_file())
    listed = f"there are results of: {', '.join(there)}" if there else "there are no results in it"
    return (
        f"{root} holds no results of the experiment {name!r}; {listed}. `zetaclip reproduce {name}`"
        " makes them"
    )


def _line(row: dict[str, Any], width: int) -> Line:
    cells = row.get("cells")
    places = [_place(cell) for cell in cells] if isinstance(cells, list) else []
    places += [None] * (width - len(places))
    return Line(str(row.get("label", "")), str(row.get("group") or ""), tuple(places[:width]))


def _place(cell: Any) -> Place | None:
    if not isinstance(cell, dict):
        return None
    ours, theirs, difference = (
        value if isinstance(value := cell.get(key), dict) else {}
        for key in ("ours", "published", "difference")
    )
    low, high = number(difference.get("low")), number(difference.get("high"))
    better = cell.get("better")
    return Place(
        number(ours.get("mean")),
        number(ours.get("std")),
        int(number(ours.get("n")) or 0),
        number(theirs.get("mean")),
        number(theirs.get("std")),
        number(difference.get("mean")),
        None if low is None or high is None else (low, high),
        better if isinstance(better, bool) else None,
        int(number(cell.get("finished")) or 0),
        int(number(cell.get("diverged")) or 0),
    )


def _runs(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        return [
            {str(key): value or "" for key, value in row.items() if key}
            for row in csv.DictReader(file)
        ]


def _folder(root: Path, folder: Path, row: dict[str, str]) -> Path | None:
    """The run folder that a row names; a path outside the results is ignored."""
    named = row.get("run", "")
    for base in (root / "runs", root, folder):
        path = base / named
        if (
            named
            and (path / "config.json").is_file()
            and path.resolve().is_relative_to(root.resolve())
        ):
            return path
    return None
