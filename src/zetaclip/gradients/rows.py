"""Norms and weighted sums of small float32 matrices, all layers of a chunk in one compiled call.

On a small network torch spends more time on being called than on the numbers. Matrices that are large, lie on another
device, or are not float32 stay with torch, which has more threads; so does everything where ``_rows.c`` was not compiled.
The two ways agree to rounding, not bit for bit.

**Guarantee.** Nothing is read or written by address before ``fits`` has seen the tensor: its rows are those of the chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .contributions import Contribution, Dense, Single

try:
    from .. import _rows as _compiled
except ImportError:  # built where there was no C compiler
    _compiled = None  # type: ignore[assignment]

# From so many floats on the work is worth torch's threads. It only decides speed.
LARGEST = 1 << 20


def fits(matrix: Tensor, rows: int) -> bool:
    """Whether the compiled part can take this tensor as a matrix of so many rows."""
    return (
        _compiled is not None
        and matrix.dtype is torch.float32
        and matrix.is_cpu
        and matrix.is_contiguous()
        and 0 < matrix.numel() <= LARGEST
        and matrix.shape[0] == rows
    )


def norm_task(part: Contribution, rows: int) -> tuple[int, int, int, int] | None:
    """The matrices whose row norms make up the norms of ``part``, as ``norms`` takes them; None if they are not for it."""
    if type(part) is Single:
        x, g = part.x, part.g
        if fits(x, rows) and fits(g, rows):
            return x.data_ptr(), x.shape[1], g.data_ptr(), g.shape[1]
    elif type(part) is Dense:
        stored = part.stored
        if fits(stored, rows):
            return 0, 0, stored.data_ptr(), stored.numel() // rows
    return None


def norms(tasks: list[int], squares: Tensor | None, rows: int, lost: float, scale: float) -> tuple[Tensor, bool]:
    """``scale * (lost + sqrt(squares + those of all tasks))`` in float64, and whether all are finite."""
    out = torch.empty(rows, dtype=torch.float64) if squares is None else squares
    largest = _compiled.norms(tasks, rows, out.data_ptr(), squares is None, lost, scale)
    return out, largest < float("inf")


def sum_task(
    part: Contribution, rows: int, numel: int, total: Tensor, offset: int
) -> tuple[int, int, int, int] | None:
    """Adds the weighted sum of ``part`` to ``numel`` floats of ``total``; None if ``part`` is not for ``weigh``."""
    if type(part) is Dense and part.unpack is None and part.block is None:
        stored = part.stored
        if fits(stored, rows) and stored.numel() == rows * numel:
            return stored.data_ptr(), numel, 0, total.data_ptr() + offset * total.element_size()
    return None


def scale_task(matrix: Tensor, scaled: Tensor) -> tuple[int, int, int, int]:
    """Puts the weighted rows of a matrix that fits into another one."""
    return matrix.data_ptr(), matrix.shape[1], scaled.data_ptr(), 0


def weighable(factors: Tensor, total: Tensor, rows: int) -> bool:
    """Whether ``weigh`` can take these factors, and add to this vector."""
    return (
        _compiled is not None
        and total.dtype is torch.float32
        and total.is_cpu
        and factors.dtype is torch.float64
        and factors.is_cpu
        and factors.is_contiguous()
        and factors.shape == (rows,)
    )


def weigh(tasks: list[int], factors: Tensor, by: float) -> None:
    """Works off the tasks with the weights ``by * factors``."""
    _compiled.weigh(tasks, factors.shape[0], factors.data_ptr(), by)
