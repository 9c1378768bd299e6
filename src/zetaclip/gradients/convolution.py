"""Per-example weight gradients of a convolution, by the cheapest kernel.

- *compiled*: in float32 on the CPU, by ``products``.
- *folded*: one grouped ``convolution_backward`` with the batch folded into groups. Best for few
  channels, and the only one for grouped, depthwise and 3d convolutions.
- *shifted*: the image is unfolded along its width only; every kernel row is then a strided window
  of that buffer, which a batched matrix product reads without another copy. It is processed in
  pieces that fit the cache. Best for many channels.
- *Gram*: for late layers with few positions and large weights the gradients are not computed; see
  ``ConvGram``. For layers whose gradients are cheap to compute and expensive to store, see
  ``ConvPieces``.

The choice depends on shapes and types only, never on timings, so that a replayed run rounds in the
same way.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import products
from .contributions import (
    LONG_SEQUENCE,
    SUM_FLOATS,
    Contribution,
    Dense,
    Outer,
)
from .grams import gram, gram_is_cheaper, gram_norms, gram_share, norms_of_grams

# From this many weights per kernel position on, matrix products are faster than the grouped
# convolution.
SHIFTED_FROM = 2048
# Below this many weights the gradients are cheaper to compute than the unfolding for the Gram form.
GRAM_FROM = 1 << 16
# Gradients that need more than this many times the memory of input and output gradient are not
# stored until the sum. The folded kernel needs their memory twice while it runs.
HELD_FOLDED, HELD_SHIFTED = 2.25, 6.0
# Compiled, gradients over fewer positions are cheaper to compute twice than to store: writing and
# reading a float costs about as much as this many multiply-adds.
STORED_FROM = 24
# Floats in one piece of the unfolded image: it stays in the cache between its two uses.
PIECE = 1 << 18


@dataclass(frozen=True)
class Geometry:
    """Shape of a convolution with equal zero padding on both sides.

    Other paddings are applied to the input before.

    Attributes:
        kernel: Size of the kernel.
        stride: Stride.
        padding: Zeros on each side.
        dilation: Dilation.
        groups: Number of groups.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def convolution_contribution(x: Tensor, g: Tensor, geometry: Geometry) -> Contribution:
    """The contribution of a convolution's weight.

    Args:
        x: Input, (B, C, *space).
        g: Output gradient, (B, O, *space).
        geometry: Shape of the convolution.

    Returns:
        The gradients in the cheapest form.
    """
    inputs, outputs = x.shape[1], g.shape[1]
    area = _product(geometry.kernel)
    positions = _product(g.shape[2:])
    weights = inputs // geometry.groups * area * outputs
    held = _product(x.shape[1:]) + _product(g.shape[1:])
    if _compilable(x, g, geometry):
        if positions >= STORED_FROM and weights <= HELD_SHIFTED * held:
            return _gradients(x, g, geometry)
        # If the kernel moves by one, its Gram matrices are sums of those of single places.
        read = inputs if _dense_stride(geometry) else None
        few = gram_is_cheaper(positions, inputs * area, outputs, True, read)
        return (ConvGram if few else ConvPieces)(x, g, geometry)
    if (
        geometry.groups == 1
        and len(geometry.kernel) <= 2
        and weights >= GRAM_FROM
        and gram_is_cheaper(positions, inputs * area, outputs, False)
    ):
        return ConvGram(x, g, geometry)
    most = HELD_SHIFTED if _shiftable(geometry, inputs, outputs) else HELD_FOLDED
    if weights > most * held:
        return ConvPieces(x, g, geometry)
    return _gradients(x, g, geometry)


def _compilable(x: Tensor, g: Tensor, geometry: Geometry) -> bool:
    return geometry.groups == 1 and len(geometry.kernel) <= 2 and products.takes(x, g)


def _dense_stride(geometry: Geometry) -> bool:
    return all(step == 1 for step in geometry.stride)


def _sizes(x: Tensor, g: Tensor, geometry: Geometry) -> products.Sizes:
    """The convolution as ``products`` takes it; in one dimension, of images of height 1."""
    twice = (geometry.kernel, geometry.stride, geometry.padding, geometry.dilation)
    flat = x.dim() == 3
    return (
        *(len(x), x.shape[1], *((1,) if flat else ()), *x.shape[2:]),
        *(g.shape[1], *((1,) if flat else ()), *g.shape[2:]),
        *(
            value
            for pair, one in zip(twice, (1, 1, 0, 1), strict=True)
            for value in ((one, *pair) if flat else pair)
        ),
        0,
    )


