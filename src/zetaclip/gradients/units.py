"""Rows of one unit become one example: their gradients are added before norms are taken.

A unit is several rows of a batch: the visits of one patient, or several views of one picture. Its
gradient is the mean (or the sum) of its rows' gradients. The rows of a unit are one more dimension
that a contribution sums over, so hardly more is kept in memory than for single rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .combine import combine
from .contributions import SUM_FLOATS, Contribution, Dense, Lookup, Outer, Single
from .rows import joined

Received = dict[int, list[Contribution]]


def by_unit(received: Received, counts: Tensor, mean: bool) -> Iterator[tuple[Received, int]]:
    """Joins the rows of each unit.

    Units are treated in groups of similar size, and filled up with rows of weight zero to the
    largest one of their group: at most twice as many rows as there are.

    Args:
        received: Contributions of single rows, by the id() of their parameter.
        counts: How many rows each unit has, in the order of the rows.
        mean: Whether a unit's gradient is the mean of its rows, or their sum.

    Yields:
        The contributions of a group of units, and how many units it has.

    **Guarantee.** Every unit is in one group. What a unit contributes is a function of its own rows
    (up to how torch's kernels round for other numbers of rows).
    """
    if bool((counts == 1).all()):
        yield received, len(counts)
        return
    parts = {p: some if len(some) == 1 else combine(some) for p, some in received.items()}
    first = counts.cumsum(0) - counts
    sizes = counts.double().log2().ceil()  # 1; 2; 3 and 4; 5 to 8; ...
    for size in sizes.unique().tolist():
        units = (sizes == size).nonzero().flatten()
        own = counts[units].unsqueeze(1)
        slots = torch.arange(int(own.max()), device=counts.device)
        # A slot that is too much repeats a row of the same unit, so no other unit's NaN gets in.
        index = first[units].unsqueeze(1) + slots.clamp(max=own - 1)
        weight = (slots < own) / (own if mean else torch.ones_like(own))
        # The gradients that are there already, in one compiled call.
        there = [part for some in parts.values() for part in some if isinstance(part, Dense)]
        sums = iter(joined([part.stored for part in there], index, weight))
        yield (
            {
                p: [
                    _joined(part, index, weight, next(sums) if isinstance(part, Dense) else None)
                    for part in some
                ]
                for p, some in parts.items()
            },
            len(units),
        )


def _joined(
    part: Contribution, index: Tensor, weight: Tensor, stored: Tensor | None
) -> Contribution:
    """One example per unit.

    Args:
        part: One example per row.
        index: The rows of each unit, (units, slots).
        weight: What each of them counts, (units, slots).
        stored: The sums of a ``Dense``, if they are known already.
    """
    if isinstance(part, Single):
        return Outer(part.x[index], _weighted(part.g[index], weight), part.block)
    if isinstance(part, Outer):
        g = _weighted(part.g[index], weight)
        return Outer(part.x[index].flatten(1, 2), g.flatten(1, 2), part.block)
    if isinstance(part, Lookup):
        g = _weighted(part.g[index], weight)
        return replace(part, ids=part.ids[index].flatten(1, 2), g=g.flatten(1, 2))
    whole = UnitSum(part, index, weight)
    if isinstance(part, Dense):
        stored = whole.summed("stored") if stored is None else stored
        return replace(part, stored=stored, known=None)
    return whole


def _weighted(values: Tensor, weight: Tensor) -> Tensor:
    shape = (*weight.shape, *(1 for _ in values.shape[2:]))
    return values * weight.to(values.dtype).view(shape)


@dataclass(frozen=True)
class UnitSum:
    """Sums of the rows' gradients, which are computed a few units at a time.

    They are computed for their norms, and again for their sum, as for single rows.

    Attributes:
        rows: The gradients of single rows.
        index: The rows of each unit, (units, slots).
        weight: What each of them counts, (units, slots).
    """

    rows: Contribution
    index: Tensor
    weight: Tensor

    @property
    def block(self) -> slice | None:
        """The rows of the parameter that the gradients are for; None for all."""
        return self.rows.block

    def summed(self, form: str) -> Tensor:
        """Σ weight * gradient over the rows of each unit, one slot at a time.

        Args:
            form: "stored", the form in which a ``Dense`` keeps its gradients, or "dense".
        """
        total: Tensor | None = None
        for slot in range(self.index.shape[1]):
            taken = self.rows.take(self.index[:, slot])
            one = taken.stored if form == "stored" else taken.dense()  # type: ignore[attr-defined]
            weight = self.weight[:, slot].to(one.dtype).view(-1, *(1 for _ in one.shape[1:]))
            total = one * weight if total is None else total.addcmul_(one, weight)
        assert total is not None
        return total

    def _made(self) -> Iterator[tuple[slice, Dense]]:
        floats = self.rows.take(slice(0, 1)).dense().numel()
        some = max(1, SUM_FLOATS // max(1, floats))
        for begin in range(0, len(self.index), some):
            units = slice(begin, begin + some)
            gradients = self.take(units).dense()
            yield units, Dense(gradients, gradients.shape[1:])

    def norms(self) -> Tensor:
        """The norm of each unit's gradient."""
        return torch.cat([part.norms() for _, part in self._made()])

    def add_to(self, out: Tensor, factors: Tensor) -> None:
        """Adds the sum of the gradients times ``factors``, in float64."""
        for units, part in self._made():
            part.add_to(out, factors[units])

    def dense(self) -> Tensor:
        """The gradients, with shape (units, *parameter or block)."""
        return self.summed("dense")

    def take(self, units: Tensor | slice) -> UnitSum:
        """The same for these units only."""
        return replace(self, index=self.index[units], weight=self.weight[units])

    def blank(self, units: Tensor) -> UnitSum:
        """The same with zero gradients for these units."""
        rows = self.index[units].flatten().unique()
        weight = self.weight.index_fill(0, units, 0)
        return replace(self, rows=self.rows.blank(rows), weight=weight)

    def double(self) -> UnitSum:
        """The same in float64."""
        return replace(self, rows=self.rows.double())
