"""From contributions to norms, and from factors to the clipped sum, one chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import mapped, products
from . import rows as small
from .combine import combine
from .contributions import Contribution, Dense, Single
from .grams import floor
from .layout import Bucket, Layout

# A norm of at least this counts as not finite: its factor would be a denormal number, which has too
# little precision for a bound.
TOO_LONG = 1e150
# Floats of per-example gradients that are in memory at once if a transform needs all of them. Two
# megabytes stay in the cache between its passes: about five times faster than 64 megabytes on the
# MLP of `bench/methods.py`.
TRANSFORM_FLOATS = 1 << 19


class Chunk:
    """The per-example gradients of one chunk, in any form.

    Args:
        received: Contributions by the id() of their parameter.
        layout: Positions of the parameters.
        rows: Number of examples.
        scale: Factor of every gradient: the number of rows if the loss was a mean over them.

    **Guarantee.** Only the mechanism reads a chunk; it bounds and sums the gradients and adds
    noise. A gradient that is not finite counts as zero. If a squared norm overflowed or lost
    precision in float32, that gradient is computed again in float64. A gradient that is so long
    that its factor would be a denormal number adds nothing to the sum: its clipped value would not
    be precise, and zero satisfies every bound.
    """

    def __init__(
        self, received: dict[int, list[Contribution]], layout: Layout, rows: int, scale: float
    ) -> None:
        self.layout = layout
        self.rows = rows
        self.scale = scale
        parts = {p: some if len(some) == 1 else combine(some) for p, some in received.items()}
        if layout.dtype == torch.float64:
            parts = {p: [part.double() for part in some] for p, some in parts.items()}
        self.parts = parts
        # By id() of the part: its matrices if they are small. Set by ``norms``.
        self._tasks: dict[int, small.NormTask | None] = {}
        self.rescued: dict[int, Tensor] = {}
        self._lost = floor(layout.numel, layout.dtype)

    def norms(self) -> Tensor:
        """One float64 norm per example.

        Examples that count as zero, or were computed again in float64, are removed from ``parts``.
        """
        parts = [part for some in self.parts.values() for part in some]
        if not parts:
            return torch.zeros(self.rows, dtype=torch.float64, device=self.layout.device)

        def squares(large: list[int]) -> Tensor:
            each = [parts[number].norms().double() for number in large]
            return torch.stack(each).square_().sum(0)

        norms, finite, tasks = small.norms_of(
            [_matrices(part) for part in parts], self.rows, squares, self._lost, self.scale
        )
        self._tasks = dict(zip(map(id, parts), tasks, strict=True))
        if not finite:
            self._rescue(norms)
        return norms

    def mapped_norms(self, multiplier: Tensor, shift: Tensor) -> Tensor:
        """One float64 norm of ``multiplier * gradient - shift`` per example.

        Examples whose gradient is not finite, or far too long, count as if it were zero, and are
        removed from ``parts``.

        Args:
            multiplier: float64, one number per coordinate of the layout.
            shift: The same.
        """
        sizes = {id(p): p.numel() for p in self.layout.parameters}
        self.parts = {
            p: [mapped.settled(part, self.rows, sizes[p]) for part in parts]
            for p, parts in self.parts.items()
        }
        squares = torch.zeros(self.rows, dtype=torch.float64, device=self.layout.device)
        for parameter, place in zip(self.layout.parameters, self.layout.places, strict=True):
            parts = self.parts.get(id(parameter), [])
            own, away = multiplier.as_strided(*place), shift.as_strided(*place)
            for part in parts:
                block = slice(None) if part.block is None else part.block
                mapped.add_squares(squares, part, own[block], away[block], self.scale)
            if not parts or parts[0].block is not None:
                left = away.clone()  # where no part has a gradient, it is zero
                for part in parts:
                    left[part.block] = 0
                squares += left.square().sum()
        norms = squares.clamp_min_(0).sqrt_()
        length = torch.linalg.vector_norm(shift)
        bad = (~(norms < TOO_LONG)).nonzero().flatten()
        if len(bad):
            self.parts = {p: [part.blank(bad) for part in some] for p, some in self.parts.items()}
            norms[bad] = length
        self._find_tasks()
        # No difference of two numbers is more exact than these are.
        lost = floor(self.layout.numel, torch.float64)
        return norms.mul_(1 + mapped.ROUNDING).add_(mapped.ROUNDING * length + lost)

    def _rescue(self, norms: Tensor) -> None:
        bad = (~torch.isfinite(norms)).nonzero().flatten()
        for row in bad.tolist():
            exact = self._exact_gradient(row)
            length = float(torch.linalg.vector_norm(exact))
            if length < TOO_LONG:  # false for nan and inf too
                norms[row] = length
                self.rescued[row] = exact
            else:
                norms[row] = 0.0
        self.parts = {p: [part.blank(bad) for part in parts] for p, parts in self.parts.items()}
        self._find_tasks()

    def _find_tasks(self) -> None:
        parts = [part for some in self.parts.values() for part in some]
        tasks = small.norm_tasks([_matrices(part) for part in parts], self.rows)
        self._tasks = dict(zip(map(id, parts), tasks, strict=True))

    def _exact_gradient(self, row: int) -> Tensor:
        index = torch.tensor([row], device=self.layout.device)
        return self._flat(index, torch.float64)[0]

    def _flat(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The scaled gradients of these examples, each as one flat vector."""
        flat = torch.zeros(len(rows), self.layout.numel, dtype=dtype, device=self.layout.device)
        for parameter, offset in zip(self.layout.parameters, self.layout.offsets, strict=True):
            target = flat[:, offset : offset + parameter.numel()].view(len(rows), *parameter.shape)
            for part in self.parts.get(id(parameter), ()):
                taken = part.take(rows)
                value = (taken.double() if dtype == torch.float64 else taken).dense()
                where = target if part.block is None else target[:, part.block]
                where.copy_(value.view_as(where))
        return flat.mul_(self.scale)

    def add_weighted_sum(
        self, total: Tensor, factors: Tensor, bucket: Bucket | None = None, drop: bool = False
    ) -> None:
        """``total += Σ_i factors[i] * gradient_i``, all in float64.

        Args:
            total: Of all parameters, or of those of the bucket.
            factors: One per example.
            bucket: Some of the parameters; None for all of them.
            drop: Whether to forget each part once it is added. Its memory can then be used while
                others are added.
        """
        layout, rows = self.layout if bucket is None else bucket.layout, self.rows
        scaled = factors * self.scale
        whole = scaled.dtype is torch.float64 and scaled.shape == (rows,) and total.is_cpu
        memory = total.numpy() if whole else None
        sums: list[small.WeighTask] = []
        outers: list[tuple] = []
        for parameter, place in zip(layout.parameters, layout.places, strict=True):
            parts = self.parts.get(id(parameter), ())
            if drop:
                self.parts.pop(id(parameter), None)
            for part in parts:
                task = self._tasks.get(id(part))
                if task is not None and memory is not None and part.block is None:
                    own = memory[place[2] : place[2] + parameter.numel()]
                    if type(part) is Single and products.compiled is not None:
                        outers.append((*task, own))
                        continue
                    if type(part) is Dense and _as_stored(part, own.size * rows):
                        sums.append((task[1], own))
                        continue
                view = total.as_strided(*place)
                part.add_to(view if part.block is None else view[part.block], scaled)
        if sums:
            small.weigh(sums, scaled)
        if outers:
            products.add_outers(outers, scaled)
        begin = 0 if bucket is None else bucket.begin
        for row, gradient in self.rescued.items():
            total.add_(gradient[begin : begin + layout.numel] * factors[row])

    def pieces(self) -> Iterator[Tensor]:
        """The gradients as (examples, numel), a few examples at a time; zero if not finite."""
        some = max(1, TRANSFORM_FLOATS // self.layout.numel)
        for rows in torch.arange(self.rows, device=self.layout.device).split(some):
            flat = self._flat(rows, self.layout.dtype)
            far = (~torch.isfinite(torch.linalg.vector_norm(flat, dim=1))).nonzero().flatten()
            if len(far):  # overflowed in float32, or really not finite
                exact = torch.linalg.vector_norm(flat[far].double(), dim=1)
                flat[far[~torch.isfinite(exact)]] = 0
            yield flat


def _matrices(part: Contribution) -> tuple[Tensor | None, Tensor] | None:
    """The matrices whose row norms, multiplied, are the norms of a part; None for other forms."""
    if type(part) is Single:
        return part.x, part.g
    if type(part) is Dense and part.known is None:
        return None, part.stored
    return None


def _as_stored(part: Dense, size: int) -> bool:
    """Whether the rows of a part are gradients of its parameter, in the parameter's order."""
    return part.unpack is None and part.stored.numel() == size
