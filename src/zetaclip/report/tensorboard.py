"""The series of a report for TensorBoard: written during training, or from a run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CommandError
from .lines import number
from .read import Follower
from .series import scalars


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

    def __call__(self, kind: str, line: Mapping[str, Any]) -> None:
        """Writes the numbers of a line; see ``series.scalars``."""
        step = number(line.get("step"))
        for tag, value in scalars(kind, line).items() if step is not None else ():
            self._writer.add_scalar(tag, value, int(step or 0))

    def close(self, result: Mapping[str, Any] | None = None) -> None:
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
        for kind, lines in (
            ("metrics", read.metrics),
            ("probe", read.probes),
            ("clip", read.clips),
        ):
            for line in lines:
                board(kind, line)
    return target
