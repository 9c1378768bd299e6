"""Which loaders and data sets can be sampled privately; the others are refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)


def check_loader(loader: Any) -> None:
    """Refuses loaders whose way of drawing has no place in the accounting."""
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"data_loader must be a torch DataLoader, not {type(loader).__name__}; it is replaced "
            "by a Poisson loader over its dataset"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            "an IterableDataset can't be Poisson sampled: every record must be drawn independently "
            "with probability q, which needs access by index. Load it into a map-style dataset "
            "(one with __len__ and __getitem__)"
        )
    if _repeats(loader.dataset):
        raise ValueError(
            f"the {type(loader.dataset).__name__} holds a record more than once: its gradient "
            "would count as often, and one record could do more than the sensitivity says. Remove "
            "the repetitions"
        )
    if loader.batch_sampler is None:
        raise ValueError(
            "the loader has batch_size=None; give it the batch size that you expect (L)"
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            f"the loader has a batch sampler of its own ({type(loader.batch_sampler).__name__}); "
            "its batches are not Poisson samples, so the accountant's ε would not hold. Build the "
            "loader with batch_size= instead"
        )
    if type(loader.sampler) not in (RandomSampler, SequentialSampler):
        raise ValueError(
            f"the loader has the sampler {type(loader.sampler).__name__}; unequal or dependent "
            "inclusion probabilities are not what the accountant assumes. Build the loader "
            "without sampler= (to train on a part of the data, wrap the dataset in "
            "torch.utils.data.Subset)"
        )


def check_sampling(poisson: bool) -> None:
    """Refuses any sampling but Poisson's."""
    if not poisson:
        raise ValueError(
            "poisson_sampling=False: shuffled fixed-size batches are not what the accountants "
            "assume, and their ε would be too small. Only Poisson sampling is offered"
        )


def _repeats(dataset: Any) -> bool:
    """Whether a record is in the data set twice.

    Looks through any nesting of Subset and ConcatDataset.
    """
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
    """The data sets that hold the records themselves, each with the rows that are used.

    None stands for all rows, once.
    """
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
    """The keys as an array of integers, or of objects.

    Keys of another kind (names of files, tuples) are kept as they are.
    """
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
