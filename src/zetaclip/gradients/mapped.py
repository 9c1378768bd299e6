"""Norms of gradients after a released map of every coordinate: multiplier * gradient - shift.

The mapped gradients are not made. The map is the same for all records, so the weighted sum of
mapped gradients is the map of the ordinary weighted sum. For a layer with one vector per record,
gradient_i = g_i x_iᵀ, the squared norm is two matrix products, with M the multiplier and S the
shift:

    Σ M² g² x²  -  2 Σ M S g x  +  Σ S²

**Guarantee.** A squared norm is never below its true value by more than rounding in float64 of a
sum of squares. Where terms cancel, what rounding can have hidden is added: a record can't look
shorter than it is, and is at worst clipped a little more (by 0.6 % of the shift if its gradient
equals the shift). Records whose form gives no such bound have their gradients made, the same
numbers for the norm and for the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import products
from . import rows as small
from .contributions import SUM_FLOATS, Contribution, Dense, Single, made
from .grams import floor

# Relative rounding of float64, with a factor for the few roundings of one term.
ROUNDING = 4 * 2.0**-53


@dataclass(frozen=True)
class Made:
    """Gradients that are computed a few at a time, for norms and for the sum by the same code.

    Attributes:
        part: The gradients in their own form.
        count: Number of examples.
        floats: Size of one example's gradient.
    """

    part: Contribution
    count: int
    floats: int

    @property
    def block(self) -> slice | None:
        """The rows of the parameter that the gradients are for; None for all."""
        return self.part.block

    def pieces(self) -> Iterator[tuple[slice, Dense]]:
        """Some examples, as a slice, and their gradients; every call gives the same numbers."""
        return made(self.part, self.count, self.floats)

    def norms(self) -> Tensor:
        """The norm of each example's gradient."""
        return torch.cat([piece.norms() for _, piece in self.pieces()])

    def add_to(self, out: Tensor, factors: Tensor) -> None:
        """Adds the sum of the gradients times ``factors``, in float64."""
        for rows, piece in self.pieces():
            piece.add_to(out, factors[rows])

    def dense(self) -> Tensor:
        """The gradients, with shape (examples, *parameter or block)."""
        return torch.cat([piece.dense() for _, piece in self.pieces()])

    def take(self, rows: Tensor | slice) -> Made:
        """The same for these examples only."""
        count = len(torch.arange(self.count)[rows])
        return replace(self, part=self.part.take(rows), count=count)

    def blank(self, rows: Tensor) -> Made:
        """The same with zero gradients for these examples."""
        return replace(self, part=self.part.blank(rows))

    def double(self) -> Made:
        """The same in float64."""
        return replace(self, part=self.part.double())


def settled(part: Contribution, count: int, floats: int) -> Contribution:
    """A form whose mapped norms bound what its sum gets; see ``Made``.

    Args:
        part: The contribution.
        count: The number of records.
        floats: How many numbers may be made at a time.
    """
    return part if type(part) in (Single, Dense, Made) else Made(part, count, floats)


def add_squares(
    found: Tensor, part: Contribution, multiplier: Tensor, shift: Tensor, scale: float
) -> None:
    """Adds the squared norms of scale * multiplier * gradient - shift.

    What is added is an upper bound that is tight but for rounding; not finite if a gradient is not.

    Args:
        found: One float64 number per example.
        part: The gradients, ``settled``.
        multiplier: float64, in the shape of the parameter or block.
        shift: The same.
        scale: A factor of every gradient.
    """
    if isinstance(part, Single):
        if products.takes(part.x, part.g):
            products.add_mapped(found, part.x, part.g, multiplier, shift, scale)
        else:
            found += _of_products(part.x.double(), part.g.double(), multiplier * scale, shift)
        return
    if isinstance(part, Made):
        for rows, piece in part.pieces():
            add_squares(found[rows], piece, multiplier, shift, scale)
        return
    assert isinstance(part, Dense)
    flat, multiplier = part.stored.reshape(len(part.stored), -1), multiplier * scale
    if part.unpack is not None:
        order = _stored_order(part.stored[:1], part.unpack)
        multiplier, shift = _moved(multiplier, order), _moved(shift, order)
    _add_rows(found, flat, multiplier.reshape(-1), shift.reshape(-1))


def _stored_order(one: Tensor, unpack: Callable[[Tensor], Tensor]) -> Tensor:
    """Where each number of a parameter is in the order in which its gradients are stored."""
    places = torch.arange(one.numel(), device=one.device)
    return unpack(places.view(one.shape)).reshape(-1)


def _moved(values: Tensor, order: Tensor) -> Tensor:
    moved = torch.empty(order.numel(), dtype=values.dtype, device=values.device)
    moved[order] = values.reshape(-1)
    return moved


def _add_rows(found: Tensor, flat: Tensor, multiplier: Tensor, shift: Tensor) -> None:
    if small.add_mapped_squares(found, flat, multiplier, shift):
        return
    some = max(1, SUM_FLOATS // max(1, flat.shape[1]))
    for own, part in zip(found.split(some), flat.split(some), strict=True):
        own.add_((part.double() * multiplier).sub_(shift).square_().sum(1))


def _of_products(x: Tensor, g: Tensor, multiplier: Tensor, shift: Tensor) -> Tensor:
    """For gradients g_i x_iᵀ, by the formula above, in float64."""
    first = torch.linalg.vecdot(x.square() @ multiplier.square().t(), g.square())
    middle = torch.linalg.vecdot(x @ (multiplier * shift).t(), g)
    # Squares of tiny numbers underflow; beside a huge factor that would hide a gradient.
    lengths_x, lengths_g = (torch.linalg.vector_norm(side, dim=1) for side in (x, g))
    lost = floor(max(x.shape[1], g.shape[1]), torch.float64)
    hidden = (lengths_x + lengths_g + lost) * (lost * multiplier.abs().max())
    first = first.sqrt_().add_(hidden)
    last = torch.linalg.vector_norm(shift)
    # By Cauchy and Schwarz no partial sum of any term exceeds (first + last)².
    unsure = (first + last).square_().mul_((sum(shift.shape) + 16) * ROUNDING)
    return first.square_().sub_(middle.mul_(2)).add_(last.square()).add_(unsure)
