"""Per-record gradients of float32 matrices and convolutions on the CPU, made in registers.

``_products.c`` makes a record's gradient a few rows at a time, for its norm and again for the sum,
so that it never passes through memory. Other types and devices, and installations without a
compiler, use torch's kernels.

**Guarantee.** ``norms`` and ``add`` compute the same numbers for a record, from this record alone:
neither the other records nor the number of threads change a bit of them. Records are added up in
float64.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..threads import ALONE, team

compiled: Any
try:
    from . import _products as compiled
except ImportError:  # built where there was no C compiler
    compiled = None

# Multiply-adds from which on several threads are worth starting. This affects only speed.
SHARED = 1 << 24

Sizes = tuple[int, ...]
"""Records, channels, height, width, outputs, their height and width, then kernel, stride, padding
and dilation, two each, and whether channels come last."""


def source() -> str:
    """Who makes per-record gradients here; part of what an exact replay depends on."""
    return "torch" if compiled is None else f"compiled {compiled.width()}"


def takes(x: Tensor, g: Tensor) -> bool:
    """Whether the compiled part can take a layer with this input and output gradient."""
    return (
        compiled is not None
        and x.dtype is torch.float32
        and g.dtype is torch.float32
        and x.is_cpu
        and g.is_cpu
        and x.numel() > 0
        and g.numel() > 0
    )


def sequence(x: Tensor, g: Tensor) -> Sizes:
    """The sizes of a matrix that multiplied every position: x (B, T, I), g (B, T, O)."""
    records, positions, inputs = x.shape
    return (records, inputs, 1, positions, g.shape[2], 1, positions, *(1, 1) * 2, 0, 0, 1, 1, 1)


def norms(x: Tensor, g: Tensor, sizes: Sizes, stored: Tensor | None = None) -> Tensor:
    """The norm of each record's gradient in float64; not finite if float32 can't hold its square.

    Args:
        x: Inputs.
        g: Output gradients.
        sizes: Of the layer.
        stored: Where to put the gradients themselves, (records, weights); None to drop them.
            They are in the order of ``unpack``.
    """
    squares = torch.empty(len(x), dtype=torch.float64)
    at_x, at_g, to = _array(x), _array(g), squares.numpy()
    kept = None if stored is None else stored.numpy()
    compiled.norms(at_x, at_g, sizes, to, kept, _team(_work(sizes)))
    return squares.sqrt_()


def unpack(stored: Tensor, shape: torch.Size) -> Tensor:
    """What ``norms`` stored for a convolution, in the order of its weight: (records, *shape)."""
    outputs, inputs, *kernel = shape
    if inputs % 16:
        return stored.view(-1, *shape)
    apart = stored.view(-1, outputs, inputs // 16, *kernel, 16)
    return apart.movedim(-1, 3).reshape(-1, *shape)


def add(x: Tensor, g: Tensor, sizes: Sizes, factors: Tensor, total: Tensor) -> None:
    """``total += Σ_i factors[i] * gradient_i``; ``total`` is float64 in the shape of the weight.

    Args:
        x: Inputs.
        g: Output gradients.
        sizes: The shape of the product or convolution.
        factors: One per record, float64.
        total: Gets the sum.
    """
    at_x, at_g, own, to = _array(x), _array(g), _array(factors), total.numpy()
    compiled.add(at_x, at_g, sizes, own, to, _team(_work(sizes)))


def add_outers(tasks: list[tuple[Any, Any, Any]], factors: Tensor) -> None:
    """``total += Σ_i factors[i] * g_i x_iᵀ`` for each (x, g, total), with products in float64.

    Args:
        tasks: x (B, I) and g (B, O) in float32, the total in float64; tensors or arrays.
        factors: One float64 number per record.
    """
    own = _array(factors)
    for task in tasks:
        x, g, total = map(_array, task)
        sizes = (*x.shape, g.shape[1])
        compiled.add_outer(x, g, own, total, sizes, _team(math.prod(sizes)))


def add_mapped(
    found: Tensor, x: Tensor, g: Tensor, multiplier: Tensor, shift: Tensor, scale: float
) -> None:
    """Adds upper bounds of |scale * multiplier * g_i x_iᵀ - shift|².

    The products are taken in float32. What rounding and underflow can hide is added, which is at
    most 1e-5 of the square of |scale * multiplier * g_i x_iᵀ| + |shift|.

    Args:
        found: One float64 number per record.
        x: (B, I) in float32.
        g: (B, O) in float32.
        multiplier: (O, I) in float64.
        shift: (O, I) in float64.
        scale: A factor of every gradient, 0 or more.
    """
    given = [_array(values) for values in (x, g, multiplier, shift, found)]
    lengths = scale, *(float(torch.linalg.vector_norm(side)) for side in (multiplier, shift))
    sizes = (len(x), x.shape[1], g.shape[1])
    compiled.add_mapped(*given, lengths, sizes, _team(2 * math.prod(sizes)))


def _array(values: Any) -> Any:
    """The memory of a tensor, or of a contiguous copy; an array itself."""
    if isinstance(values, Tensor):
        return values.detach().contiguous().resolve_neg().numpy()
    return values


def _work(sizes: Sizes) -> int:
    records, channels, _, _, outputs, height, width, rows, columns, *_ = sizes
    return records * channels * outputs * height * width * rows * columns


def _team(work: int) -> tuple[int, int]:
    """Who does so much work."""
    return ALONE if work < SHARED else team()
