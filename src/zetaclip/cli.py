"""The command ``zetaclip``.

A subcommand is one function that adds its parser and names what runs. Whatever costs time to import is
imported where it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


class CommandError(Exception):
    """Something the user can put right: printed without a traceback, exit code 2."""


def add_probe(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "probe",
        help="the spectral exponents of a checkpoint's matrices",
        description="A table of every matrix in a checkpoint: its spectral exponent zeta with its error, "
        "where the tail begins, how well a power law fits, what random matrices of that shape read, and a "
        "verdict. Nothing in the file is executed.",
    )
    parser.add_argument("file", metavar="FILE", help="a .pt or .safetensors checkpoint")
    parser.add_argument("--layer", metavar="GLOB", help="only matrices whose name matches")
    parser.add_argument(
        "--fit", choices=("rank", "hill", "ks"), default="rank", help="how the tail is fitted (default: rank)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", metavar="OUT.png", help="draw each spectrum with its fitted tail")
    parser.set_defaults(run=run_probe)


def run_probe(arguments: argparse.Namespace) -> int:
    import fnmatch
    import json

    from .spectrum import report
    from .spectrum.checkpoint import CheckpointError, load_matrices

    try:
        matrices = load_matrices(arguments.file)
    except (CheckpointError, OSError) as error:
        raise CommandError(error) from error
    if arguments.layer is not None:
        names = [name for name in matrices if fnmatch.fnmatchcase(name, arguments.layer)]
        if not names:
            raise CommandError(f"no matrix matches {arguments.layer!r}; there are: {', '.join(matrices)}")
        matrices = {name: matrices[name] for name in names}
    rows = report.examine(matrices, arguments.fit)
    print(json.dumps(report.as_records(rows), indent=2) if arguments.json else report.as_table(rows))
    if arguments.plot:
        try:
            report.plot(rows, arguments.plot)
        except ImportError as error:
            raise CommandError("--plot needs matplotlib: pip install matplotlib") from error
        except (OSError, ValueError) as error:  # no such folder, or an ending that is no image format
            raise CommandError(f"cannot write {arguments.plot}: {error}") from error
    return 0


COMMANDS: tuple[Callable[[Subparsers], None], ...] = (add_probe,)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zetaclip",
        description="Differentially private PyTorch training whose clipping threshold tunes itself.",
    )
    parser.add_argument("--version", action="version", version=_version())
    subparsers: Any = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in COMMANDS:
        add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. 2: wrong usage or input."""
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except CommandError as error:
        print(f"zetaclip: {error}", file=sys.stderr)
        return 2


def _version() -> str:
    from . import __version__

    return f"zetaclip {__version__}"