def _gradients(x: Tensor, g: Tensor, geometry: Geometry) -> Dense:
    """The per-example gradients, by the fastest kernel that makes all of them."""
    inputs, outputs = x.shape[1], g.shape[1]
    shape = torch.Size((outputs, inputs // geometry.groups, *geometry.kernel))
    if _compilable(x, g, geometry):
        # numpy asks the system for large pages, of which far fewer have to be cleared.
        stored = torch.from_numpy(np.empty((len(x), shape.numel()), np.float32))
        norms = products.norms(x, g, _sizes(x, g, geometry), stored)
        unpack = functools.partial(products.unpack, shape=shape) if inputs % 16 == 0 else None
        return Dense(stored, shape, unpack, known=norms)
    if _shiftable(geometry, inputs, outputs):
        return _shifted(x, g, geometry, shape)
    return Dense(_folded(x, g, geometry, shape), shape)


def _shiftable(geometry: Geometry, inputs: int, outputs: int) -> bool:
    return geometry.groups == 1 and len(geometry.kernel) <= 2 and inputs * outputs >= SHIFTED_FROM


def _folded(x: Tensor, g: Tensor, geometry: Geometry, shape: torch.Size) -> Tensor:
    """Makes each example a group of its own, so that a weight gradient sums over one example."""
    batch = len(x)
    wide_x, wide_g = x.reshape(1, -1, *x.shape[2:]), g.reshape(1, -1, *g.shape[2:])
    many = torch.Size((batch * shape[0], *shape[1:]))
    return _weight_gradient(wide_x, wide_g, geometry, many, batch * geometry.groups).view(batch, -1)


def _weight_gradient(
    x: Tensor, g: Tensor, geometry: Geometry, shape: torch.Size, groups: int
) -> Tensor:
    """The ordinary weight gradient, summed over the batch, by torch's own kernel."""
    total: Tensor = torch.ops.aten.convolution_backward(
        g,
        x,
        x.new_empty(1).expand(shape),  # only its shape is used for the weight gradient
        None,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        False,
        [0] * len(geometry.kernel),
        groups,
        (False, True, False),
    )[1]
    return total


def _shifted(x: Tensor, g: Tensor, geometry: Geometry, shape: torch.Size) -> Dense:
    """The gradients, stored as (B, kernel rows, O, C * kernel columns)."""
    outputs, inputs = shape[0], shape[1]
    stored = x.new_empty(
        len(x), *_as_2d(geometry.kernel)[:1], outputs, inputs * geometry.kernel[-1]
    )
    for rows, columns, height, flat_g in _unfolded_pieces(x, g, geometry):
        for i, start in enumerate(height):
            window = columns(start)
            target = stored[rows, i]
            torch.baddbmm(target, flat_g, window.transpose(1, 2), beta=0, out=target)

    def unpack(values: Tensor) -> Tensor:
        ordered = values.view(len(values), -1, outputs, inputs, geometry.kernel[-1]).permute(
            0, 2, 3, 1, 4
        )
        return ordered.reshape(len(values), *shape)

    return Dense(stored, shape, unpack)


def _unfolded_pieces(x: Tensor, g: Tensor, geometry: Geometry) -> Iterator[tuple]:
    """Pieces of the batch, unfolded along the width: buffer[b, (c, j), phase, row, column].

    Rows are sorted by their phase modulo the stride, so that the rows for one kernel row are
    adjacent and (row, column) is one contiguous axis, which a matrix product can read in place.
    """
    if x.dim() == 3:
        x, g = x.unsqueeze(2), g.unsqueeze(2)
    batch, channels, height, width = x.shape
    out_height, out_width = g.shape[2:]
    kernel, stride = _as_2d(geometry.kernel), _as_2d(geometry.stride)
    dilation = _as_2d(geometry.dilation)
    padding = geometry.padding if len(geometry.padding) == 2 else (0, *geometry.padding)
    # Each phase has as many rows as its last window needs.
    rows_per_phase = (dilation[0] * (kernel[0] - 1)) // stride[0] + out_height
    size = channels * kernel[1] * stride[0] * rows_per_phase * out_width
    some = max(1, min(batch, PIECE // max(1, size)))
    buffer = x.new_zeros(some, channels, kernel[1], stride[0], rows_per_phase, out_width)

    # (kernel column, phase, target rows, target columns, source rows, source columns)
    copies = []
    for j in range(kernel[1]):
        low, high = _inside(j * dilation[1] - padding[1], stride[1], width, out_width)
        first = low * stride[1] + j * dilation[1] - padding[1]
        for phase in range(stride[0]):
            top, bottom = _inside(phase - padding[0], stride[0], height, rows_per_phase)
            if low < high and top < bottom:
                source_top = top * stride[0] + phase - padding[0]
                copies.append(
                    (
                        j,
                        phase,
                        slice(top, bottom),
                        slice(low, high),
                        slice(
                            source_top, source_top + (bottom - top - 1) * stride[0] + 1, stride[0]
                        ),
                        slice(first, first + (high - low - 1) * stride[1] + 1, stride[1]),
                    )
                )
    starts = [i * dilation[0] for i in range(kernel[0])]
    flat_g = g.reshape(batch, g.shape[1], out_height * out_width)
    for begin in range(0, batch, some):
        count = min(some, batch - begin)
        rows = slice(begin, begin + count)
        piece = x[rows]
        for j, phase, to_rows, to_columns, from_rows, from_columns in copies:
            buffer[:count, :, j, phase, to_rows, to_columns].copy_(
                piece[:, :, from_rows, from_columns]
            )

        def window(start: int, count: int = count) -> Tensor:
            phase, row = start % stride[0], start // stride[0]
            rows_of_phase = buffer[:count, :, :, phase, row : row + out_height]
            # (c, j) has a uniform stride and (row, column) is contiguous, so nothing is copied.
            return rows_of_phase.flatten(3).flatten(1, 2)

        yield rows, window, starts, flat_g[rows]


def _inside(offset: int, stride: int, size: int, count: int) -> tuple[int, int]:
    """The range of k in [0, count) for which 0 <= offset + k * stride < size."""
    low = max(0, -(offset // stride)) if offset < 0 else 0
    high = min(count, (size - 1 - offset) // stride + 1) if size > offset else 0
    return low, max(low, high)


def _as_2d(values: tuple[int, ...]) -> tuple[int, int]:
    return (values[0], values[1]) if len(values) == 2 else (1, values[0])


def _product(values: tuple[int, ...] | torch.Size) -> int:
    total = 1
    for value in values:
        total *= int(value)
    return total


@dataclass(frozen=True)
class ConvGram:
    """Input and output gradient of a late convolution: few positions, large weights.

    Norms come from Gram matrices over the positions, the sum from a product over them in float64.

    Attributes:
        x: Input, (B, C, *space).
        g: Output gradient, (B, O, *space).
        geometry: Shape of the convolution.
        block: Rows of the parameter; None for all.
    """

    x: Tensor
    g: Tensor
    geometry: Geometry
    block: slice | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight."""
        return torch.Size(
            (self.g.shape[1], self.x.shape[1] // self.geometry.groups, *self.geometry.kernel)
        )

    def _unfolded(self) -> Tensor:
        """(B, positions, C * area)."""
        x = self.x if self.x.dim() == 4 else self.x.unsqueeze(2)
        padding = self.geometry.padding if self.x.dim() == 4 else (0, *self.geometry.padding)
        columns = F.unfold(
            x,
            _as_2d(self.geometry.kernel),
            dilation=_as_2d(self.geometry.dilation),
            padding=padding,
            stride=_as_2d(self.geometry.stride),
        )
        return columns.transpose(1, 2)

    def norms(self) -> Tensor:
        """The norm of each example's gradient; NaN if it is unreliable."""
        positions = _product(self.g.shape[2:])
        made = _compilable(self.x, self.g, self.geometry) or (
            positions >= LONG_SEQUENCE and self.x.dtype == torch.float32
        )
        share = gram_share(positions, made)
        if not _dense_stride(self.geometry):
            sequence = self._sequence()
            return gram_norms(sequence.x, sequence.g, share)
        inputs, outputs = self.shape[1:].numel(), self.g.shape[1]
        places = max(_product(self.x.shape[2:]), positions)
        some = max(1, 4 * SUM_FLOATS // (places * (places + self.x.shape[1] + outputs)))
        return torch.cat(
            [
                norms_of_grams(
                    _window_grams(x, g, self.geometry),
                    gram(g.flatten(2).transpose(1, 2)),
                    inputs,
                    outputs,
                    share,
                )
                for x, g in zip(self.x.split(some), self.g.split(some), strict=True)
            ]
        )

    def _sequence(self) -> Outer:
        return Outer(self._unfolded(), self.g.flatten(2).transpose(1, 2))

    def add_to(self, out: Tensor, factors: Tensor) -> None:
        """Adds the sum of the gradients times ``factors``, in float64."""
        if _compilable(self.x, self.g, self.geometry):
            products.add(self.x, self.g, _sizes(self.x, self.g, self.geometry), factors, out)
            return
        weights = self.shape.numel()
        some = max(1, SUM_FLOATS // (weights // self.g.shape[1]))
        for first in range(0, len(factors), some):
            rows = slice(first, first + some)
            self.take(rows)._sequence().add_to(out.view(self.g.shape[1], -1), factors[rows])

    def dense(self) -> Tensor:
        """The gradients, with shape (examples, *parameter or block)."""
        return torch.bmm(self.g.flatten(2), self._unfolded()).view(len(self.x), *self.shape)

    def take(self, rows: Tensor | slice) -> ConvGram:
        """The same for these examples only."""
        return replace(self, x=self.x[rows], g=self.g[rows])

    def blank(self, rows: Tensor) -> ConvGram:
        """The same with zero gradients for these examples."""
        return replace(self, x=self.x.index_fill(0, rows, 0), g=self.g.index_fill(0, rows, 0))

    def double(self) -> ConvGram:
        """The same in float64."""
        return replace(self, x=self.x.double(), g=self.g.double())


def _window_grams(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """Gram matrices of the windows of a convolution with stride 1, in float64: (B, T, T).

    The product of two windows is the sum, over the places of the kernel, of products of two pixels.
    So the Gram matrix of all pixels is enough, and the image is not unfolded.
    """
    if x.dim() == 3:
        x, g = x.unsqueeze(2), g.unsqueeze(2)
    sides, out = x.shape[2:], g.shape[2:]
    pixels = gram(x.flatten(2).transpose(1, 2)).view(len(x), *sides, *sides)
    windows = pixels.new_zeros(len(x), *out, *out)
    kernel, dilation = _as_2d(geometry.kernel), _as_2d(geometry.dilation)
    padding = geometry.padding if len(geometry.padding) == 2 else (0, *geometry.padding)
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            to, of = [], []
            for place, axis in ((i, 0), (j, 1)):
                offset = place * dilation[axis] - padding[axis]
                low, high = _inside(offset, 1, sides[axis], out[axis])
                to.append(slice(low, high))
                of.append(slice(low + offset, high + offset))
            windows[:, to[0], to[1], to[0], to[1]] += pixels[:, of[0], of[1], of[0], of[1]]
    return windows.view(len(x), out.numel(), out.numel())


@dataclass(frozen=True)
class ConvPieces(ConvGram):
    """Input and output gradient of a convolution whose gradients are computed a few at a time.

    They are computed for their norms, and again for their sum: more work, and far less memory.
    """

    def _made(self) -> Iterator[tuple[slice, Dense]]:
        """The same numbers for the norms and for the sum, a few examples at a time."""
        some = max(1, (1 << 19) // self.shape.numel())
        for first in range(0, len(self.x), some):
            rows = slice(first, min(first + some, len(self.x)))
            yield rows, _gradients(self.x[rows], self.g[rows], self.geometry)

    def norms(self) -> Tensor:
        """The norm of each example's gradient."""
        if _compilable(self.x, self.g, self.geometry):
            return products.norms(self.x, self.g, _sizes(self.x, self.g, self.geometry))
        return torch.cat([part.norms() for _, part in self._made()])

    def add_to(self, out: Tensor, factors: Tensor) -> None:
        """Adds the sum of the gradients times ``factors``, in float64."""
        if _compilable(self.x, self.g, self.geometry):
            super().add_to(out, factors)
            return
        for rows, part in self._made():
            part.add_to(out, factors[rows])

    def dense(self) -> Tensor:
        """The gradients, with shape (examples, *parameter or block)."""
        return _gradients(self.x, self.g, self.geometry).dense()
