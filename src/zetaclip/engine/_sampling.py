"""Poisson batches: every record joins a logical batch with the declared probability q, independently.

The loader stands in for the user's. It is not a ``DataLoader`` (frameworks rebuild those), but it fetches
with one, so the user's ``collate_fn``, workers and pinning do what they did.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from ..errors import PrivacyLeakWarning
from ..randomness import generator, uniforms
from ..randomness._forward import drawing_from, untouched

if TYPE_CHECKING:
    from ._run import Run


def poisson_indices(key: bytes, records: int, sample_rate: float) -> Tensor:
    """The records of one batch, in order. Uniforms of 53 bits, so that a small q is met as declared."""
    if sample_rate >= 1.0:
        return torch.arange(records)
    return torch.from_numpy(np.flatnonzero(uniforms(key, records) < sample_rate))


def check_loader(loader: Any) -> None:
    """Refuses loaders whose way of drawing has no place in the accounting."""
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"data_loader must be a torch DataLoader, not {type(loader).__name__}; it is replaced by a Poisson loader over "
            "its dataset"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            "an IterableDataset can't be Poisson sampled: every record must be drawn independently with probability q, which "
            "needs access by index. Load it into a map-style dataset (one with __len__ and __getitem__)"
        )
    if _repeats(loader.dataset):
        raise ValueError(
            f"the {type(loader.dataset).__name__} holds a record more than once: its gradient would count as often, and one record "
            "could do more than the sensitivity says. Remove the repetitions"
        )
    if loader.batch_sampler is None:
        raise ValueError(
            "the loader has batch_size=None; give it the batch size that you expect (L)"
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            f"the loader has a batch sampler of its own ({type(loader.batch_sampler).__name__}); its batches are not Poisson "
            "samples, so the accountant's ε would not hold. Build the loader with batch_size= instead"
        )
    if type(loader.sampler) not in (RandomSampler, SequentialSampler):
        raise ValueError(
            f"the loader has the sampler {type(loader.sampler).__name__}; unequal or dependent inclusion probabilities are not "
            "what the accountant assumes. Build the loader without sampler= (to train on a part of the data, wrap the "
            "dataset in torch.utils.data.Subset)"
        )


def _repeats(dataset: Any) -> bool:
    """Whether a record is in the data set twice, through any nesting of Subset and ConcatDataset."""
    found: dict[Any, list[np.ndarray | None]] = {}
    for base, rows in _origins(dataset, None):
        found.setdefault(_identity(base), []).append(rows)
    for parts in found.values():
        some = [part for part in parts if part is not None and len(part)]
        whole = len(parts) - sum(part is not None for part in parts)
        if whole > 1 or (whole and some):
            return True
        if some:
            every = np.concatenate(some)
            if every.dtype == object:
                if len(set(every.tolist())) < len(every):
                    return True
                continue
            every.sort()  # np.unique hashes, which takes several times as long
            if (every[1:] == every[:-1]).any():
                return True
    return False


def _origins(dataset: Any, rows: np.ndarray | None) -> Iterator[tuple[Any, np.ndarray | None]]:
    """The data sets that hold the records themselves, each with the rows of it that are used; None: all of them, once."""
    if isinstance(dataset, Subset):
        own = index_array(dataset.indices)
        yield from _origins(dataset.dataset, own if rows is None else own[rows])
    elif isinstance(dataset, ConcatDataset):
        if rows is None:
            for part in dataset.datasets:
                yield from _origins(part, None)
            return
        ends = np.asarray(dataset.cumulative_sizes)
        rows = np.where(rows < 0, rows + ends[-1], rows)
        home = np.searchsorted(ends, rows, side="right")
        for i, part in enumerate(dataset.datasets):
            yield from _origins(part, rows[home == i] - (ends[i - 1] if i else 0))
    elif rows is not None and rows.dtype != object and (rows < 0).any():
        yield dataset, np.where(rows < 0, rows + len(dataset), rows)  # -1 is the last one
    else:
        yield dataset, rows


def index_array(indices: Any) -> np.ndarray:
    """As an array of integers; keys of another kind (names of files, tuples) are kept as they are, in one of objects."""
    if isinstance(indices, Tensor):
        indices = indices.detach().cpu().numpy().reshape(-1)
    try:
        found = np.asarray(indices)
    except ValueError:  # tuples of several lengths
        found = np.empty(0, dtype=object)
    # A tuple of numbers is one key and not several.
    if found.size == len(indices) and (found.dtype.kind in "iu" or not found.size):
        return found.astype(np.int64).reshape(-1)
    return np.fromiter(indices, dtype=object)


def _identity(base: Any) -> Any:
    """The same for two data sets over the same tensors."""
    if (
        type(base) is TensorDataset
        and len(base)
        and all(t.layout == torch.strided for t in base.tensors)
    ):
        return tuple((t.data_ptr(), t.shape, t.stride()) for t in base.tensors)
    return id(base)


def zero_row(loader: DataLoader) -> Any:
    """One record of zeros, shaped as the loader's batches: what the model sees when a batch is empty.

    **Edge cases.** Where workers read the data, a worker reads this record, too: a dataset that opens its file on first use would
    otherwise hold an open file here, which can't be sent to workers that are spawned, and is shared by those that are forked.
    """

    def blank(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return torch.zeros_like(leaf)
        if isinstance(leaf, (bool, int, float, str, bytes)):
            return type(leaf)()
        return leaf

    with untouched():  # a dataset that augments must not move the public streams
        return tree_map(blank, _first_record(loader))


def _first_record(loader: DataLoader) -> Any:
    """A batch of nothing but the first record, as the loader would make it."""
    dataset: Any = loader.dataset
    if not loader.num_workers:
        return loader.collate_fn([dataset[0]])
    alone = DataLoader(
        dataset,
        batch_sampler=[[0]],
        collate_fn=loader.collate_fn,
        num_workers=1,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator().manual_seed(
            0
        ),  # otherwise its seed is drawn from torch's global stream
    )
    (batch,) = alone
    return batch


def record_shapes(batch: Any, rows: int) -> list[tuple[int, ...] | None]:
    """What one record looks like in each tensor of a batch: its shape without the records; None where they have no dimension."""
    found: list[tuple[int, ...] | None] = []
    for leaf in tree_flatten(batch)[0]:
        if isinstance(leaf, Tensor):
            shape = tuple(leaf.shape)
            at = shape.index(rows) if rows in shape else None  # time may come before the records
            found.append(None if at is None else shape[:at] + shape[at + 1 :])
        elif isinstance(leaf, Mapping):  # transformers' BatchEncoding
            found += record_shapes(dict(leaf), rows)
    return found


def shapes_differ(one: list[tuple[int, ...] | None], other: list[tuple[int, ...] | None]) -> bool:
    """Whether a record looks different in two batches of the same structure."""
    return len(one) == len(other) and any(
        a != b for a, b in zip(one, other, strict=True) if a is not None and b is not None
    )


class _InMemory:
    """Batches of a TensorDataset by one indexing operation per tensor."""

    def __init__(self, tensors: tuple[Tensor, ...], positions: Tensor | None, pin: bool) -> None:
        self.tensors = tensors
        self.positions = positions
        self.pin = pin
        self.here = all(t.is_cpu for t in tensors)  # where the indices are

    def __call__(self, rows: Tensor) -> list[Tensor]:
        where = rows if self.positions is None else self.positions[rows]
        batch = [
            t.index_select(0, where if self.here else where.to(t.device)) for t in self.tensors
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

    def __init__(self, run: Run, start: int) -> None:
        self.run, self.start = run, start

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self.run.upcoming(self.start):
            yield rows.tolist()


class PoissonLoader:
    """Hands out the chunks of Poisson batches; ``len()`` counts logical batches (updates) per epoch.

    A logical batch larger than ``physical_batch_size`` comes as several iterations of the loop, and a method of
    several passes comes as further ones; ``optimizer.step()`` knows which is which. A batch that was handed out
    and not stepped is handed out again by the next iterator: looking at a batch (``next(iter(loader))``) costs and
    changes nothing. After ``engine.load`` the first iterator goes on inside the epoch where the checkpoint was.
    """

    def __init__(self, loader: DataLoader, run: Run) -> None:
        self._loader = loader
        self._run = run
        self._fetch = _in_memory(loader)
        self._zero: Any = None
        # A collate_fn can say that its padding was looked at, and that no record's loss depends on it.
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
        return max(1, round(self._run.settings.expected_batch_size))

    @property
    def sample_rate(self) -> float:
        return self._run.settings.sample_rate

    def __len__(self) -> int:
        return self._run.settings.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        run = self._run
        ticket = run.start_epoch()
        feed = iter(self._torch_loader(run.position)) if self._fetch is None else iter(())
        while run.position < run.settings.steps_per_epoch:
            for rows in run.open_batch():
                data = self._data(rows, feed)
                if self._watches and len(rows):
                    self._watch(record_shapes(data, len(rows)))
                run.hand_out(rows, ticket)
                yield data
                run.check_stepped(ticket)

    def _data(self, rows: Tensor, feed: Iterator[Any]) -> Any:
        if rows.shape[0] == 0:
            return self.blank()
        if self._fetch is not None:
            return self._fetch(rows)
        with nullcontext() if self.num_workers else drawing_from(self._run.fetching_key()):
            return next(feed)

    def _watch(self, shapes: list[tuple[int, ...] | None]) -> None:
        """Warns, once, if what a record looks like depends on the records that it is collated with."""
        if self._shapes is None:
            try:  # one record alone tells more than the first batch, which may be the only one
                self._shapes = record_shapes(self.blank(), 1)
            except Exception:  # a collate_fn may need more than one record, and an unreadable record is not ours to report
                self._shapes = shapes
        if shapes_differ(self._shapes, shapes):
            self._watches = False
            warnings.warn(
                "the shape of a record changes with the records that it is collated with, as if each batch were padded to its longest "
                "one. If padding has any influence on a record's loss, one long record changes the gradients of all others, and ε "
                "does not hold. Pad every record to one public length, or show with engine.validate(records, loss_fn, "
                "collate_fn=...) that padding has no effect (a model that masks it), and ignore this warning",
                PrivacyLeakWarning,
                stacklevel=3,
            )

    def _torch_loader(self, start: int) -> DataLoader:
        own = self._loader
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
            batch_sampler=_Chunks(self._run, start),
            collate_fn=own.collate_fn,
            num_workers=own.num_workers,
            pin_memory=own.pin_memory,
            # Workers that augment are seeded from it. Not from torch's own stream, which others know.
            generator=generator(self._run.workers_key()),
            **workers,
        )

    def blank(self) -> Any:
        """One record of zeros, as a batch."""
        if self._zero is None:
            self._zero = zero_row(self._loader)
        return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, self._zero)
