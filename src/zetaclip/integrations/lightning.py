"""Privacy for Lightning: one callback makes the training of an unchanged LightningModule private.

    from zetaclip.integrations.lightning import Privacy
    Trainer(callbacks=[Privacy(target_epsilon=3.0, target_delta=1e-5, clipping=1.0)])

Lightning counts iterations of its loader. It gets a loader each of whose items begins an update,
and an optimizer whose ``step`` runs the closure once per chunk and pass. So its counters,
schedulers and limits count updates.
"""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path
from typing import Any

try:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
    from lightning.pytorch.utilities import rank_zero_info
except ImportError as problem:
    raise ImportError(
        "zetaclip.integrations.lightning needs Lightning: pip install 'zetaclip[lightning]'"
    ) from problem

from ..engine import Hooks, PrivacyEngine, PrivateOptimizer
from ._lightning_trainer import (
    refuse,
    replace_loader,
    total_steps,
    train_loader,
    training_loss,
    training_on,
    transferred,
    unlogged,
)
from .terms import EpsilonEstimate, Terms, Updates, released_before, secret_path

__all__ = ["Privacy"]

_KEY = "zetaclip"
_OWN_METRICS = {"epsilon", "clip"}


class Privacy(Callback):
    """Makes ``Trainer.fit`` private: its optimizer, its train loader and its checkpoints.

    ``engine`` is the ``PrivacyEngine`` of the last fit, with ``engine.ledger`` and
    ``engine.get_epsilon(delta)``.

    Args:
        **terms: The arguments of ``Terms``.

    **Guarantee.** As ``PrivacyEngine``: the weights after ``fit``, and every C, are (ε,
    δ)-differentially private for the ε of the ledger. If Lightning counts an update that was not
    private, the fit stops with an error.

    **Edge cases.** Values that the module itself logs in training are not covered: there is one
    warning, and the ledger's header says so. A second ``fit`` with the same callback continues the
    same ledger. Checkpoints contain no secret: the random streams are beside them in
    ``<name>.private``. Without that file, a checkpoint is resumed with new noise.

    Examples:
        >>> privacy = Privacy(target_epsilon=3.0, target_delta=1e-5, clipping=1.0)
        >>> Trainer(max_epochs=5, callbacks=[privacy]).fit(module, loader)  # doctest: +SKIP
    """

    def __init__(self, **terms: Any) -> None:
        self.terms = Terms(**terms)
        self.engine: PrivacyEngine | None = None
        self._updates: Updates | None = None
        self._optimizer: _WholeStep | None = None
        self._estimate: EpsilonEstimate | None = None
        self._resumed: dict[str, Any] | None = None
        # Secrets of checkpoints that Lightning is about to write, by identity. They are never part
        # of what it writes.
        self._secrets: dict[str, tuple[Hooks, dict[str, Any]]] = {}
        self._before = 0
        self._warned = False

    # -- before training

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the settings, and adds the secret files to the checkpoints."""
        if stage != "fit":
            return
        refuse(trainer, pl_module)
        if sum(isinstance(callback, Privacy) for callback in trainer.callbacks) > 1:
            raise ValueError(
                "the Trainer has more than one Privacy callback; one module has one ledger"
            )
        files = trainer.strategy.checkpoint_io
        inner = files.inner if isinstance(files, _PrivateFiles) else files
        trainer.strategy.checkpoint_io = _PrivateFiles(inner, self._secrets)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keeps the checkpoint for ``on_fit_start``."""
        if trainer.training or trainer.state.fn == "fit":
            self._resumed = checkpoint

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes optimizer and loader private, and resumes."""
        if len(trainer.optimizers) != 1:
            raise ValueError(
                "Privacy needs one optimizer, but configure_optimizers returned"
                f" {len(trainer.optimizers)}"
            )
        if trainer.strategy.model is not pl_module:
            raise ValueError(
                "the strategy wraps the module, which Privacy does not support: use one device"
            )
        loader = train_loader(trainer)
        steps = total_steps(trainer, self.terms.steps_per_epoch(loader))
        earlier = released_before(self.engine)
        self.engine, private, poisson = self.terms.make_private(
            pl_module, trainer.optimizers[0], loader, steps, earlier
        )
        with unlogged(trainer, pl_module):
            self.engine.hooks.rehearse(poisson, functools.partial(training_loss, trainer))
        self._updates = Updates(poisson, self.engine)
        self._optimizer = _WholeStep(private, self._updates, trainer, pl_module)
        trainer.strategy.optimizers = [self._optimizer]
        replace_loader(trainer, self._updates)
        if self._resumed is not None:
            self._resume(trainer, self._resumed)
            self._resumed = None
        self._updates.limit = self.terms.allowed(self.engine, steps)
        if self._updates.limit is not None and self.engine.updates >= self._updates.limit:
            trainer.should_stop = True
        self._estimate = EpsilonEstimate(self.engine, self.terms.target_delta, self._updates.limit)
        self._warned = False

    # -- training

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Notes the number of updates so far."""
        assert self.engine is not None
        self._before = self.engine.updates

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Checks that one private update was taken, and logs ε and C."""
        engine, optimizer, updates = self.engine, self._optimizer, self._updates
        assert (
            engine is not None
            and optimizer is not None
            and updates is not None
            and self._estimate is not None
        )
        if engine.updates != self._before + 1:
            raise RuntimeError(
                f"Lightning counted an iteration in which {engine.updates - self._before} private"
                " updates were taken: the training does not use the private optimizer, so its"
                " result is not private. Is optimizer_step overridden?"
            )
        self._warn_of_metrics(trainer)
        last = updates.limit is not None and engine.updates >= updates.limit
        epsilon = self._estimate.epsilon(exact=last or trainer.is_last_batch)
        how: Any = {"prog_bar": True, "on_step": True, "on_epoch": False, "batch_size": 1}
        if epsilon is not None:
            pl_module.log("epsilon", epsilon, **how)
        pl_module.log("clip", optimizer.clip, **how)
        if last:
            rank_zero_info(
                f"stopped after {engine.updates} updates: the next one would exceed max_epsilon"
            )
            trainer.should_stop = True

    def _warn_of_metrics(self, trainer: Trainer) -> None:
        if self._warned:
            return
        names = {
            metric.meta.name for metric in trainer.fit_loop.epoch_loop._results.values()
        } - _OWN_METRICS
        if not names:
            return
        self._warned = True
        listed = ", ".join(sorted(names))
        assert self.engine is not None
        self.engine.hooks.note(f"not covered: logged in training: {listed}")
        warnings.warn(
            f"the module logs {listed} in training: exact functions of the batch's records, which ε"
            " does not cover. Keep these logs secret, or log on public validation data instead",
            stacklevel=2,
        )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detaches the engine from the module."""
        if self.engine is not None:
            self.engine.detach()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Detaches the engine, unless a checkpoint is still to be saved."""
        saves = any(isinstance(callback, OnExceptionCheckpoint) for callback in trainer.callbacks)
        if self.engine is not None and not saves:  # else the current batch is still to be saved
            self.engine.detach()

    # -- checkpoints

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the engine's public state to the checkpoint."""
        if self.engine is None:
            return
        hooks = self.engine.hooks
        public, secret = hooks.collect()
        weights, _ = public.pop("module"), public.pop("optimizer")  # Lightning saves both itself
        if hooks.inside_update:
            # An exception inside an update: Lightning may have saved perturbed weights.
            checkpoint["state_dict"] = weights
        checkpoint[_KEY] = public
        self._secrets.clear()  # of a checkpoint that was never written
        self._secrets[public["identity"]] = (hooks, secret)

    def _resume(self, trainer: Trainer, loaded: dict[str, Any]) -> None:
        assert self._updates is not None
        if _KEY not in loaded:
            warnings.warn(
                "the checkpoint holds no private state: the ledger does not contain what was"
                " trained before it, and ε does not count it",
                stacklevel=2,
            )
            return
        public = {
            **loaded[_KEY],
            "module": loaded["state_dict"],
            "optimizer": loaded["optimizer_states"][0],
        }
        # The secrets of a linked checkpoint (save_last="link") are beside the linked file.
        path = Path(os.path.realpath(str(trainer.ckpt_path)))
        self._updates.resume(public, path.parent, secret_path(path))


