"""The trackers of ``zetaclip train``: TensorBoard, MLflow, Weights & Biases."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# Ids of the tracked runs, so that a resumed run continues them.
FILE = "trackers.json"


def add_arguments(group: Any) -> None:
    """Adds a flag for each tracker."""
    group.add_argument(
        "--tensorboard",
        action="store_true",
        help="also write DIR/tensorboard (needs zetaclip[tensorboard])",
    )
    group.add_argument(
        "--mlflow",
        action="store_true",
        help="also log to MLflow, to $MLFLOW_TRACKING_URI (needs zetaclip[mlflow])",
    )
    group.add_argument(
        "--wandb",
        action="store_true",
        help="also log to Weights & Biases (needs zetaclip[wandb]; WANDB_MODE=offline: no network)",
    )


class Trackers:
    """The trackers that were asked for, as one listener.

    A tracker that fails is told of once and left out: the training and its folder matter more.

    Args:
        arguments: The command line.
        out: The run folder.
    """

    def __init__(self, arguments: argparse.Namespace, out: Path) -> None:
        self._asked = [
            name for name in ("tensorboard", "mlflow", "wandb") if getattr(arguments, name)
        ]
        self._out, self._resumed = out, arguments.resume
        self._open: dict[str, Any] = {}
        for name in self._asked:  # what is not installed is said before anything is trained
            _check_installed(name)

    @property
    def series(self) -> Callable[[str, dict[str, Any]], None] | None:
        """What ``train`` calls with each line; None without trackers."""
        return self._log if self._asked else None

    def begin(self) -> None:
        """Opens the trackers; called when the run folder is there."""
        from ..report import tensorboard, trackers

        known = _read(self._out / FILE) if self._resumed else {}
        name, settings = self._out.resolve().name, _read(self._out / "config.json")
        makers: dict[str, Callable[[str | None], Any]] = {
            "tensorboard": lambda _: tensorboard.Board(self._out / "tensorboard"),
            "mlflow": lambda old: trackers.MlflowTracker(settings, name, old),
            "wandb": lambda old: trackers.WandbTracker(settings, name, self._out, old),
        }
        self._open = {one: makers[one](known.get(one)) for one in self._asked}
        ids = {one: made.identity for one, made in self._open.items() if one != "tensorboard"}
        if ids:
            (self._out / FILE).write_text(json.dumps(ids) + "\n")

    def _log(self, kind: str, line: dict[str, Any]) -> None:
        for name in list(self._open):
            self._try(name, partial(self._open[name], kind, line))

    def close(self, result: dict[str, Any] | None) -> None:
        """Ends the trackers' runs.

        Args:
            result: The result; None if the run was stopped.
        """
        for name in list(self._open):
            self._try(name, partial(self._open.pop(name).close, result))

    def _try(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._open.pop(name, None)
            print(
                f"warning: {name} gets no further lines: {error}. The run goes on", file=sys.stderr
            )


def _check_installed(name: str) -> None:
    from importlib.util import find_spec

    from ..errors import CommandError

    if (name in sys.modules and sys.modules[name] is None) or find_spec(name) is None:
        raise CommandError(f"--{name} needs the package {name}: pip install 'zetaclip[{name}]'")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
