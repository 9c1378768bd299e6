"""Units of privacy that are several rows: whose rows they are, and which of them a batch has."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..randomness import subkey, uniforms


class Units:
    """The rows of each unit of a data set.

    **Guarantee.** A batch draws units, each by its own coin. A drawn unit brings at most
    ``rows_per_unit`` of its rows, chosen by secret coins, next to each other, and is never split
    over chunks.

    Args:
        ids: One id for each row of the data set; rows of one id are one unit. None: each row is a
            unit of its own.
        rows: The number of rows of the data set.
        rows_per_unit: The largest number of rows that a unit brings into a batch.
        views: How often each row that is drawn stands in the batch.

    Raises:
        ValueError: An argument does not fit the data set, or the others.
    """

    def __init__(self, ids: Any, rows: int, rows_per_unit: int | None, views: int = 1) -> None:
        self.views = _positive("views", views)
        self.most: int | None = None
        self.trivial = ids is None and self.views == 1  # whether every row is a unit of its own
        if ids is None:
            if rows_per_unit is not None:
                raise ValueError("rows_per_unit= needs units=, one id for each row")
            self.count = rows
            return
        if rows_per_unit is None:
            raise ValueError(
                "units= needs rows_per_unit=, the largest number of rows that one unit brings into "
                "a batch. Choose it from public knowledge"
            )
        self.most = _positive("rows_per_unit", rows_per_unit)
        names = np.asarray(ids.cpu() if isinstance(ids, Tensor) else ids)
        if names.shape != (rows,):
            raise ValueError(
                f"units= has one id for each row of the data set: {rows} of them, not an array of "
                f"shape {names.shape}"
            )
        _, unit_of, counts = np.unique(names, return_inverse=True, return_counts=True)
        self.count = len(counts)
        self._unit_of = torch.from_numpy(unit_of)
        self._counts = counts
        self._order = np.argsort(unit_of, kind="stable")  # rows by unit
        self._first = np.cumsum(counts) - counts

    @property
    def largest(self) -> int:
        """The largest number of rows of a batch that one unit can have."""
        return (self.most or 1) * self.views

    def rows_of(self, drawn: Tensor, key: bytes) -> Tensor:
        """The rows that these units bring, unit by unit.

        Args:
            drawn: Numbers of units.
            key: Of the batch. A unit with too many rows brings others in every batch.
        """
        rows = drawn if self.most is None else self._chosen(drawn.numpy(), key)
        return rows if self.views == 1 else rows.repeat_interleave(self.views)

    def _chosen(self, drawn: np.ndarray, key: bytes) -> Tensor:
        assert self.most is not None
        counts, ends = self._counts[drawn], np.cumsum(self._counts[drawn])
        starts = np.repeat(self._first[drawn] - (ends - counts), counts)
        rows = self._order[starts + np.arange(len(starts))]
        if (counts > self.most).any():
            # A coin belongs to a row of the data set: it does not depend on who else was drawn.
            coins = uniforms(subkey(key, "rows of units"), len(self._order))[rows]
            unit = np.repeat(np.arange(len(drawn)), counts)
            order = np.lexsort((coins, unit))
            place = np.empty(len(rows), dtype=np.int64)
            place[order] = np.arange(len(rows)) - np.repeat(ends - counts, counts)
            rows = rows[place < self.most]
        return torch.from_numpy(rows)

    def split(self, rows: Tensor, size: int | None) -> list[Tensor]:
        """The rows in chunks of at most ``size``; a unit is never split."""
        if size is None or len(rows) <= size:
            return [rows]
        sizes, room = [0], size
        for count in self.counts(rows).tolist():
            if count > room:
                sizes.append(0)
                room = size
            sizes[-1] += count
            room -= count
        return list(rows.split(sizes))

    def counts(self, rows: Tensor) -> Tensor:
        """How many rows each unit has, of rows that ``rows_of`` gave."""
        units = rows if self.most is None else self._unit_of[rows]
        return torch.unique_consecutive(units, return_counts=True)[1]

    def digest(self) -> str:
        """The number of rows, and a digest of who owns which. Secret, like the records."""
        if self.most is None:
            return ""
        digest = hashlib.blake2b(self._unit_of.numpy().tobytes(), digest_size=32).hexdigest()
        return f"{len(self._unit_of)}:{digest}"


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or value != int(value) or value < 1:
        raise ValueError(f"{name} must be a positive whole number, not {value}")
    return int(value)
