"""Hooks for frameworks that run the training loop themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..ledger import Ledger
from ..randomness._forward import set_users_streams
from . import _checkpoint as checkpoint
from ._examples import LossFn
from ._loader import PoissonLoader
from ._loop import PrivateLoop
from ._rehearsal import MadeUp, rehearse


class Hooks:
    """What a framework needs of a run, beside the optimizer and the loader; see ``engine.hooks``.

    **Guarantee.** Nothing here releases anything, or moves the state of the run but ``resume``.
    **Edge cases.** ``rows`` is the size of a private batch, and what ``collect`` gives second is
    secret: neither belongs in a log or a public file.
    """

    def __init__(self, loop: PrivateLoop) -> None:
        self._loop = loop

    @property
    def device(self) -> torch.device:
        """Where the trained parameters are."""
        return self._loop.model.layout.device

    @property
    def detached(self) -> bool:
        """Whether private training has ended."""
        return self._loop.detached

    @property
    def inside_batch(self) -> bool:
        """Whether a logical batch is open: handed out, and not released yet."""
        return self._loop.batch is not None

    @property
    def inside_update(self) -> bool:
        """Whether chunks or passes of the current update are still to come."""
        return self.inside_batch or bool(self._loop.state.phase)

    # -- losses

    @property
    def rows(self) -> int:
        """Rows of the chunk that is out; secret."""
        return self._loop.model.recorder.rows

    def rehearse(
        self, source: PoissonLoader | MadeUp, loss_fn: LossFn, reduction: str | None = None
    ) -> None:
        """Tries the loss on made-up records, all together and each alone.

        Args:
            source: the run's loader, for the shapes of its first record; or made-up records.
            loss_fn: ``loss_fn(module, batch)``, as in ``engine.validate``.
            reduction: what the loss should be; by default the ``loss_reduction`` of the run.

        Raises:
            LossError: the loss is reduced otherwise, or mixes records.
        """
        rehearse(self._loop, source, loss_fn, reduction)

    def check_losses_by_hand(self, declared: str, cure: str) -> None:
        """For a framework that scales the loss before backward: it calls ``check_loss`` itself.

        Args:
            declared: how the loss is reduced before it is scaled, "mean" or "sum".
            cure: what an error tells the user to do.
        """
        self._loop.model.losses.by_hand(declared, cure)

    def check_loss(self, loss: Tensor) -> None:
        """Looks at the graph of a loss that was not scaled yet.

        Raises:
            LossError: it is reduced otherwise than declared, or mixes records.
        """
        self._loop.model.losses.look((loss,), (None,))

    # -- the ledger

    def note(self, text: str) -> None:
        """Adds a note to the header of the ledger, once."""
        self._loop.log.note(text)

    def continue_ledger(self, earlier: Ledger) -> None:
        """Takes over what an earlier run has released from the same data."""
        ledger = self._loop.log.ledger
        ledger.header = checkpoint.joined(ledger.header, earlier.header)
        ledger.merge(earlier.rows())

    # -- checkpoints

    def collect(self, folder: Path | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """The public and the secret part of a checkpoint; inside an update, of its start.

        Args:
            folder: where it will lie; None if that is not known yet. Then ``home`` of the public
                part has to be set to ``home_from`` of the folder before it is written.
        """
        with self._loop.model.weights.restored():
            public, secret = checkpoint.collect(self._loop, folder)
            if self.inside_update:  # outside of this block the weights may be others
                module = public["module"].items()
                public["module"] = {name: value.detach().clone() for name, value in module}
        return public, secret

    def secrets_in(self, path: Path) -> dict[str, Any]:
        """The secret parts in a file, by the identity of their checkpoint; empty without a file."""
        return checkpoint.read_private(path)

    def write_secrets(self, path: Path, secrets: dict[str, Any]) -> None:
        """Writes secret parts, readable by their owner alone; the file is replaced as a whole."""
        checkpoint.write_private(path, secrets)

    def home_from(self, folder: Path) -> str:
        """The way from a checkpoint's folder to the journal that knows of all releases."""
        return self._loop.log.home_from(folder)

    def saved_in(self, folder: Path) -> None:
        """A checkpoint was written: from now on releases are journaled in its folder, too."""
        self._loop.log.watch(folder)

    def weights_and_optimizer(self) -> dict[str, Any]:
        """What a framework has loaded itself, as ``resume`` wants it."""
        return {
            "module": self._loop.model.module.state_dict(),
            "optimizer": self._loop.update.optimizer.state_dict(),
        }

    def resume(self, public: dict[str, Any], folder: Path, secrets: Path | None) -> None:
        """Continues from a checkpoint of ``collect``.

        Args:
            public: its public part.
            folder: where it lies.
            secrets: the file of its secret part, for an exact replay; None continues with new
                noise.

        Raises:
            CheckpointError: it does not fit this run.
        """
        checkpoint.restore(self._loop, public, folder, secrets)

    def rewind(self, streams: dict[str, Tensor]) -> None:
        """Sets torch's own generators to the states in ``public["public_streams"]``."""
        set_users_streams(streams, self.device)
