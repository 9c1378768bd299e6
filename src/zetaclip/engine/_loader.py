"""The loader that the user gets back: it hands out the chunks of Poisson batches.

It is not a ``DataLoader`` (frameworks rebuild those), but it fetches with one, so the user's
``collate_fn``, workers and pinning do what they did.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from ..errors import PrivacyLeakWarning
from ..randomness import generator
from ..randomness._forward import drawing_from
from ..words import counted
from ._batch_memory import BatchMemory
from ._loop import PrivateLoop
from ._records import record_shapes, shapes_differ, zero_row
from ._row_order import OrderedCollate, check_augment


class _InMemory:
    """Batches of a TensorDataset by one indexing operation per tensor."""

    def __init__(self, tensors: tuple[Tensor, ...], positions: Tensor | None, pin: bool) -> None:
        self.tensors = tensors
        self.positions = positions
        self.pin = pin
        self.here = all(t.is_cpu for t in tensors)  # where the indices are
        self.kept = [BatchMemory() if BatchMemory.serves(t) and not pin else None for t in tensors]

    def __call__(self, rows: Tensor) -> list[Tensor]:
        where = rows if self.positions is None else self.positions[rows]
        if not self.here:
            batch = [t.index_select(0, where.to(t.device)) for t in self.tensors]
        else:
            batch = [
                t.index_select(0, where) if kept is None else kept.select(t, where)
                for t, kept in zip(self.tensors, self.kept, strict=True)
            ]
        return [t.pin_memory() for t in batch] if self.pin else batch


def _in_memory(loader: DataLoader) -> _InMemory | None:
    dataset: Any = loader.dataset
    positions = indices = None
    if type(dataset) is Subset:
        indices, dataset = dataset.indices, dataset.dataset
    if (
        type(dataset) is not TensorDataset
        or loader.collate_fn is not default_collate
        or loader.num_workers
    ):
        return None
    if indices is not None:
        positions = torch.as_tensor(list(indices), dtype=torch.int64)
        positions = torch.where(
            positions < 0, positions + len(dataset), positions
        )  # -1 is the last one
    return _InMemory(dataset.tensors, positions, loader.pin_memory and torch.cuda.is_available())


class _Chunks:
    """Index lists for torch's own loader, in the order in which they will be handed out."""

    def __init__(self, loop: PrivateLoop) -> None:
        self._loop = loop

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self._loop.batches.upcoming(self._loop.state):
            yield rows.tolist()


class PoissonLoader:
    """Hands out the chunks of Poisson batches.

    ``len()`` counts logical batches (updates) per epoch.

    A logical batch larger than ``physical_batch_size`` comes as several iterations of the loop, and
    a method of several passes comes as further ones; ``optimizer.step()`` knows which is which. A
    batch that was handed out and not stepped is handed out again by the next iterator: looking at a
    batch (``next(iter(loader))``) costs and changes nothing. After ``engine.load`` the first
    iterator continues inside the epoch, where the checkpoint was saved.
    """

    def __init__(
        self, loader: DataLoader, loop: PrivateLoop, augment: Callable[[Any], Any] | None = None
    ) -> None:
        self._loader = loader
        self._loop = loop
        self._augment = augment
        self._augment_checked = augment is None
        self._fetch = _in_memory(loader)
        self._zero: Any = None
        # A collate_fn can say that its padding was looked at, and that no record's loss depends on
        # it.
        self._watches = self._fetch is None and not getattr(
            loader.collate_fn, "inert_padding", False
        )
        self._shapes: list[tuple[int, ...] | None] | None = None

    @property
    def dataset(self) -> Dataset:
        return self._loader.dataset

    @property
    def collate_fn(self) -> Any:
        return self._loader.collate_fn

    @property
    def num_workers(self) -> int:
        return self._loader.num_workers

    @property
    def pin_memory(self) -> bool:
        return self._loader.pin_memory

    @property
    def batch_size(self) -> int:
        """The expected logical batch size, rounded; the batches themselves vary."""
        return max(1, round(self._loop.settings.expected_batch_size))

    @property
    def sample_rate(self) -> float:
        return self._loop.settings.sample_rate

    def __len__(self) -> int:
        return self._loop.settings.steps_per_epoch

    def __repr__(self) -> str:
        given = self._loop.settings
        physical = given.physical_batch_size
        return (
            f"PoissonLoader(q = {given.sample_rate:.4g}, N = {given.num_examples}, L ="
            f" {given.expected_batch_size:.6g}, {counted(len(self), 'update')} per epoch"
            + ("" if physical is None else f", at most {counted(physical, 'row')} at a time")
            + ")"
        )

    def __iter__(self) -> Iterator[Any]:
        return self._loop.iterate(self._begin)

    def _begin(self) -> Callable[[Tensor], Any]:
        """An epoch begins; gives the function that fetches the records of a chunk."""
        if self._augment is not None and not self._augment_checked:
            check_augment(self._augment, self.blank())
            self._augment_checked = True
        feed = iter(self._torch_loader()) if self._fetch is None else iter(())
        return lambda rows: self._records(rows, feed) if rows.shape[0] else self.blank()

    def _records(self, rows: Tensor, feed: Iterator[Any]) -> Any:
        loop = self._loop
        if self._fetch is not None:
            data: Any = self._fetch(rows)
        else:
            with nullcontext() if self.num_workers else drawing_from(loop.chunk_key("reading for")):
                data = next(feed)
        if self._augment is not None:
            with drawing_from(loop.chunk_key("augmenting for")):
                data = self._augment(data)
        if self._watches:
            self._watch(record_shapes(data, len(rows)))
        return data

    def _watch(self, shapes: list[tuple[int, ...] | None]) -> None:
        """Warns, once, if collating makes a record depend on the others of its batch."""
        if self._shapes is None:
            try:  # one record alone tells more than the first batch, which may be the only one
                self._shapes = record_shapes(self.blank(), 1)
            # A collate_fn may need more than one record, and an unreadable record is not ours to
            # report.
            except Exception:
                self._shapes = shapes
        if shapes_differ(self._shapes, shapes):
            self._watches = False
            warnings.warn(
                "the shape of a record changes with the records that it is collated with, as if "
                "each batch were padded to its longest one. If padding has any influence on a "
                "record's loss, one long record changes the gradients of all others, and ε does "
                "not hold. Pad every record to one public length, or show with "
                "engine.validate(records, loss_fn, collate_fn=...) that padding has no effect (a "
                "model that masks it), and ignore this warning",
                PrivacyLeakWarning,
                stacklevel=5,
            )

    def _torch_loader(self) -> DataLoader:
        own = self._loader
        collate = own.collate_fn
        if not self._loop.batches.units.trivial and collate is not default_collate:
            collate = OrderedCollate(collate)
        workers: dict[str, Any] = {}
        if own.num_workers:
            workers = {
                "timeout": own.timeout,
                "worker_init_fn": own.worker_init_fn,
                "multiprocessing_context": own.multiprocessing_context,
                "prefetch_factor": own.prefetch_factor,
            }
        return DataLoader(
            own.dataset,
            batch_sampler=_Chunks(self._loop),
            collate_fn=collate,
            num_workers=own.num_workers,
            pin_memory=own.pin_memory,
            # Workers that augment are seeded from it. Not from torch's own stream, which others
            # know.
            generator=generator(self._loop.batches.workers_key(self._loop.state)),
            **workers,
        )

    def blank(self) -> Any:
        """One record of zeros, as a batch."""
        if self._zero is None:
            self._zero = zero_row(self._loader)
        return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, self._zero)
