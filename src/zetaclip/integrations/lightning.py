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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

try:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import (
        BatchSizeFinder,
        Callback,
        GradientAccumulationScheduler,
        LearningRateFinder,
        OnExceptionCheckpoint,
    )
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.utilities import rank_zero_info
except ImportError as problem:
    raise ImportError(
        "zetaclip.integrations.lightning needs Lightning: pip install 'zetaclip[lightning]'"
    ) from problem

from ..engine import PrivacyEngine
from ..engine import _checkpoint as checkpoints
from ..engine._loop import PrivateLoop
from ..engine._optimizer import PrivateOptimizer
from ..engine._rehearsal import rehearse
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

    Example:
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
        self._secrets: dict[str, tuple[PrivateLoop, dict[str, Any]]] = {}
        self._before = 0
        self._warned = False

    # -- before training

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the settings, and adds the secret files to the checkpoints."""
        if stage != "fit":
            return
        _refuse(trainer, pl_module)
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
        loader = _train_loader(trainer)
        steps = _total_steps(trainer, self.terms.steps_per_epoch(loader))
        earlier = released_before(self.engine)
        self.engine, private, poisson = self.terms.make_private(
            pl_module, trainer.optimizers[0], loader, steps, earlier
        )
        with _unlogged(trainer, pl_module):
            rehearse(private._loop, poisson, functools.partial(_training_loss, trainer))
        self._updates = Updates(poisson, private)
        self._optimizer = _WholeStep(private, self._updates, trainer, pl_module)
        trainer.strategy.optimizers = [self._optimizer]
        _replace_loader(trainer, self._updates)
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
        ledger = self.engine.ledger
        ledger.header = replace(
            ledger.header,
            notes=(*ledger.header.notes, f"not covered: logged in training: {listed}"),
        )
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
        loop = self.engine._private()
        with loop.model.weights.restored():
            public, secret = checkpoints.collect(loop, None)
            weights = public.pop("module")
            if loop.batch is not None:
                # An exception inside an update: Lightning may have saved perturbed weights.
                checkpoint["state_dict"] = {
                    name: value.detach().clone() for name, value in weights.items()
                }
        public.pop("optimizer")  # Lightning saves both itself
        checkpoint[_KEY] = public
        self._secrets.clear()  # of a checkpoint that was never written
        self._secrets[public["identity"]] = (loop, secret)

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
            with _training_on(self._pl_module, _transferred(self._trainer, self._pl_module, chunk)):
                loss = super().step(closure)
        return loss


class _PrivateFiles(CheckpointIO):
    """Lightning's checkpoint files, each with its secret streams in a separate file beside it."""

    def __init__(
        self, inner: CheckpointIO, secrets: dict[str, tuple[PrivateLoop, dict[str, Any]]]
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
        loop, streams = self._secrets.pop(identity)
        hidden = secret_path(Path(path))
        hidden.parent.mkdir(parents=True, exist_ok=True)
        checkpoint[_KEY]["home"] = loop.log.home_from(hidden.parent)
        kept = checkpoints.read_private(hidden)
        checkpoints.write_private(hidden, {**kept, identity: streams})
        self.inner.save_checkpoint(checkpoint, path, storage_options)
        checkpoints.write_private(hidden, {identity: streams})
        loop.log.watch(hidden.parent)

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


def _refuse(trainer: Trainer, pl_module: LightningModule) -> None:
    """Refuses settings that would train without the mechanism, and says what to do instead."""
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"this Trainer comes from {type(trainer).__module__.split('.')[0]!r}, but Privacy needs"
            " the package lightning: import Trainer and LightningModule from lightning.pytorch"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, (LearningRateFinder, BatchSizeFinder)):
            raise ValueError(
                f"{type(callback).__name__} trains on the private records before Privacy begins,"
                " without noise, and no ledger counts what it finds: choose the learning rate and"
                " the batch size on public data"
            )
    if not pl_module.automatic_optimization:
        raise ValueError(
            "manual optimization calls backward and step in an order that Privacy does not know:"
            " use automatic optimization, or PrivacyEngine in a loop of your own"
        )
    if trainer.gradient_clip_val:
        raise ValueError(
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val:g}) would clip the sum; leave it"
            " out: Privacy clips each record's gradient, by clipping="
        )
    if trainer.accumulate_grad_batches != 1 or any(
        isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks
    ):
        raise ValueError(
            "gradient accumulation would put several logical batches into one step: leave"
            " accumulate_grad_batches out, give the DataLoader the total batch size, and limit"
            " memory with Privacy(physical_batch_size=...)"
        )
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        raise ValueError(
            f"{type(trainer.strategy).__name__} wraps the module or sums raw gradients over"
            " processes: use Trainer(devices=1, strategy='auto')"
        )
    if str(trainer.precision) in ("16-mixed", "16-true"):
        raise ValueError(
            f"Trainer(precision={trainer.precision!r}) scales the loss and skips steps depending on"
            " the data: use 'bf16-mixed' or 32-bit"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise ValueError(
            "reload_dataloaders_every_n_epochs would change the data during the accounting: leave"
            " it out; augment in the data set's __getitem__"
        )
    if sum(isinstance(callback, Privacy) for callback in trainer.callbacks) > 1:
        raise ValueError(
            "the Trainer has more than one Privacy callback; one module has one ledger"
        )


# -- uses of Lightning's private interface, in one place


def _train_loader(trainer: Trainer) -> DataLoader:
    loader = trainer.fit_loop._data_source.dataloader()
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"Privacy needs one DataLoader for training, not {type(loader).__name__}: records must"
            " be drawn from one data set with one probability. Join data sets with"
            " torch.utils.data.ConcatDataset"
        )
    return loader


