"""What each example adds to one parameter's gradient, in the cheapest form that gives its norm.

Autograd only computes sums over examples. A contribution stores enough of one layer's backward pass
for two other results: the norm of each example's gradient (``norms``), and the sum after every
example was scaled by its own factor (``add_to``). Only ``Dense`` stores the per-example gradients;
the others store a layer's input and output gradient, which is usually far less.

**Guarantee.** Values of different records are added only in float64, so a record is not lost beside
others. One record's own gradient may be computed in float32. Its rounding errors depend on this
record, and on how torch's kernels round a batch of that size (docs/sharp-edges.md). If a norm is
unreliable, because it overflowed or lost precision by cancellation, it is NaN: the caller then
computes that example again in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from . import products
from .grams import MEMORY_COST, TRUSTED, floor, gram_is_cheaper, gram_norms, gram_share, trusted
from .rows import add_weighted_rows as add_compiled

# Number of values whose squares are added in float32; such sums are then added in float64.
NORM_PIECE = 2048
# Floats of gradients that are computed at once for a sum: they stay in the cache until added.
SUM_FLOATS = 1 << 18
# From this many positions on, a float32 matrix product per record, whose result is added in
# float64, costs less than a float64 product over the positions of all records; `bench/kernels.py`
# measures it. This affects only speed.
LONG_SEQUENCE = 24


class Contribution(Protocol):
    """Per-example gradients of one parameter, or of a block of its rows, in some form."""

    @property
    def block(self) -> slice | None:
        """The rows of the parameter that the gradients are for; None for all."""

    def norms(self) -> Tensor:
        """The norm of each example's gradient; not finite if it is unreliable."""

    def add_to(self, out: Tensor, factors: Tensor) -> None:
        """``out += Σ_i factors[i] * gradient_i`` in float64.

        Args:
            out: In the shape of the block, and contiguous.
            factors: One float64 number per example.
        """

    def dense(self) -> Tensor:
        """The gradients, with shape (examples, *parameter or block)."""

    def take(self, rows: Tensor | slice) -> Contribution:
        """The same for these examples only: a copy, or a view if they are a slice."""

    def blank(self, rows: Tensor) -> Contribution:
        """The same with the gradients of these examples replaced by zero."""

    def double(self) -> Contribution:
        """The same in float64."""


def row_norms(rows: Tensor) -> Tensor:
    """The norm of each row, in float64.

    ``vector_norm`` is many times faster here than a sum of squares. It adds in the dtype of the
    row, so long rows are processed in pieces: a float32 sum of millions of squares would lose the
    small ones.
    """
    flat = rows if rows.dim() == 2 else rows.reshape(len(rows), -1)
    width = flat.shape[1]
    if width <= 2 * NORM_PIECE or flat.dtype == torch.float64:
        return torch.linalg.vector_norm(flat, dim=1).double()
    whole = width - width % NORM_PIECE
    pieces = torch.linalg.vector_norm(
        flat[:, :whole].unflatten(1, (-1, NORM_PIECE)), dim=2
    ).double()
    norms = torch.linalg.vector_norm(pieces, dim=1)
    return (
        norms
        if whole == width
        else torch.hypot(norms, torch.linalg.vector_norm(flat[:, whole:], dim=1).double())
    )


