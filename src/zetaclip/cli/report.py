"""``zetaclip report``: runs or an experiment as one HTML file."""

from __future__ import annotations

import argparse

DESCRIPTION = (
    "Write one self-contained HTML page. For a run: its metric, epsilon, clipping norm, spectra,"
    " calibration, time, ledger and configuration. For several runs: the same, compared. With"
    " --experiment: the results of `zetaclip reproduce`. The page needs no network, and can be"
    " mailed and printed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument(
        "folders",
        metavar="DIR",
        nargs="+",
        help="run folders, as `zetaclip train --out` writes them",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="the page (default: report.html in the first folder)"
    )
    parser.add_argument(
        "--experiment",
        metavar="NAME",
        help="DIR holds results of `zetaclip reproduce`: report this experiment",
    )
    parser.add_argument(
        "--tensorboard",
        action="store_true",
        help="also write each run's series into DIR/tensorboard (needs zetaclip[tensorboard])",
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="don't recompute epsilon and C from each ledger"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the page and prints its path.

    Raises:
        CommandError: The options don't fit together, or a folder contains no run.
    """
    from ..errors import CommandError
    from ..report import write_report

    if arguments.experiment is not None and len(arguments.folders) != 1:
        raise CommandError(
            "--experiment takes one folder, the one that `zetaclip reproduce --out` wrote"
        )
    if arguments.experiment is not None and arguments.tensorboard:
        raise CommandError(
            "--tensorboard writes the series of runs; give run folders, without --experiment"
        )
    path = write_report(
        arguments.folders,
        arguments.out,
        experiment=arguments.experiment,
        verify=not arguments.no_verify,
    )
    if arguments.tensorboard:
        from ..report.tensorboard import export

        for folder in arguments.folders:
            print(export(folder))
    print(path)
    return 0
