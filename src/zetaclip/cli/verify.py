"""``zetaclip verify``: recomputes what a finished run claims."""

from __future__ import annotations

import argparse

DESCRIPTION = (
    "Recompute ε from the ledger and every clipping norm from the saved probes, and compare them"
    " with the run's result. Differences are printed; the exit code is then 1."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("folders", metavar="DIR", nargs="+", help="folders of finished runs")
    parser.add_argument(
        "--json", action="store_true", help="print the problems of each folder as JSON"
    )


def run(arguments: argparse.Namespace) -> int:
    """Verifies each folder; returns 1 if anything differs."""
    import json

    from ..training.verify import verify

    found = {folder: verify(folder) for folder in arguments.folders}
    if arguments.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        for folder, problems in found.items():
            print(f"{folder}: {'all fits' if not problems else 'does not fit'}")
            for problem in problems:
                print(f"  {problem}")
    return int(any(found.values()))