def _replace_loader(trainer: Trainer, updates: Updates) -> None:
    trainer.fit_loop._data_source.instance = updates
    # configure_optimizers may have set up the ordinary loader, by estimated_stepping_batches.
    trainer.fit_loop._combined_loader = None


def _total_steps(trainer: Trainer, per_epoch: int) -> int | None:
    """The updates that this Trainer would take in all, by its limits; None without an end."""
    limit = trainer.limit_train_batches
    per_epoch = (
        min(per_epoch, limit)
        if isinstance(limit, int)
        else int(per_epoch * (1.0 if limit is None else limit))
    )
    ends = []
    if trainer.max_epochs not in (None, -1):
        ends.append(trainer.max_epochs * per_epoch)
    if trainer.max_steps != -1:
        ends.append(trainer.max_steps)
    return min(ends) if ends else None


def _transferred(trainer: Trainer, pl_module: LightningModule, batch: Any) -> Any:
    """What Lightning does to a batch between the loader and ``training_step``."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _training_loss(trainer: Trainer, pl_module: Any, batch: Any) -> Tensor:
    """The loss that ``training_step`` returns for a batch."""
    found = pl_module.training_step(_transferred(trainer, pl_module, batch), 0)
    loss: Tensor = found["loss"] if isinstance(found, Mapping) else found
    return loss


@contextmanager
def _unlogged(trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
    """Drops what the module logs inside the block."""
    loggers, names = trainer.loggers, ("log", "log_dict")
    trainer.loggers = []
    for name in names:
        vars(pl_module)[name] = lambda *_, **__: None
    try:
        yield
    finally:
        trainer.loggers = loggers
        for name in names:
            del vars(pl_module)[name]


@contextmanager
def _training_on(pl_module: LightningModule, batch: Any) -> Iterator[None]:
    """Gives ``training_step`` this batch inside the block.

    The closure itself has the first chunk of the update.
    """
    own = pl_module.training_step

    @functools.wraps(own)
    def training_step(first: Any, *args: Any, **kwargs: Any) -> Any:
        return own(batch, *args, **kwargs)

    pl_module.training_step = training_step
    try:
        yield
    finally:
        del pl_module.training_step
