"""``zetaclip train``: one private training run, from data to result."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ..errors import CommandError, ConfigError, InputError
from ..training.config import Config
from ..training.layers import merge, read_file, read_settings
from ..training.names import check_names
from . import tracking
from .allocation import keep_freed_memory
from .flags import in_flags

DESCRIPTION = (
    "Train a private model and write a folder with its weights, its ledger and its result."
)
EPILOG = """examples:
  zetaclip train                                         the bundled digits, nothing to tune, ε = 3
  zetaclip train --data mnist --epsilon 1 --minutes 5
  zetaclip train --data mnist --sigma 1.1 --method dp-sgd --clip 1 --recipe paper
  zetaclip train --data patients.csv --target outcome --schema patients.toml --epsilon 1 --no-eval
  zetaclip train --data reviews.csv --text body --target label    free text, by hashed words
  zetaclip train --out runs/a --resume                   continue an interrupted run
  zetaclip train --method ww-dp-sgd --set spectral.gain=0.2

Your own data: declare columns, bounds and classes in a schema file. What is inferred from the data
is not covered by ε, and the result says so. Never publish a run's private/ folder: anyone who has
it can remove the noise."""

_GROUPS = {
    "data": "data and model",
    "method": "method and training",
    "clip": "clipping",
    "epsilon": "privacy",
    "seed": "machine and output",
}


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each setting of ``Config``, and those that give several at once."""
    group: Any = parser
    for option in dataclasses.fields(Config):
        if option.name in _GROUPS:
            group = parser.add_argument_group(_GROUPS[option.name])
        kind = option.metadata.get("kind")
        if kind is None:  # a table: given by --set or a file
            continue
        flag = "--" + option.name.replace("_", "-")
        text = option.metadata["help"]
        if option.default not in (None, False) and "default" not in text.split("(")[-1]:
            text += f" (default: {option.default})"
        settings: dict[str, Any] = {"help": text, "default": None, "dest": option.name}
        if kind is bool:
            action = "store_true" if option.default is False else argparse.BooleanOptionalAction
            group.add_argument(flag, action=action, **settings)
        else:
            name = option.metadata.get("metavar", {str: "NAME", int: "N", float: "X"}[kind])
            choices = option.metadata.get("choices")
            group.add_argument(
                flag, type=kind, choices=choices, metavar=None if choices else name, **settings
            )
    group = parser.add_argument_group("settings from elsewhere")
    group.add_argument(
        "--config", metavar="FILE", help="settings from a .toml or .json file; flags override it"
    )
    group.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="settings",
        help="any setting, also one in a table: spectral.gain=0.2, method_options.rho=0.1",
    )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: one for each setting of ``Config``, and those of the run."""
    add_settings(parser)
    group = parser.add_argument_group("the run")
    group.add_argument(
        "--out", metavar="DIR", help="the run's folder (default: a new one under runs/)"
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --out exactly where it stopped",
    )
    group.add_argument(
        "--rekey",
        action="store_true",
        help="with --resume: use new noise; steps already executed still count",
    )
    group.add_argument("--force", action="store_true", help="delete what --out contains")
    group.add_argument(
        "--keep-state", action="store_true", help="keep the secret resume state of a finished run"
    )
    group.add_argument(
        "--watch",
        action="store_true",
        help="serve a live report on this machine, until Ctrl-C",
    )
    tracking.add_arguments(group)
    group.add_argument("--quiet", action="store_true", help="print the summary only")


def run(arguments: argparse.Namespace) -> int:
    """Trains, or continues a run.

    Raises:
        CommandError: The settings, the data or the folder are wrong.
    """
    if arguments.rekey and not arguments.resume:
        raise CommandError("--rekey needs --resume")
    if arguments.resume and arguments.out is None:
        raise CommandError("--resume needs --out, the folder of the run to continue")
    try:
        wanted = asked(arguments)  # relative to the working directory of this command
        if arguments.resume:
            _go_back(arguments)
        config = Config.from_mapping(merge(_saved(arguments), wanted))
        check_names(config)
        from ..training.start import check_device

        check_device(config.device)
    except (ConfigError, InputError) as error:
        if os.environ.get("RANK", "0") != "0":  # rank 0 prints the same error
            return 2
        raise CommandError(in_flags(error)) from error
    from ..engine._group import group_from_environment

    keep_freed_memory()
    live = _LivePage()
    with live.stack:
        with group_from_environment(config.device) as rank:
            if rank:
                return _train_along(config, arguments, rank)
            code = _train(config, arguments, live)
        if code == 0:
            live.wait()
    return code


class _LivePage:
    """The live report of ``--watch``, which stays when the training has ended."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self._address = ""

    def open(self, out: Path) -> None:
        from ..report.live import serve

        self._address = self.stack.enter_context(serve([out]))
        print(f"live report: {self._address}", file=sys.stderr, flush=True)

    def wait(self) -> None:
        """Returns on Ctrl-C, or at once if no page is served."""
        if not self._address:
            return
        print(f"the live report stays at {self._address} until Ctrl-C", file=sys.stderr, flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


def _train_along(config: Config, arguments: argparse.Namespace, rank: int) -> int:
    """Trains as a rank other than 0, and prints only errors that no other rank prints."""
    from ..errors import RankError
    from ..training import Interrupted, train

    try:
        train(config, arguments.out or "")
    except Interrupted as stop:
        return 128 + stop.number
    except RankError as error:
        if error.told:
            return 2
        raise CommandError(f"rank {rank}: {error}") from error
    except (CommandError, ConfigError) as error:
        raise CommandError(f"rank {rank}: {error}") from error
    return 0


def _train(config: Config, arguments: argparse.Namespace, live: _LivePage) -> int:
    import signal
    import warnings

    from ..errors import RankError
    from ..training import FolderError, Interrupted, RunFolder, train
    from ..training.progress import Display
    from ..training.result import summary

    out = Path(arguments.out) if arguments.out else _new_folder(config)
    trackers = tracking.Trackers(arguments, out)
    result = None

    def begun() -> None:
        trackers.begin()
        if arguments.watch:
            live.open(out)

    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print(
                f"warning: {in_flags(message)}", file=sys.stderr
            )
            result = train(
                config,
                out,
                resume=arguments.resume,
                rekey=arguments.rekey,
                force=arguments.force,
                keep_state=arguments.keep_state,
                display=Display(quiet=arguments.quiet),
                series=trackers.series,
                begun=begun,
            )
    except Interrupted as stop:
        left = f"; {stop.left}" if stop.left else ""
        print(
            f"\nstopped by {stop}{left}; continue with: {RunFolder(out).resume_command}",
            file=sys.stderr,
        )
        return 128 + signal.Signals(stop.number)
    except KeyboardInterrupt:  # before the first step, or a second time
        if not RunFolder(out).executed:
            raise
        print(f"\ninterrupted; continue with: {RunFolder(out).resume_command}", file=sys.stderr)
        return 128 + signal.SIGINT
    except (ConfigError, FolderError, InputError) as error:
        raise CommandError(in_flags(error)) from error
    except RankError as error:
        raise CommandError(f"{error}. Continue with: {RunFolder(out).resume_command}") from error
    finally:
        trackers.close(result)
    print(in_flags(summary(result)))
    print(f"folder: {out}")
    if not arguments.quiet:
        print(f"use it: zetaclip predict {out} NEW_RECORDS --out predictions.csv")
    return 0


def asked(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of the command line and of its file, without defaults."""
    flags = {
        option.name: value
        for option in dataclasses.fields(Config)
        if (value := getattr(arguments, option.name, None)) is not None
    }
    file = read_file(arguments.config) if arguments.config else {}
    return merge(file, flags, read_settings(arguments.settings))


def _saved(arguments: argparse.Namespace) -> dict[str, Any]:
    """The configuration of the run that is resumed."""
    path = Path(arguments.out) / "config.json" if arguments.resume else None
    return read_file(path) if path is not None and path.exists() else {}


def _go_back(arguments: argparse.Namespace) -> None:
    """Enters the directory that the run was started in: its relative paths are relative to it."""
    from ..training.folder import RunFolder

    begun = RunFolder(arguments.out).directory
    if begun is None or not os.path.isdir(begun) or os.path.samefile(begun, os.getcwd()):
        return
    arguments.out = os.path.abspath(arguments.out)
    os.chdir(begun)
    if not arguments.quiet:
        print(f"continuing in {begun}, where the run was started", file=sys.stderr)


def _new_folder(config: Config) -> Path:
    from datetime import datetime

    method = config.method.replace(":", ".")
    name = f"{Path(config.data).stem}-{method}-{datetime.now():%Y%m%d-%H%M%S}"
    path, number = Path("runs") / name, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path
