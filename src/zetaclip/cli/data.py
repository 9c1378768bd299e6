"""``zetaclip data``: lists and downloads data sets, and writes schemas for your own files."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

DESCRIPTION = (
    "List the known data sets and where they are, download them with checks, and write schemas for"
    " your own files."
)
EPILOG = """examples:
  zetaclip data list
  zetaclip data fetch mnist --data-root ~/data
  zetaclip data schema people.csv --target income > people.toml
  zetaclip data schema people.csv --target income --values > people.toml   bounds and words too"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the actions and their options."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    listing = actions.add_parser("list", help="the known sets, where they are, and their sizes")
    listing.add_argument("--json", action="store_true", help="print JSON instead of a table")
    fetching = actions.add_parser(
        "fetch", help="download a set's original files, with checks; can be resumed"
    )
    fetching.add_argument("name", metavar="NAME", help="a set, as `zetaclip data list` names it")
    for action in (listing, fetching):
        action.add_argument(
            "--data-root",
            metavar="DIR",
            help="where the sets are (default: $ZETACLIP_DATA, then the user's data folder)",
        )
    schema = actions.add_parser(
        "schema", help="print a schema to fill in, from the columns of a file"
    )
    schema.add_argument("file", metavar="FILE", help="a .csv, .csv.gz or .parquet file")
    schema.add_argument("--target", metavar="COLUMN", help="the column to predict")
    schema.add_argument(
        "--values",
        action="store_true",
        help="fill in bounds, values and classes from the data: ε does not cover what they reveal",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the chosen action."""
    action = {"list": _list, "fetch": _fetch, "schema": _schema}[arguments.action]
    return action(arguments)


def _list(arguments: argparse.Namespace) -> int:
    import json

    from ..data.places import find
    from ..data.registry import names
    from ..data.sources import SOURCES

    rows = []
    for name in names():
        place = find(name, arguments.data_root)
        if name == "digits":
            state, where, size = "bundled", "scikit-learn", None
        elif place is not None:
            state, where, size = place.kind, str(place.folder), place.size
        else:
            state, where, size = (
                "missing",
                "zetaclip data fetch " + name if name in SOURCES else "by hand",
                None,
            )
        rows.append({"name": name, "state": state, "where": where, "bytes": size})
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        print(f"{row['name']:<16} {row['state']:<8} {_megabytes(row['bytes']):>9}  {row['where']}")
    return 0


def _fetch(arguments: argparse.Namespace) -> int:
    from ..data.fetch import fetch
    from ..data.places import roots
    from ..data.registry import ALIASES

    known, _ = ALIASES.get(arguments.name, (arguments.name, None))
    root = roots(arguments.data_root)[0]
    bar = _Bar()
    try:
        files = fetch(known, root, bar)
    finally:
        bar.close()
    for path in files:
        print(path)
    return 0


def _schema(arguments: argparse.Namespace) -> int:
    from ..data.reading import GUESSED, encoding_of, read_table
    from ..data.template import template

    path = Path(arguments.file)
    table, _ = read_table(path)
    encoding = GUESSED if encoding_of(path) == GUESSED else ""
    print(template(table, arguments.target, arguments.values, encoding), end="")
    guessed = "types, bounds, values and classes are" if arguments.values else "the types are"
    print(
        f"warning: {guessed} guessed from the data, and ε does not cover what a guess reveals; go"
        " through them before you train on private data",
        file=sys.stderr,
    )
    return 0


def _megabytes(size: object) -> str:
    return f"{size / 1e6:.1f} MB" if isinstance(size, int) else ""


class _Bar:
    """A progress bar on a terminal; elsewhere one line per file."""

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()
        self.name = ""
        self.drawn = 0.0

    def __call__(self, name: str, done: int, total: int) -> None:
        if name != self.name:
            self.close()
            self.name = name
            if not self.terminal:
                print(
                    f"fetching {name} ({_megabytes(total) if total else 'size unknown'})",
                    file=sys.stderr,
                )
        now = time.monotonic()
        if self.terminal and (now - self.drawn > 0.1 or done == total):
            self.drawn = now
            width = max(10, min(40, os.get_terminal_size(sys.stderr.fileno()).columns - 50))
            filled = width * done // total if total else 0
            print(
                f"\r{name[:28]:<28} [{'#' * filled}{'.' * (width - filled)}] {done / 1e6:8.1f} MB",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """Ends the line of the bar."""
        if self.terminal and self.name:
            print(file=sys.stderr)
