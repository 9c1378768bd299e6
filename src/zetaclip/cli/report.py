"""``zetaclip report``: runs or an experiment as one HTML file."""

from __future__ import annotations

import argparse

DESCRIPTION = (
    "Writes one self-contained HTML page: for a run its accuracy, epsilon, clipping norm, spectra,"
    " calibration, time, ledger and configuration; for several runs the same laid over each other;"
    " with --experiment the results of `zetaclip reproduce`. It opens without a network, and can be"
    " mailed and printed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        "--profile",
        choices=("lite", "paper"),
        help="of the experiment (default: paper where it was run, else lite)",
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
    if arguments.experiment is None and arguments.profile is not None:
        raise CommandError("--profile is the profile of an experiment; it needs --experiment NAME")
    path = write_report(
        arguments.folders,
        arguments.out,
        experiment=arguments.experiment,
        profile=arguments.profile,
        verify=not arguments.no_verify,
    )
    if arguments.tensorboard:
        from ..report.tensorboard import export

        for folder in arguments.folders:
            print(export(folder))
    print(path)
    return 0