def add_weighted_rows(out: Tensor, rows: Tensor, factors: Tensor) -> None:
    """``out += Σ_i factors[i] * rows[i]``, in float64.

    Args:
        out: float64 vector of the width of the rows.
        rows: (examples, width), of any float dtype.
        factors: One float64 number per example.
    """
    if add_compiled(out, rows, factors):
        return
    if rows.dtype == torch.float64:
        out.addmv_(rows.t(), factors)
    else:
        some = max(1, SUM_FLOATS // max(1, len(rows)))
        for part, own in zip(rows.split(some, dim=1), out.split(some), strict=True):
            own.addmv_(part.double().t(), factors)


def made(parts: Contribution, count: int, floats: int) -> Iterator[tuple[slice, Dense]]:
    """Computes the gradients of a few examples at a time.

    Args:
        parts: The gradients in another form.
        count: Number of examples.
        floats: Size of one example's gradient.

    Yields:
        The examples, as a slice, and their gradients. Every call gives the same numbers.
    """
    some = max(1, SUM_FLOATS // max(1, floats))
    for first in range(0, count, some):
        rows = slice(first, min(first + some, count))
        gradients = parts.take(rows).dense()
        yield rows, Dense(gradients, gradients.shape[1:])


def _blanked(tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor.index_fill(0, rows, 0)


@dataclass(frozen=True)
class Dense:
    """The gradients themselves.

    A kernel may store them in the order in which it computes them. The norm does not depend on the
    order, and only the sum over examples is reordered, instead of each example.

    Attributes:
        stored: (examples, anything).
        shape: Shape of the parameter or block.
        unpack: Reorders ``stored``; None if that is not necessary.
        block: Rows of the parameter; None for all.
        known: The norms, if they have been computed already.
    """

    stored: Tensor
    shape: torch.Size
    unpack: Callable[[Tensor], Tensor] | None = None
    block: slice | None = None
    known: Tensor | None = None

    def norms(self) -> Tensor:
        """The norm of each example's gradient; NaN if it is unreliable."""
        return row_norms(self.stored) if self.known is None else self.known

    def add_to(self, out: Tensor, factors: Tensor) -> None:
        """Adds the sum of the gradients times ``factors``, in float64."""
        flat = self.stored if self.stored.dim() == 2 else self.stored.reshape(len(self.stored), -1)
        if self.unpack is None and out.is_contiguous():
            add_weighted_rows(out.view(-1), flat, factors)
            return
        total = flat.new_zeros(flat.shape[1], dtype=torch.float64)
        add_weighted_rows(total, flat, factors)
        out.add_(self._ordered(total.view(1, *self.stored.shape[1:]))[0])

    def _ordered(self, stored: Tensor) -> Tensor:
        if self.unpack is not None:
            stored = self.unpack(stored)
        return stored.reshape(len(stored), *self.shape)

    def dense(self) -> Tensor:
        """The gradients, with shape (examples, *parameter or block)."""
        return self._ordered(self.stored)

    def take(self, rows: Tensor | slice) -> Dense:
        """The same for these examples only."""
        return replace(self, stored=self.stored[rows], known=None)

    def blank(self, rows: Tensor) -> Dense:
        """The same with zero gradients for these examples."""
        return replace(self, stored=_blanked(self.stored, rows), known=None)

    def double(self) -> Dense:
        """The same in float64."""
        return replace(self, stored=self.stored.double(), known=None)


@dataclass(frozen=True)
class Single:
    """Gradients of a matrix that multiplied one vector per example: gradient_i = g_i x_iᵀ.

    The norm is a product of two norms; gradients are not computed.

    Attributes:
        x: Inputs, (B, I).
        g: Output gradients, (B, O).
        block: Rows of the parameter; None for all.
    """

    x: Tensor
    g: Tensor
    block: slice | None = None

    def norms(self) -> Tensor:
        """The norm of each example's gradient; NaN if it is unreliable."""
        lost = floor(max(self.x.shape[1], self.g.shape[1]), self.x.dtype)
        return row_norms(self.x).add_(lost).mul_(row_norms(self.g).add_(lost))

    def add_to(self, out: Tensor, factors: Tensor) -> None:
        """Adds the sum of the gradients times ``factors``, in float64."""
        if products.takes(self.x, self.g):
            products.add_outers([(self.x, self.g, out)], factors)
            return
        if self.x.shape[1] < self.g.shape[1]:  # what has fewer columns is cheaper to scale
            out.addmm_(self.g.double().t(), self.x * factors.unsqueeze(1))
        else:
            out.addmm_((self.g * factors.unsqueeze(1)).t(), self.x.double())

    def dense(self) -> Tensor:
        """The gradients, with shape (examples, *parameter or block)."""
        return self.g.unsqueeze(2) * self.x.unsqueeze(1)

    def take(self, rows: Tensor | slice) -> Single:
        """The same for these examples only."""
        return Single(self.x[rows], self.g[rows], self.block)

    def blank(self, rows: Tensor) -> Single:
        """The same with zero gradients for these examples."""
        return Single(_blanked(self.x, rows), _blanked(self.g, rows), self.block)

    def double(self) -> Single:
        """The same in float64."""
        return Single(self.x.double(), self.g.double(), self.block)

    def as_sequence(self) -> Outer:
        """The same as gradients of a sequence."""
        return Outer(self.x.unsqueeze(1), self.g.unsqueeze(1), self.block)


@dataclass(frozen=True)
class Outer:
    """Gradients of a matrix that multiplied a sequence: gradient_i = Σ_t g[i,t] x[i,t]ᵀ.

    Attributes:
        x: Inputs, (B, T, I).
        g: Output gradients, (B, T, O).
        block: Rows of the parameter; None for all.
    """

    x: Tensor
    g: Tensor
    block: slice | None = None

    def norms(self) -> Tensor:
        """The norm of each example's gradient; NaN if it is unreliable."""
        positions, inputs, outputs = self.x.shape[1], self.x.shape[2], self.g.shape[2]
        fast = products.takes(self.x, self.g)
        if gram_is_cheaper(positions, inputs, outputs, fast):
            made_later = fast or (positions >= LONG_SEQUENCE and self.x.dtype == torch.float32)
            return gram_norms(self.x, self.g, gram_share(positions, made_later))
        # The same numbers as in ``add_to``: no rounding error can come between norm and sum.
        if fast:
            return products.norms(self.x, self.g, products.sequence(self.x, self.g))
        return torch.cat([part.norms() for _, part in made(self, len(self.x), inputs * outputs)])

    def add_to(self, out: Tensor, factors: Tensor) -> None:
        """Adds the sum of the gradients times ``factors``, in float64."""
        positions, inputs, outputs = self.x.shape[1], self.x.shape[2], self.g.shape[2]
        if products.takes(self.x, self.g):
            products.add(self.x, self.g, products.sequence(self.x, self.g), factors, out)
            return
        if positions >= LONG_SEQUENCE or not gram_is_cheaper(positions, inputs, outputs, False):
            for rows, part in made(self, len(factors), inputs * outputs):
                part.add_to(out, factors[rows])
            return
        some = max(1, 4 * SUM_FLOATS // max(1, positions * (inputs + outputs)))
        for x, g, own in zip(
            self.x.split(some), self.g.split(some), factors.split(some), strict=True
        ):
            scaled = g.double() * own.view(-1, 1, 1)
            out.addmm_(scaled.flatten(0, 1).t(), x.flatten(0, 1).double())

    def dense(self) -> Tensor:
        """The gradients, with shape (examples, *parameter or block)."""
        return torch.bmm(self.g.transpose(1, 2), self.x)

    def take(self, rows: Tensor | slice) -> Outer:
        """The same for these examples only."""
        return replace(self, x=self.x[rows], g=self.g[rows])

    def blank(self, rows: Tensor) -> Outer:
        """The same with zero gradients for these examples."""
        return replace(self, x=_blanked(self.x, rows), g=_blanked(self.g, rows))

    def double(self) -> Outer:
        """The same in float64."""
        return replace(self, x=self.x.double(), g=self.g.double())

    def as_sequence(self) -> Outer:
        """The same as gradients of a sequence."""
        return self


@dataclass(frozen=True)
class Lookup:
    """Gradients of a table that was indexed: gradient_i[v] = Σ_{t: ids[i,t] = v} g[i,t].

    Attributes:
        ids: Indices, (B, T).
        g: Output gradients, (B, T, D).
        shape: Shape of the table.
        block: Rows of the parameter; None for all.
    """

    ids: Tensor
    g: Tensor
    shape: torch.Size
    block: slice | None = None

    def norms(self) -> Tensor:
        """The norm of each example's gradient; NaN if it is unreliable."""
        if self.ids.shape[1] == 1:
            return row_norms(self.g)
        positions = self.ids.shape[1]
        g = self.g.double()
        lengths = torch.linalg.vector_norm(g, dim=2)
        ones = torch.ones_like(lengths)
        if positions * positions > MEMORY_COST * self.shape.numel():
            # For long texts and a small table the gradients are smaller than the Gram matrices.
            some = max(1, (1 << 22) // self.shape.numel())
            rows = torch.arange(len(self.ids), device=self.ids.device).split(some)
            return torch.cat([row_norms(self.take(part).double().dense()) for part in rows])
        same = (self.ids.unsqueeze(2) == self.ids.unsqueeze(1)).double()
        gram = torch.bmm(g, g.transpose(1, 2))
        squares = torch.linalg.vecdot(same.flatten(1), gram.flatten(1)).clamp_min_(0)
        # Gradients of different table rows do not cancel, so the sum of all lengths is larger than
        # the value without cancellation; a few more norms than necessary become NaN.
        return trusted(squares.sqrt_(), ones, lengths, 1, self.g.shape[2], TRUSTED)

    def add_to(self, out: Tensor, factors: Tensor) -> None:
        """Adds the sum of the gradients times ``factors``, in float64."""
        scaled = self.g.double() * factors.view(-1, 1, 1)
        out.index_add_(0, self.ids.flatten(), scaled.flatten(0, 1))

    def dense(self) -> Tensor:
        """The gradients, with shape (examples, *parameter or block)."""
        examples, positions = self.ids.shape
        out = self.g.new_zeros(examples, *self.shape)
        row = torch.arange(examples, device=self.ids.device).unsqueeze(1).expand(-1, positions)
        return out.index_put_(
            (row.flatten(), self.ids.flatten()), self.g.flatten(0, 1), accumulate=True
        )

    def take(self, rows: Tensor | slice) -> Lookup:
        """The same for these examples only."""
        return replace(self, ids=self.ids[rows], g=self.g[rows])

    def blank(self, rows: Tensor) -> Lookup:
        """The same with zero gradients for these examples."""
        return replace(self, g=_blanked(self.g, rows))

    def double(self) -> Lookup:
        """The same in float64."""
        return replace(self, g=self.g.double())
