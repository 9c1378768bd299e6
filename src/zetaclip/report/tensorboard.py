"""The series of a report for TensorBoard: written during training, or from a run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CommandError
from .read import Follower, number

_EPOCH = ("epsilon", "metric", "accuracy", "auc", "rmse", "ece", "loss", "clip", "lr")
_PROBE = {
    "zeta": "zeta/reading",
    "smoothed": "zeta/smoothed",
    "phi": "control/phi",
    "clip": "control/clip",
}


class Board:
    """Writes lines of metrics.jsonl, probes.jsonl and clips.jsonl as scalars over training steps.

    **Guarantee.** Only what those files contain is written, so the TensorBoard folder reveals no
    more than the run folder.

    Args:
        folder: Where TensorBoard's files go.

    Raises:
        CommandError: tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise CommandError(
                "--tensorboard needs the package tensorboard: pip install 'zetaclip[tensorboard]'"
            ) from error
        self._writer: Any = SummaryWriter(log_dir=os.fspath(folder))

    def epoch(self, line: Mapping[str, Any]) -> None:
        """Writes a line of metrics.jsonl."""
        for name in _EPOCH:
            self._scalar(f"epoch/{name}", line.get(name), line)
        seconds = line.get("seconds")
        for part, value in seconds.items() if isinstance(seconds, dict) else ():
            self._scalar(f"seconds/{part}", value, line)

    def probe(self, line: Mapping[str, Any]) -> None:
        """Writes a line of probes.jsonl."""
        for name, tag in _PROBE.items():
            self._scalar(tag, line.get(name), line)
        layers = line.get("layers")
        for layer, fit in layers.items() if isinstance(layers, dict) else ():
            if isinstance(fit, dict) and fit.get("ok") is not False:
                self._scalar(f"zeta/{layer}", fit.get("zeta"), line)

    def clip(self, line: Mapping[str, Any]) -> None:
        """Writes a line of clips.jsonl."""
        self._scalar("control/clip", line.get("clip"), line)

    def _scalar(self, tag: str, value: Any, line: Mapping[str, Any]) -> None:
        known, step = number(value), number(line.get("step"))
        if known is not None and step is not None:
            self._writer.add_scalar(tag, known, int(step))

    def close(self) -> None:
        """Flushes and closes the files."""
        self._writer.close()

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def export(run: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None) -> Path:
    """Writes a run folder's series for TensorBoard.

    Args:
        run: The run folder.
        folder: Where to write; default: ``tensorboard`` inside the run folder.

    Returns:
        The folder that was written.
    """
    read = Follower(run).read()
    target = Path(folder) if folder is not None else read.path / "tensorboard"
    # A second export would show up as a second curve over the first.
    for old in target.glob("events.out.tfevents.*") if target.is_dir() else ():
        old.unlink()
    with Board(target) as board:
        for line in read.metrics:
            board.epoch(line)
        for line in read.probes:
            board.probe(line)
        for line in read.clips:
            board.clip(line)
    return target