class _WholeStep(PrivateOptimizer):
    """An optimizer whose ``step`` completes an update by running the closure for all chunks."""

    def __init__(
        self,
        private: PrivateOptimizer,
        updates: Updates,
        trainer: Trainer,
        pl_module: LightningModule,
    ) -> None:
        super().__init__(private.inner, private._loop)
        self._updates, self._trainer, self._pl_module = updates, trainer, pl_module

    def step(self, closure: Any = None) -> Any:
        """Takes one update."""
        loss = super().step(closure)
        for chunk in self._updates.rest():
            with training_on(self._pl_module, transferred(self._trainer, self._pl_module, chunk)):
                loss = super().step(closure)
        return loss


class _PrivateFiles(CheckpointIO):
    """Lightning's checkpoint files, each with its secret streams in a separate file beside it."""

    def __init__(
        self, inner: CheckpointIO, secrets: dict[str, tuple[Hooks, dict[str, Any]]]
    ) -> None:
        self.inner, self._secrets = inner, secrets

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Saves the checkpoint and its secret streams."""
        identity = checkpoint.get(_KEY, {}).get("identity")
        if identity not in self._secrets:
            self.inner.save_checkpoint(checkpoint, path, storage_options)
            return
        if "://" in str(path):
            raise ValueError(
                "private checkpoints need a folder on this machine: the secret streams are written"
                " beside them"
            )
        hooks, streams = self._secrets.pop(identity)
        hidden = secret_path(Path(path))
        hidden.parent.mkdir(parents=True, exist_ok=True)
        checkpoint[_KEY]["home"] = hooks.home_from(hidden.parent)
        # The old secrets stay until the new checkpoint has replaced the old one.
        hooks.write_secrets(hidden, {**hooks.secrets_in(hidden), identity: streams})
        self.inner.save_checkpoint(checkpoint, path, storage_options)
        hooks.write_secrets(hidden, {identity: streams})
        hooks.saved_in(hidden.parent)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: Any = None
    ) -> dict[str, Any]:
        """Loads the checkpoint."""
        more = {} if weights_only is None else {"weights_only": weights_only}
        return self.inner.load_checkpoint(path, map_location, **more)

    def remove_checkpoint(self, path: Any) -> None:
        """Removes the checkpoint and its secret streams."""
        self.inner.remove_checkpoint(path)
        secret_path(Path(path)).unlink(missing_ok=True)

    def teardown(self) -> None:
        """See Lightning's ``CheckpointIO``."""
        self.inner.teardown()
