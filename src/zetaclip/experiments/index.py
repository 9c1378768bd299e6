"""The first page of a results folder: every experiment, how much of it is there, and what is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import spec
from .progress import duration
from .store import Store, read_json, write_text
from .tables import grid, open_part


def write(store: Store) -> None:
    """``README.md`` out of the tables that the folder holds, and the names of the experiments that have none."""
    found, unread = [], []
    for path in sorted(store.out.glob("*/table.json")):
        try:
            table = read_json(path)
            _line(path.parent, table), _missing(path.parent, table)
            found.append((path.parent, table))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            unread.append(path.parent.name)
    begun = {folder.name for folder, _ in found}
    never = [name for name in spec.names() if not {spec.folder_of(name, one) for one in spec.PROFILES} & begun]
    write_text(store.out / "README.md", page(found, never, unread))


def page(found: Sequence[tuple[Path, Mapping[str, Any]]], never: Sequence[str] = (), unread: Sequence[str] = ()) -> str:
    lines = [
        "# Results",
        "",
        "Written by `zetaclip reproduce`. Each experiment's folder holds its table, one CSV line per run, and its plots.",
        "",
        *grid(["experiment", "profile", "runs done", "left, of one worker"], [_line(*one) for one in found]),
    ]
    missing = [line for folder, table in found for line in _missing(folder, table)]
    missing += [
        f"- {name}: nothing of it, `zetaclip reproduce {name}`; `--dry-run` tells how long it takes" for name in never
    ]
    missing += [f"- {name}: its table.json can't be read" for name in unread]
    if missing:
        lines += ["## Not run", "", *missing, ""]
    if not any(table["profile"] == "paper" and table["runs"]["finished"] for _, table in found):
        lines += [
            "The paper's own protocol (full networks, lengths and five seeds; CIFAR, the published EMNIST split and ImageNet-100 want a GPU) has not "
            "been run: `zetaclip reproduce NAME --profile paper`, and `--dry-run` tells how long it takes.",
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def _line(folder: Path, table: Mapping[str, Any]) -> list[str]:
    runs, parts = table["runs"], table.get("missing", [])
    known = [part["seconds"] for part in parts if part["seconds"] is not None]
    left = duration(sum(known)) if known else "–"
    if len(known) < len(parts):
        left = f"over {left}" if known else "not known"
    title = f"[{folder.name}]({folder.name}/table.md): {table['title']}"
    return [title, table["profile"], f"{runs['finished']} of {runs['planned']}", left]


def _missing(folder: Path, table: Mapping[str, Any]) -> list[str]:
    """A table from before these were kept has none."""
    texts = [*map(open_part, table.get("missing", [])), *table.get("left_out", [])]
    return [f"- {folder.name}: {text}" for text in texts]
