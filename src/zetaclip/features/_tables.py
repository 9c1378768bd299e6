"""Fixed features of the rows of a table, for a linear head: smooth bins, categories and crosses.

A number of a declared range becomes weights of k evenly spaced knots, at most two of them above
zero, which add up to 1: a piecewise-linear function of the number is a linear function of these
weights. The same is done at several resolutions k. A coarse one lets the head learn a slope from
few records, a fine one a curve from many. A category stays one-hot. Crosses are products of the
cells of two columns, so that a linear head can learn that two columns matter together.

**Guarantee.** Every constant comes from the declared columns. The features of a row depend on no
other row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import InputError

if TYPE_CHECKING:
    from ..data.columns import Column

SCALES = (2, 4, 8, 16)
KINDS = ("number", "category", "block")
_CROSSED = 2  # knots of a number in a cross: its product with a category is a slope per category


class TableFeatures(nn.Module):
    """From encoded rows of a table to features of unit length.

    Args:
        columns: The columns in the order of the rows, as (kind, width): "number" has a value in
            [-1, 1] and, with width 2, a flag that is 1 where the value is missing; "category" is
            one-hot; "block" is any other group of values, such as hashed words, and stays as it is.
        scales: Numbers of knots, each at least 2.
        crosses: Number of columns that the products of all pairs are hashed into; 0: no crosses.
            Where there are fewer products, each has its own column.
        share: Share of the squared length of a row that belongs to the crosses.

    Raises:
        InputError: An argument is wrong.

    **Edge cases.** A value outside its range counts as the nearest bound. A missing number with a
    flag has a cell of its own; without a flag it is the middle of its range, as in the encoded row.
    An unknown category has no cell.

    Example:
        >>> features = TableFeatures([("number", 1), ("category", 2)], scales=(3,))
        >>> features(torch.tensor([[0.5, 0.0, 1.0]])) * 1.5**0.5
        tensor([[0.0000, 0.5000, 0.5000, 0.0000, 1.0000]])
    """

    kind = "table"

    def __init__(
        self,
        columns: Sequence[Sequence[Any]],
        scales: Sequence[int] = SCALES,
        crosses: int = 0,
        share: float = 0.5,
    ) -> None:
        super().__init__()
        self.columns = tuple((str(kind), int(width)) for kind, width in columns)
        self.scales = tuple(int(scale) for scale in scales)
        self.crosses, self.share = int(crosses), float(share)
        _check(self)
        starts = list(itertools.accumulate((width for _, width in self.columns), initial=0))
        self.width = starts.pop()
        self._places = [(*column, start) for column, start in zip(self.columns, starts, strict=True)]
        self.outputs = sum(
            sum(self.scales) + len(self.scales) * (width - 1) if kind == "number" else width
            for kind, width in self.columns
        )
        if self.crosses:
            self.outputs += self._add_crosses()

    @property
    def settings(self) -> dict[str, Any]:
        """All arguments as plain data: ``TableFeatures(**settings)`` is the same map."""
        return {
            "columns": [list(column) for column in self.columns],
            "scales": list(self.scales),
            "crosses": self.crosses,
            "share": self.share,
        }

    def forward(self, rows: Tensor) -> Tensor:
        """Features of shape (rows, ``outputs``).

        Args:
            rows: Encoded rows of shape (rows, ``width``).
        """
        weight = len(self.scales) ** 0.5  # as much as a number has at all scales together
        single = _unit(torch.cat([self._cells(rows, place, weight) for place in self._places], 1))
        if not self.crosses:
            return single
        crossed = _unit(self._products(rows))
        return torch.cat([single * (1 - self.share) ** 0.5, crossed * self.share**0.5], 1)

    def _cells(self, rows: Tensor, place: tuple[str, int, int], weight: float) -> Tensor:
        """All cells of one column, at all scales."""
        kind, width, start = place
        if kind != "number":
            return rows[:, start : start + width] * weight
        share = _share(rows[:, start])
        parts = []
        for scale in self.scales:
            knots = torch.arange(scale, dtype=rows.dtype, device=rows.device)
            parts.append((1 - (share[:, None] * (scale - 1) - knots).abs()).clamp(min=0))
        if width == 1:
            return torch.cat(parts, 1)
        missing = rows[:, start + 1 : start + 2]
        flags = missing.expand(-1, len(self.scales))
        return torch.cat([*(part * (1 - missing) for part in parts), flags], 1)

    # -- crosses

    def _add_crosses(self) -> int:
        """Makes the tables of the crosses; returns how many columns they take."""
        self._crossed = [place for place in self._places if place[0] != "block"]
        cells = [_CROSSED - 1 + w if kind == "number" else w for kind, w, _ in self._crossed]
        pairs = list(itertools.combinations(range(len(cells)), 2))
        sizes = [cells[first] * cells[second] for first, second in pairs]
        total = sum(sizes)
        first = torch.tensor([pair[0] for pair in pairs])
        second = torch.tensor([pair[1] for pair in pairs])
        starts = torch.tensor(list(itertools.accumulate(sizes, initial=0))[:-1])
        strides = torch.tensor([cells[pair[1]] for pair in pairs])
        bucket, sign = _hashed(total, self.crosses)
        tables = {"first": first, "second": second, "starts": starts, "strides": strides}
        for name, table in {**tables, "bucket": bucket, "sign": sign}.items():
            self.register_buffer(f"_{name}", table, persistent=False)
        self._buckets = min(total, self.crosses)
        return self._buckets

    def _products(self, rows: Tensor) -> Tensor:
        """The products of the cells of each pair of columns, added up by bucket.

        A row is in at most two cells of a column, so a pair has at most four products.
        """
        found = [_two_cells(rows, place) for place in self._crossed]
        cells = torch.stack([cell for cell, _ in found], 1)  # (rows, columns, 2)
        weights = torch.stack([weight for _, weight in found], 1)
        place = cells[:, self._first, :, None] * self._strides[:, None, None]
        place = place + cells[:, self._second, None, :] + self._starts[:, None, None]
        value = weights[:, self._first, :, None] * weights[:, self._second, None, :]
        place = place.flatten(1)
        value = value.flatten(1) * self._sign[place].to(value)
        empty = torch.zeros(len(rows), self._buckets, dtype=rows.dtype, device=rows.device)
        return empty.scatter_add(1, self._bucket[place], value)


def layout(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Columns as ``TableFeatures`` wants them, from the encodings of a table.

    Args:
        columns: Encodings, as in ``dataset.inputs.columns``.
    """
    kinds = {"numeric": "number", "categorical": "category"}
    return [(kinds.get(column.kind, "block"), len(column.names())) for column in columns]


