"""Poisson batches: every record joins a logical batch with the declared probability q, independently.

The loader stands in for the user's. It is not a ``DataLoader`` (frameworks rebuild those), but it fetches
with one, so the user's ``collate_fn``, workers and pinning do what they did.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from .randomness import generator

if TYPE_CHECKING:
    from .run import Run


def poisson_indices(key: bytes, records: int, sample_rate: float) -> Tensor:
    """The records of one batch, in order. Uniforms of 53 bits, so that a small q is met as declared."""
    if sample_rate >= 1.0:
        return torch.arange(records)
    coins = torch.rand(records, generator=generator(key), dtype=torch.float64)
    return (coins < sample_rate).nonzero().flatten()


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
    if isinstance(loader.dataset, Subset) and len(set(loader.dataset.indices)) < len(loader.dataset.indices):
        raise ValueError(
            "the Subset holds a record more than once: its gradient would count as often, and one record could do more than the "
            "sensitivity says. Remove the repetitions"
        )
    if loader.batch_sampler is None:
        raise ValueError("the loader has batch_size=None; give it the batch size that you expect (L)")
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


def zero_row(loader: DataLoader) -> Any:
    """One record of zeros, shaped as the loader's batches: what the model sees when a batch is empty."""

    def blank(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return torch.zeros_like(leaf)
        if isinstance(leaf, (bool, int, float, str, bytes)):
            return type(leaf)()
        return leaf

    state = torch.get_rng_state()  # a dataset that augments must not move the public stream
    try:
        dataset: Any = loader.dataset
        return tree_map(blank, loader.collate_fn([dataset[0]]))
    finally:
        torch.set_rng_state(state)


class _InMemory:
    """Batches of a TensorDataset by one indexing operation per tensor."""

    def __init__(self, tensors: tuple[Tensor, ...], positions: Tensor | None, pin: bool) -> None:
        self.tensors = tensors
        self.positions = positions
        self.pin = pin
        self.here = all(t.is_cpu for t in tensors)  # where the indices are

    def __call__(self, rows: Tensor) -> list[Tensor]:
        where = rows if self.positions is None else self.positions[rows]
        batch = [t.index_select(0, where if self.here else where.to(t.device)) for t in self.tensors]
        return [t.pin_memory() for t in batch] if self.pin else batch


def _in_memory(loader: DataLoader) -> _InMemory | None:
    dataset: Any = loader.dataset
    positions = None
    if type(dataset) is Subset:
        positions, dataset = torch.as_tensor(list(dataset.indices), dtype=torch.int64), dataset.dataset
    if type(dataset) is not TensorDataset or loader.collate_fn is not default_collate or loader.num_workers:
        return None
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
                run.hand_out(rows, ticket)
                yield data
                run.check_stepped(ticket)

    def _data(self, rows: Tensor, feed: Iterator[Any]) -> Any:
        if rows.shape[0] == 0:
            return self._empty()
        return next(feed) if self._fetch is None else self._fetch(rows)

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
            # The loader would otherwise draw its seed from torch's global stream, once more after every resume.
            generator=torch.Generator().manual_seed((torch.initial_seed() + self._run.step_count) % 2**63),
            **workers,
        )

    def _empty(self) -> Any:
        if self._zero is None:
            self._zero = zero_row(self._loader)
        return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, self._zero)
