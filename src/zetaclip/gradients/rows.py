"""Norms and sums of small float32 matrices: all layers of a chunk in one compiled call.

On a small network torch spends more time on being called than on the numbers. Matrices that are
large, lie on another device, or are not float32 stay with torch, which has more threads; so does
everything where ``_rows.c`` was not compiled. The two ways agree to rounding, not bit for bit.

**Guarantee.** The compiled part gets numpy views of tensors, never addresses, and checks their
types and lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..threads import ALONE, team

compiled: Any
try:
    from . import _rows as compiled
except ImportError:  # built where there was no C compiler
    compiled = None

# From so many floats on the work is worth torch's threads. It only decides speed.
LARGEST = 1 << 20
# Floats whose sum is worth several threads. It only decides speed.
SHARED = 1 << 18

NormTask = tuple[np.ndarray | None, np.ndarray]
"""(x, g): two matrices whose row norms are multiplied; without x those of g alone."""

WeighTask = tuple[np.ndarray, np.ndarray]
"""(matrix, sum): where to add the sum of its weighted rows."""


def source() -> str:
    """Who takes the norms and sums of small matrices here.

    Part of what an exact replay depends on.
    """
    return "torch" if compiled is None else "compiled"


def plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the compiled part may go through this tensor from its first to its last number."""
    return (
        compiled is not None
        and tensor.dtype is dtype
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def norm_tasks(
    pairs: Iterable[tuple[Tensor | None, Tensor] | None], rows: int
) -> list[NormTask | None]:
    """Pairs of matrices as ``norms`` takes them; None for what is not for the compiled part."""
    return [
        None
        if pair is None or any(part is not None and not _fits(part, rows) for part in pair)
        else (None if pair[0] is None else pair[0].detach().numpy(), pair[1].detach().numpy())
        for pair in pairs
    ]


def _fits(matrix: Tensor, rows: int) -> bool:
    return (
        plain(matrix, torch.float32) and 0 < matrix.numel() <= LARGEST and matrix.shape[0] == rows
    )


def norms_of(
    pairs: list[tuple[Tensor | None, Tensor] | None],
    rows: int,
    squares: Callable[[list[int]], Tensor],
    lost: float,
    scale: float,
) -> tuple[Tensor, bool, list[NormTask | None]]:
    """``scale * (lost + norm)`` of every record, from all its parts, in float64.

    Args:
        pairs: The matrices of each part, as of ``norm_tasks``.
        rows: The number of records.
        squares: Adds up the squared norms of the parts with these numbers, by torch.
        lost: What underflow may have hidden.
        scale: A factor on each norm.

    Returns:
        The norms, whether all of them are finite, and what the compiled part can take.
    """
    tasks = norm_tasks(pairs, rows)
    some = [task for task in tasks if task is not None]
    large = [number for number, task in enumerate(tasks) if task is None]
    if some:
        return *norms(some, squares(large) if large else None, rows, lost, scale), tasks
    found = squares(large).sqrt_().add_(lost).mul_(scale)
    # The largest is finite only if all are; this transfers a single number.
    return found, math.isfinite(found.amax().item()), tasks


def norms(
    tasks: list[NormTask], squares: Tensor | None, rows: int, lost: float, scale: float
) -> tuple[Tensor, bool]:
    """``scale * (lost + sqrt(squares + those of all tasks))`` of each record.

    Args:
        tasks: Matrices whose rows are taken together.
        squares: Squared lengths to begin with; None for 0.
        rows: The number of records.
        lost: What is added to each length for arithmetic.
        scale: Multiplies each length.

    Returns:
        The norms in float64, and whether all are finite.
    """
    out = torch.empty(rows, dtype=torch.float64) if squares is None else squares.contiguous()
    largest = compiled.norms(tasks, rows, out.numpy(), squares is None, lost, scale)
    return out, largest < math.inf


def weigh(tasks: list[WeighTask], factors: Tensor) -> None:
    """Adds the rows of each matrix, times these factors, to its sum."""
    rows = len(factors)
    work = rows * sum(to.size for _, to in tasks)
    compiled.weigh(tasks, rows, factors.numpy(), ALONE if work < SHARED else team())


def add_weighted_rows(out: Tensor, matrix: Tensor, factors: Tensor) -> bool:
    """``out += Σ_i factors[i] * matrix[i]``, if the compiled part can take these.

    Args:
        out: Gets the sum, float64.
        matrix: A row per record, float32.
        factors: One per record, float64.

    Returns:
        Whether it was added.
    """
    if not (
        len(matrix)
        and plain(matrix, torch.float32)
        and plain(factors, torch.float64)
        and plain(out, torch.float64)
    ):
        return False
    assert out.shape == matrix.shape[1:] and factors.shape == matrix.shape[:1]
    weigh([(matrix.detach().numpy(), out.numpy())], factors)
    return True


def joined(matrices: list[Tensor], index: Tensor, weight: Tensor) -> list[Tensor | None]:
    """``Σ_s weight[u, s] * matrix[index[u, s]]`` for every unit u, in float32.

    Args:
        matrices: Each with a row per record.
        index: Rows, int64, (units, slots).
        weight: One number for each of them.

    Returns:
        A row per unit for each matrix that the compiled part can take, and None for the others. A
        row is a function of its own unit's rows, whatever else is there.
    """
    units, slots = index.shape
    fit = [m.numel() > 0 and plain(m, torch.float32) for m in matrices]
    # numpy asks the system for large pages, of which far fewer have to be cleared.
    found = [
        torch.from_numpy(np.empty((units, *m.shape[1:]), np.float32)) if fits else None
        for m, fits in zip(matrices, fit, strict=True)
    ]
    tasks = [
        (matrix.detach().numpy(), out.numpy())
        for matrix, out in zip(matrices, found, strict=True)
        if out is not None
    ]
    if tasks and units:
        at, own = index.contiguous().numpy(), weight.to(torch.float32).contiguous().numpy()
        sizes = (len(tasks[0][0]), units, slots)
        work = slots * sum(out.size for _, out in tasks)
        compiled.join(tasks, at, own, sizes, ALONE if work < SHARED else team())
    return found


def add_mapped_squares(out: Tensor, matrix: Tensor, multiplier: Tensor, shift: Tensor) -> bool:
    """``out[i] += |multiplier * matrix[i] - shift|²``, if the compiled part can take these.

    Args:
        out: Gets a squared length per record, float64.
        matrix: A row per record, float32.
        multiplier: One number per column, float64.
        shift: One number per column, float64.

    Returns:
        Whether they were added.
    """
    if not (
        matrix.numel()
        and plain(matrix, torch.float32)
        and all(plain(values, torch.float64) for values in (out, multiplier, shift))
    ):
        return False
    compiled.mapped(
        matrix.detach().numpy(), multiplier.numpy(), shift.numpy(), out.numpy(), len(matrix)
    )
    return True
