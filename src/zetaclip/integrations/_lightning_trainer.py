"""What the Lightning callback asks of a Trainer: refused settings, and private interfaces."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
)
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from .terms import Updates


def refuse(trainer: Trainer, pl_module: LightningModule) -> None:
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


# -- uses of Lightning's private interface, in one place


def train_loader(trainer: Trainer) -> DataLoader:
    loader = trainer.fit_loop._data_source.dataloader()
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"Privacy needs one DataLoader for training, not {type(loader).__name__}: records must"
            " be drawn from one data set with one probability. Join data sets with"
            " torch.utils.data.ConcatDataset"
        )
    return loader


def replace_loader(trainer: Trainer, updates: Updates) -> None:
    trainer.fit_loop._data_source.instance = updates
    # configure_optimizers may have set up the ordinary loader, by estimated_stepping_batches.
    trainer.fit_loop._combined_loader = None


def total_steps(trainer: Trainer, per_epoch: int) -> int | None:
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


def transferred(trainer: Trainer, pl_module: LightningModule, batch: Any) -> Any:
    """What Lightning does to a batch between the loader and ``training_step``."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def training_loss(trainer: Trainer, pl_module: Any, batch: Any) -> Tensor:
    """The loss that ``training_step`` returns for a batch."""
    found = pl_module.training_step(transferred(trainer, pl_module, batch), 0)
    loss: Tensor = found["loss"] if isinstance(found, Mapping) else found
    return loss


@contextmanager
def unlogged(trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
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
def training_on(pl_module: LightningModule, batch: Any) -> Iterator[None]:
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