def _check(features: TableFeatures) -> None:
    if not features.columns:
        raise InputError("a table needs at least one column")
    for kind, width in features.columns:
        if kind not in KINDS or width < 1 or (kind == "number" and width > 2):
            raise InputError(
                f"a column is ({', '.join(KINDS)}; width), a number 1 or 2 wide, not"
                f" ({kind!r}, {width})"
            )
    if not features.scales or min(features.scales) < 2:
        raise InputError(f"scales are numbers of knots, at least 2, not {features.scales}")
    if features.crosses < 0 or not 0 < features.share < 1:
        raise InputError("crosses must be at least 0, and share between 0 and 1")
    if features.crosses and sum(kind != "block" for kind, _ in features.columns) < 2:
        raise InputError("crosses need at least two columns of numbers or categories")


def _share(values: Tensor) -> Tensor:
    """From [-1, 1] to [0, 1]; values outside are clipped."""
    return (values.clamp(-1, 1) + 1) / 2


def _two_cells(rows: Tensor, place: tuple[str, int, int]) -> tuple[Tensor, Tensor]:
    """The two cells of a column that a row can be in, and their weights."""
    kind, width, start = place
    if kind == "category":
        weight, cell = rows[:, start : start + width].max(1)
        return torch.stack([cell, cell], 1), torch.stack([weight, torch.zeros_like(weight)], 1)
    share = _share(rows[:, start])
    cells = torch.arange(2, device=rows.device).expand(len(rows), 2)
    weights = torch.stack([1 - share, share], 1)
    if width == 1:
        return cells, weights
    missing = rows[:, start + 1 : start + 2] > 0.5
    alone = torch.tensor([1.0, 0.0], dtype=rows.dtype, device=rows.device)
    return torch.where(missing, _CROSSED, cells), torch.where(missing, alone, weights)


def _hashed(count: int, buckets: int) -> tuple[Tensor, Tensor]:
    """A bucket and a sign for each of ``count`` cells: fixed functions of the cell's number."""
    if count <= buckets:
        return torch.arange(count), torch.ones(count, dtype=torch.int8)
    with np.errstate(over="ignore"):  # the steps of SplitMix64
        state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    bucket = (state >> np.uint64(1)) % np.uint64(buckets)
    sign = 1 - 2 * (state & np.uint64(1)).astype(np.int8)
    return torch.from_numpy(bucket.astype(np.int64)), torch.from_numpy(sign)


def _unit(rows: Tensor) -> Tensor:
    """Rows of length 1; a row of zeros stays."""
    return rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)
