"""The first page of a results folder: every experiment, and how much of it has been run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import spec
from .files import read_json, write_text
from .progress import duration
from .store import Store
from .tables import grid, open_part


def write(store: Store) -> None:
    """Writes ``README.md`` from the tables in the folder, and lists experiments without one."""
    lines, missing, begun = [], [], set()
    for path in sorted(store.out.glob("*/table.json")):
        folder = path.parent.name
        try:
            table = read_json(path)
            line, left = _line(folder, table), _missing(folder, table)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            missing.append(f"- {folder}: its table.json can't be read")
            continue
        lines.append(line)
        missing += left
        begun.add(folder)
    for name in spec.names():
        if name not in begun:
            missing.append(
                f"- {name}: not started, `zetaclip reproduce {name}`; `--dry-run` estimates the"
                " time"
            )
    write_text(store.out / "README.md", _page(lines, missing))


def _page(lines: Sequence[Sequence[str]], missing: Sequence[str]) -> str:
    page = [
        "# Results",
        "",
        (
            "Written by `zetaclip reproduce`; docs/experiments.md has the protocol and"
            " docs/reproduction.md the verdicts. Each experiment's folder contains its table, one"
            " CSV line per run, and its plots. Times are for what is certain: seeds are added while"
            " a comparison is open."
        ),
        "",
        *grid(["experiment", "runs done", "left, of one worker"], lines),
    ]
    if missing:
        page += ["## Not run", "", *missing, ""]
    return "\n".join(page).rstrip() + "\n"


def _line(folder: str, table: Mapping[str, Any]) -> list[str]:
    runs, parts = table["runs"], table.get("missing", [])
    known = [part["seconds"] for part in parts if part["seconds"] is not None]
    left = duration(sum(known)) if known else "–"
    if len(known) < len(parts):
        left = f"over {left}" if known else "not known"
    title = f"[{folder}]({folder}/table.md): {table['title']}"
    return [title, f"{runs['finished']} of {runs['planned']}", left]


def _missing(folder: str, table: Mapping[str, Any]) -> list[str]:
    """What is not run, if the table says so; older tables don't."""
    return [f"- {folder}: {open_part(part)}" for part in table.get("missing", [])]
