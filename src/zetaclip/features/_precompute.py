"""Features of many records at once: in parts, on all cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._shared import found_or_made

if TYPE_CHECKING:
    from ..data import Dataset
    from ._patches import Patches
    from ._scattering import Scattering
    from ._tables import Bins

    Fixed = Patches | Scattering | Bins

_ROWS = 256  # records that one thread takes at a time


@torch.no_grad()
def features_of(
    module: Fixed, x: Tensor, moved: Callable[[int], None] = lambda rows: None
) -> Tensor:
    """Features of records, computed in parts, on as many cores as torch has threads.

    Each part is computed by one thread. So the features don't depend on the number of threads.

    Args:
        module: A frozen module of this package.
        x: Pictures (rows, channels, height, width), or encoded rows of a table.
        moved: Called after each part with the number of its rows.

    Returns:
        (rows, columns).
    """
    workers = torch.get_num_threads()
    found = x.new_empty((len(x), module.columns))

    def part(at: int) -> int:
        torch.set_num_threads(1)  # of this thread
        rows = x[at : at + _ROWS]
        with torch.no_grad():  # which a new thread does not inherit
            found[at : at + len(rows)] = module(rows)
        return len(rows)

    try:
        with ThreadPoolExecutor(workers) as pool:
            for rows in pool.map(part, range(0, len(x), _ROWS)):
                moved(rows)
    finally:
        torch.set_num_threads(workers)
    return found


def precompute(
    dataset: Dataset, module: Fixed, moved: Callable[[int], None] = lambda rows: None
) -> Dataset:
    """The data set with features in place of pictures or rows.

    **Guarantee.** Each record's features depend on that record alone. Nothing is written to disk,
    unless a session of experiments shares features between its runs (``_shared.py``). Features of
    private records are as private as the records.

    Args:
        dataset: Pictures with values in [-1, 1], or a table.
        module: A frozen module of this package.
        moved: Called with the number of records that are done, for a progress bar.
    """
    described = module.describe()

    def found(x: Tensor) -> Tensor:
        return found_or_made(described, x, lambda: features_of(module, x, moved))

    splits = {
        name: dataclasses.replace(split, x=found(split.x))
        for name in ("train", "test")
        if (split := getattr(dataset, name)) is not None
    }
    note = (
        f"fixed in advance, not trained: {described['kind']} features, {module.columns} columns,"
        f" {module.made_from}; trained: the head on them"
    )
    return dataclasses.replace(
        dataset, **splits, features=(), feature_map=described, notes=(*dataset.notes, note)
    )
