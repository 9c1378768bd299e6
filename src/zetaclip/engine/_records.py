"""One record of zeros, and what a record looks like in a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader

from ..randomness._forward import untouched


def zero_row(loader: DataLoader) -> Any:
    """One record of zeros, shaped as the loader's batches.

    The model sees it when a batch is empty.

    **Edge cases.** Where workers read the data, a worker reads this record, too: a dataset that
    opens its file on first use would otherwise hold an open file here, which can't be sent to
    workers that are spawned, and is shared by those that are forked.
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
    """The shape of one record in each tensor of a batch.

    None where a tensor has no dimension of records.
    """
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
