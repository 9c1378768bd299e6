"""What each example adds to one parameter's gradient, in the cheapest form that still tells its norm.

Autograd only ever sums over examples. A contribution holds enough of one layer's backward pass to answer
two questions without that sum: how long is each example's gradient (``norms``), and what is the sum once
every example has been scaled by its own factor (``add_to``). Only ``Dense`` really holds the per-example
gradients; the others hold a layer's input and output gradient, which is usually far less.

**Guarantee.** No two records meet in less than float64: what a record adds to a sum does not depend on the
records beside it. One record's own gradient may be worked out in float32, which rounds it in a way that is
its own. A norm that can't be trusted, because it overflowed or because cancellation ate its digits, is
returned as NaN: the caller then works that example out again in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from . import compiled

# A float that passes through memory (written, read for the norm, read for the sum) costs about as much as
# this many multiply-adds of a matrix product; `bench/kernels.py` measures it. It only decides speed.
MEMORY_COST = 40
# Values whose squares are added up in float32 before the sum goes on in float64.
NORM_PIECE = 2048
# Floats that are made at once on the way to a sum: they stay in the cache until they are added.
SUM_FLOATS = 1 << 18
# From so many positions on, one record's float32 matrix product and a float64 addition of what it gives cost less
# than a float64 product over the positions of all records; `bench/kernels.py` measures it. It only decides speed.
LONG_SEQUENCE = 24
# A sum that comes out below this share of Σ_t |x_t||g_t|, the value it would have without cancellation, has lost
# too many digits to bound anything with: by Gram matrices (which see its square) and by making the gradient.
TRUSTED_GRAM = {torch.float32: 1e-2, torch.float64: 1e-6}
TRUSTED_DENSE = {torch.float32: 1e-3, torch.float64: 1e-9}


class Contribution(Protocol):
    """Per-example gradients of one parameter, or of a block of its rows (``block``), in some form."""

    @property
    def block(self) -> slice | None: ...

    def norms(self) -> Tensor:
        """The norm of each example's gradient; not finite where it can't be trusted."""

    def add_to(self, out: Tensor, factors: Tensor) -> None:
        """``out += Σ_i factors[i] * gradient_i``, all in float64; ``out`` is shaped like the parameter or its block."""

    def dense(self) -> Tensor:
        """The gradients themselves, shaped (examples, *parameter or block)."""

    def take(self, rows: Tensor | slice) -> Contribution:
        """The same for these examples only: a copy, or a view where they are a slice."""

    def blank(self, rows: Tensor) -> Contribution:
        """The same with the gradients of these examples replaced by zero."""

    def double(self) -> Contribution:
        """The same in float64."""


def widen(tensor: Tensor) -> Tensor:
    """Half precision to float32; anything wider as it is."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def row_norms(rows: Tensor) -> Tensor:
    """Norm of each row, in float64.

    ``vector_norm`` is many times faster here than a sum of squares. It adds up in the dtype of the row, so long
    rows are taken in pieces: a float32 sum of millions of squares would lose the small ones.
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
    """``out += Σ_i factors[i] * rows[i]`` in float64, for rows (examples, width) of any float dtype and a flat ``out``."""
    if (
        len(rows)
        and compiled.plain(rows, torch.float32)
        and compiled.plain(factors, torch.float64)
        and compiled.plain(out, torch.float64)
    ):
        assert out.shape == rows.shape[1:] and factors.shape == rows.shape[:1]
        task = (compiled.array(rows), None, compiled.array(out))
        compiled.rows.weigh([task], len(rows), compiled.array(factors), 1.0)
    elif rows.dtype == torch.float64:
        out.addmv_(rows.t(), factors)
    else:
        some = max(1, SUM_FLOATS // max(1, len(rows)))
        for part, own in zip(rows.split(some, dim=1), out.split(some), strict=True):
            own.addmv_(part.double().t(), factors)


def add_in_pieces(parts: Contribution, out: Tensor, factors: Tensor, floats: int) -> None:
    """Makes the gradients themselves, a few examples at a time, and adds them up in float64."""
    some = max(1, SUM_FLOATS // max(1, floats))
    for first in range(0, len(factors), some):
        rows = slice(first, first + some)
        made = parts.take(rows).dense()
        Dense(made, made.shape[1:]).add_to(out, factors[rows])


@functools.cache
def floor(width: int, dtype: torch.dtype) -> float:
    """How much of a norm over ``width`` values can be lost because tiny squares underflow to zero.

    Added wherever norms are multiplied: a lost 1e-20 times a gradient of 1e20 would otherwise be a whole record that
    passes for zero. Next to any ordinary norm it is far below rounding.
    """
    return (width * torch.finfo(dtype).tiny) ** 0.5


def _blanked(tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor.index_fill(0, rows, 0)


@dataclass(frozen=True)
class Dense:
    """The gradients themselves: ``stored`` is (examples, anything), ``unpack`` gives it the parameter's shape.

    A kernel may store them in the order in which it makes them; the norm does not care, and the sum over
    examples is put in order once instead of once per example.
    """

    stored: Tensor
    shape: torch.Size
    unpack: Callable[[Tensor], Tensor] | None = None
    block: slice | None = None
    known: Tensor | None = None  # the norms, where somebody has worked them out already

    def norms(self) -> Tensor:
        return row_norms(self.stored) if self.known is None else self.known

    def add_to(self, out: Tensor, factors: Tensor) -> None:
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
        return self._ordered(self.stored)

    def take(self, rows: Tensor | slice) -> Dense:
        return replace(self, stored=self.stored[rows], known=None)

    def blank(self, rows: Tensor) -> Dense:
        return replace(self, stored=_blanked(self.stored, rows), known=None)

    def double(self) -> Dense:
        return replace(self, stored=self.stored.double(), known=None)


def gram_is_cheaper(positions: int, inputs: int, outputs: int) -> bool:
    """Whether norms by T x T Gram matrices cost less than moving the gradients through memory once."""
    return positions * positions * (inputs + outputs) <= MEMORY_COST * inputs * outputs


def gram_norms(x: Tensor, g: Tensor) -> Tensor:
    """Norms of Σ_t g_t x_tᵀ, for x (B, T, I) and g (B, T, O), from the two T x T Gram matrices.

    **Edge cases.** The double sum may cancel. Where too little is left of the largest possible value, the answer is NaN.
    """
    gram_x = torch.bmm(x, x.transpose(1, 2))
    gram_g = torch.bmm(g, g.transpose(1, 2))
    # In float64: of T² terms of both signs little may be left.
    squares = torch.linalg.vecdot(
        gram_x.flatten(1).double(), gram_g.flatten(1).double()
    ).clamp_min_(0)
    lengths_x = gram_x.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt_()
    lengths_g = gram_g.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt_()
    return trusted(
        squares.sqrt_(), lengths_x, lengths_g, x.shape[2], g.shape[2], TRUSTED_GRAM[x.dtype]
    )


def trusted(
    norms: Tensor, lengths_x: Tensor, lengths_g: Tensor, inputs: int, outputs: int, share: float
) -> Tensor:
    """``norms``, NaN where cancellation took the digits, and never below what underflow can hide.

    ``lengths`` are the norms of x_t and g_t, (B, T).
    """
    largest = torch.linalg.vecdot(lengths_x, lengths_g)
    lost_x, lost_g = floor(inputs, lengths_x.dtype), floor(outputs, lengths_g.dtype)
    hidden = torch.linalg.vecdot(lengths_x + lost_x, lengths_g + lost_g).sub_(largest)
    # Written so that an overflow (inf or nan) is flagged as well.
    return norms.masked_fill_(~(norms >= share * largest), torch.nan).add_(hidden)


@dataclass(frozen=True)
class Single:
    """A matrix that multiplied one vector per example: gradient_i = g_i x_iᵀ, for x (B, I) and g (B, O).

    Its norm is a product of two norms; no gradient is ever made. ``known`` holds the norms of g.
    """

    x: Tensor
    g: Tensor
    block: slice | None = None
    known: Tensor | None = None

    def norms(self) -> Tensor:
        known = row_norms(self.g) if self.known is None else self.known
        lost = floor(max(self.x.shape[1], self.g.shape[1]), self.x.dtype)
        return row_norms(self.x).add_(lost).mul_(known + lost)

    @property
    def narrow(self) -> Tensor:
        """The one that is cheaper to scale."""
        return self.x if self.x.shape[1] < self.g.shape[1] else self.g

    def add_to(self, out: Tensor, factors: Tensor) -> None:
        scaled = self.narrow.double() * factors.unsqueeze(1)
        if self.narrow is self.x:
            out.addmm_(self.g.double().t(), scaled)
        else:
            out.addmm_(scaled.t(), self.x.double())

    def dense(self) -> Tensor:
        return self.g.unsqueeze(2) * self.x.unsqueeze(1)

    def take(self, rows: Tensor | slice) -> Single:
        return Single(self.x[rows], self.g[rows], self.block)

    def blank(self, rows: Tensor) -> Single:
        return Single(_blanked(self.x, rows), _blanked(self.g, rows), self.block)

    def double(self) -> Single:
        return Single(self.x.double(), self.g.double(), self.block)

    def as_sequence(self) -> Outer:
        return Outer(self.x.unsqueeze(1), self.g.unsqueeze(1), self.block)


@dataclass(frozen=True)
class Outer:
    """A matrix that multiplied a sequence: gradient_i = Σ_t g[i,t] x[i,t]ᵀ, for x (B, T, I) and g (B, T, O)."""

    x: Tensor
    g: Tensor
    block: slice | None = None

    def norms(self) -> Tensor:
        inputs, outputs = self.x.shape[2], self.g.shape[2]
        if gram_is_cheaper(self.x.shape[1], inputs, outputs):
            return gram_norms(self.x, self.g)
        # Long sequences: the gradients are smaller than the Gram matrices, so make them, a few at a time.
        some = max(1, (1 << 22) // max(1, inputs * outputs))
        pieces = [
            row_norms(torch.bmm(g.transpose(1, 2), x))
            for x, g in zip(self.x.split(some), self.g.split(some), strict=True)
        ]
        # The sum is formed in another order than these norms, so it is trusted no further than its digits go.
        lengths_x, lengths_g = (
            torch.linalg.vector_norm(self.x, dim=2),
            torch.linalg.vector_norm(self.g, dim=2),
        )
        return trusted(
            torch.cat(pieces), lengths_x, lengths_g, inputs, outputs, TRUSTED_DENSE[self.x.dtype]
        )

    def add_to(self, out: Tensor, factors: Tensor) -> None:
        positions, inputs, outputs = self.x.shape[1], self.x.shape[2], self.g.shape[2]
        if positions >= LONG_SEQUENCE:
            return add_in_pieces(self, out, factors, inputs * outputs)
        some = max(1, 4 * SUM_FLOATS // max(1, positions * (inputs + outputs)))
        for x, g, own in zip(
            self.x.split(some), self.g.split(some), factors.split(some), strict=True
        ):
            scaled = g.double() * own.view(-1, 1, 1)
            out.addmm_(scaled.flatten(0, 1).t(), x.flatten(0, 1).double())

    def dense(self) -> Tensor:
        return torch.bmm(self.g.transpose(1, 2), self.x)

    def take(self, rows: Tensor | slice) -> Outer:
        return replace(self, x=self.x[rows], g=self.g[rows])

    def blank(self, rows: Tensor) -> Outer:
        return replace(self, x=_blanked(self.x, rows), g=_blanked(self.g, rows))

    def double(self) -> Outer:
        return replace(self, x=self.x.double(), g=self.g.double())

    def as_sequence(self) -> Outer:
        return self


@dataclass(frozen=True)
class Lookup:
    """A table that was indexed: gradient_i[v] = Σ_{t: ids[i,t] = v} g[i,t]; ids (B, T), g (B, T, D)."""

    ids: Tensor
    g: Tensor
    shape: torch.Size
    block: slice | None = None

    def norms(self) -> Tensor:
        if self.ids.shape[1] == 1:
            return row_norms(self.g)
        positions = self.ids.shape[1]
        lengths = torch.linalg.vector_norm(self.g, dim=2)
        ones = torch.ones_like(lengths)
        if positions * positions > MEMORY_COST * self.shape.numel():
            # Long texts over a small table: the gradients are smaller than the positions' Gram matrix.
            some = max(1, (1 << 22) // self.shape.numel())
            rows = torch.arange(len(self.ids), device=self.ids.device).split(some)
            norms = torch.cat([row_norms(self.take(part).dense()) for part in rows])
            return trusted(norms, ones, lengths, 1, self.g.shape[2], TRUSTED_DENSE[self.g.dtype])
        same = (self.ids.unsqueeze(2) == self.ids.unsqueeze(1)).to(self.g.dtype)
        gram = torch.bmm(self.g, self.g.transpose(1, 2))
        squares = torch.linalg.vecdot(
            same.flatten(1).double(), gram.flatten(1).double()
        ).clamp_min_(0)
        # Rows of the table don't mix, so the sum of all lengths overstates what cancellation could have taken; it only
        # flags a few more.
        return trusted(
            squares.sqrt_(), ones, lengths, 1, self.g.shape[2], TRUSTED_GRAM[self.g.dtype]
        )

    def add_to(self, out: Tensor, factors: Tensor) -> None:
        scaled = self.g.double() * factors.view(-1, 1, 1)
        out.index_add_(0, self.ids.flatten(), scaled.flatten(0, 1))

    def dense(self) -> Tensor:
        examples, positions = self.ids.shape
        out = self.g.new_zeros(examples, *self.shape)
        row = torch.arange(examples, device=self.ids.device).unsqueeze(1).expand(-1, positions)
        return out.index_put_(
            (row.flatten(), self.ids.flatten()), self.g.flatten(0, 1), accumulate=True
        )

    def take(self, rows: Tensor | slice) -> Lookup:
        return replace(self, ids=self.ids[rows], g=self.g[rows])

    def blank(self, rows: Tensor) -> Lookup:
        return replace(self, g=_blanked(self.g, rows))

    def double(self) -> Lookup:
        return replace(self, g=self.g.double())


def combine(parts: list[Contribution]) -> list[Contribution]:
    """One contribution per block of a parameter that was used several times (or tied).

    The contributions of one parameter are added per example before any norm is taken: adding norms instead
    would be wrong. Matrix uses are joined along their positions, which adds them for free; other mixtures
    are made dense. The blocks that come back are disjoint, so their squared norms add up.
    """
    if len(parts) == 1:
        return parts
    if all(part.block is not None for part in parts):
        blocks: dict[tuple[int, int], list[Contribution]] = {}
        for part in parts:
            assert part.block is not None
            blocks.setdefault((part.block.start, part.block.stop), []).append(part)
        spans = sorted(blocks)
        if all(first[1] <= second[0] for first, second in pairwise(spans)):
            return [_join(group) for group in blocks.values()]
        raise RuntimeError(
            "overlapping blocks of one parameter; a layer rule must use the same blocks every time"
        )
    whole = [part for part in parts if part.block is None]
    if len(whole) < len(parts):
        # One use took all of it, another a block (an attention that serves as self- and as cross-attention).
        total = _join(whole).dense().clone()
        for part in parts:
            if part.block is not None:
                total[:, part.block] += part.dense()
        return [Dense(total, total.shape[1:])]
    return [_join(parts)]


def _join(parts: list[Contribution]) -> Contribution:
    if len(parts) == 1:
        return parts[0]
    matrices = [part.as_sequence() for part in parts if isinstance(part, (Single, Outer))]
    if len(matrices) == len(parts):
        x = torch.cat([part.x for part in matrices], dim=1)
        g = torch.cat([part.g for part in matrices], dim=1)
        return Outer(x, g, parts[0].block)
    lookups = [part for part in parts if isinstance(part, Lookup)]
    if len(lookups) == len(parts):
        ids = torch.cat([part.ids for part in lookups], dim=1)
        g = torch.cat([part.g for part in lookups], dim=1)
        return Lookup(ids, g, lookups[0].shape, lookups[0].block)
    total = parts[0].dense()
    for part in parts[1:]:
        total = total + part.dense()
    return Dense(total, total.shape[1:], None, parts[0].block)
