"""``zetaclip probe``: the spectral exponents of a checkpoint's matrices."""

from __future__ import annotations

import argparse

from ..errors import CommandError

DESCRIPTION = (
    "Print a table of every matrix in a checkpoint: its spectral exponent zeta with its error,"
    " where the tail begins, how well a power law fits, the exponents of random matrices of that"
    " shape, and a verdict. Nothing in the file is executed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("file", metavar="FILE", help="a .pt or .safetensors checkpoint")
    parser.add_argument("--layer", metavar="GLOB", help="only matrices whose name matches")
    parser.add_argument(
        "--fit",
        choices=("rank", "hill", "ks"),
        default="rank",
        help="how the tail is fitted (default: rank)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", metavar="OUT.png", help="draw each spectrum with its fitted tail")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table, and draws the spectra if asked to.

    Raises:
        CommandError: The file can't be read, no matrix matches, or the plot can't be written.
    """
    import fnmatch
    import json

    from ..spectrum import report
    from ..spectrum.checkpoint import CheckpointError, load_matrices

    try:
        matrices = load_matrices(arguments.file)
    except (CheckpointError, OSError) as error:
        raise CommandError(error) from error
    if arguments.layer is not None:
        names = [name for name in matrices if fnmatch.fnmatchcase(name, arguments.layer)]
        if not names:
            raise CommandError(
                f"no matrix matches {arguments.layer!r}; there are: {', '.join(matrices)}"
            )
        matrices = {name: matrices[name] for name in names}
    rows = report.examine(matrices, arguments.fit)
    print(
        json.dumps(report.as_records(rows), indent=2) if arguments.json else report.as_table(rows)
    )
    if arguments.plot:
        try:
            report.plot(rows, arguments.plot)
        except ImportError as error:
            raise CommandError("--plot needs matplotlib: pip install 'zetaclip[report]'") from error
        except (OSError, ValueError) as error:  # no such folder, or no image format
            raise CommandError(f"cannot write {arguments.plot}: {error}") from error
    return 0
