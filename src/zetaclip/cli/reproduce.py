"""``zetaclip reproduce``: runs an experiment of the paper beside the published numbers."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from ..errors import CommandError

DESCRIPTION = (
    "Run an experiment of the paper, or one of your own from a TOML file. Finished runs are reused"
    " and interrupted ones are resumed, so the same command always continues."
)
EPILOG = """\
examples:
  zetaclip reproduce --list
  zetaclip reproduce controls --dry-run
  zetaclip reproduce iid --only data=mnist,method=dp-sgd,ww-dp-sgd,seed=1
  zetaclip reproduce tabular --ray auto --out /shared/results
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    from ..experiments.spec import OUT

    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="an experiment (see --list), or a TOML file of your own",
    )
    parser.add_argument("--list", action="store_true", help="list the experiments")
    parser.add_argument(
        "--only",
        metavar="KEY=VALUE,...",
        help="run a part: method, data, seed, row, group or reading",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="runs at a time (default: one per core)"
    )
    parser.add_argument(
        "--ray", metavar="ADDRESS", help="run on a Ray cluster: auto, local, or an address"
    )
    parser.add_argument(
        "--out", default=OUT, metavar="DIR", help=f"the results folder (default: {OUT})"
    )
    parser.add_argument(
        "--data-root", metavar="DIR", help="where the data sets are (default: ZETACLIP_DATA)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the runs and an estimate of time, run nothing"
    )
    parser.add_argument(
        "--tables-only",
        action="store_true",
        help="make tables and plots of the finished runs, run nothing",
    )
    parser.add_argument("--strict", action="store_true", help="a missing data set is an error")
    parser.add_argument(
        "--claims",
        nargs="?",
        const="",
        metavar="FILE",
        help="write a page that checks each claim of the paper (default: OUT/reproduction.md)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs an experiment; returns 1 if a run failed.

    Raises:
        CommandError: No experiment is named, or its name or file is wrong.
    """
    from ..data.places import ENVIRONMENT
    from ..experiments import session, spec

    if arguments.list:
        print(listing())
        return 0
    if arguments.claims is not None:
        from ..experiments import claims

        file = arguments.claims or os.path.join(arguments.out, "reproduction.md")
        claims.write(arguments.out, file)
        print(f"wrote {file}")
        return 0
    if arguments.name is None:
        raise CommandError("name an experiment; `zetaclip reproduce --list` lists them")
    if arguments.data_root:
        os.environ[ENVIRONMENT] = os.path.abspath(arguments.data_root)  # the training processes too
    if arguments.name == "no-tuning":
        return _no_tuning(arguments)
    experiment = spec.load(arguments.name)
    request = session.Request(
        experiment=experiment,
        out=arguments.out,
        only=session.parse_only(arguments.only, session.known_labels(experiment)),
        workers=arguments.workers,
        ray=arguments.ray,
        strict=arguments.strict,
    )
    if arguments.dry_run:
        print(session.dry_run(request))
        return 0
    if arguments.tables_only:
        print(session.tables_only(request))
        return 0
    try:
        with _sigterm_as_interrupt():
            summary, failed = session.reproduce(request)
    except KeyboardInterrupt:
        print("\nstopped; the same command continues where it stopped")
        return 130
    print(summary)
    return 1 if failed else 0


def _no_tuning(arguments: argparse.Namespace) -> int:
    """The regret of default settings, which has a page of its own."""
    from pathlib import Path

    from ..experiments import regret, session

    only = session.parse_only(arguments.only, {})
    if unknown := set(only) - {"data", "seed"}:
        raise CommandError(f"no-tuning can be limited by data and seed, not by {unknown.pop()}")
    if arguments.dry_run:
        cells = regret.finished(regret.read(Path(arguments.out) / regret.NAME / "cells.jsonl"))
        print(f"{len(cells)} of {regret.planned()} cells (task, ε, seed) have run")
        return 0
    if arguments.tables_only:
        print(regret.write(Path(arguments.out) / regret.NAME))
        return 0
    try:
        with _sigterm_as_interrupt():
            print(regret.run(arguments.out, only))
    except KeyboardInterrupt:
        print("\nstopped; the same command continues where it stopped")
        return 130
    return 0


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Handles a scheduler's SIGTERM like Ctrl-C: the training processes save first."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set a handler
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def listing() -> str:
    """Every experiment with its number of runs at the first look."""
    from ..experiments import looks, plan, spec
    from ..words import counted

    lines = []
    for name in spec.names():
        experiment = spec.load(name)
        planned = plan.make_plan(experiment)
        rows = counted(len(looks.needed(planned, {})), "run")
        ladders = counted(len(planned.ladders), "ladder")
        where = experiment.source or "not in the paper"
        lines += [
            f"{name:<12} {experiment.title} ({where})",
            f"{'':<12} {rows} or more, {ladders} of learning rates",
        ]
    from ..experiments import regret

    lines += [f"{regret.NAME:<12} {regret.TITLE}", f"{'':<12} {regret.planned()} cells"]
    return "\n".join(lines)
