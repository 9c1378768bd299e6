"""Norms and sums of small float32 matrices: all layers of a chunk in one compiled call.

On a small network torch spends more time on being called than on the numbers. Matrices that are
large, lie on another device, or are not float32 stay with torch, which has more threads; so does
everything where ``_rows.c`` was not compiled. The two ways agree to rounding, not bit for bit.

**Guarantee.** The compiled part gets numpy views of tensors, never addresses, and checks their
types and lengths.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from . import compiled
from .compiled import array, plain
from .contributions import Contribution, Dense, Single

# From so many floats on the work is worth torch's threads. It only decides speed.
LARGEST = 1 << 20

NormTask = tuple[np.ndarray | None, np.ndarray]
"""(x, g): two matrices whose row norms are multiplied; without x those of g alone."""

WeighTask = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]
"""(matrix, scaled, sum): where to put its scaled rows, and where to add their sum."""


def source() -> str:
    """Who takes the norms and sums of small matrices here.

    Part of what an exact replay depends on.
    """
    return "torch" if compiled.rows is None else "compiled"


def fits(matrix: Tensor, rows: int) -> bool:
    """Whether the compiled part can take this tensor as a matrix of so many rows."""
    return (
        plain(matrix, torch.float32) and 0 < matrix.numel() <= LARGEST and matrix.shape[0] == rows
    )


def norm_task(part: Contribution, rows: int) -> NormTask | None:
    """The matrices whose row norms make up the norms of ``part``, as ``norms`` takes them.

    Returns:
        None if they are not for the compiled part.
    """
    if type(part) is Single:
        if fits(part.x, rows) and fits(part.g, rows):
            return array(part.x), array(part.g)
    elif type(part) is Dense and part.known is None and fits(part.stored, rows):
        return None, array(part.stored)
    return None


def norms(
    tasks: list[NormTask], squares: Tensor | None, rows: int, lost: float, scale: float
) -> tuple[Tensor, bool]:
    """``scale * (lost + sqrt(squares + those of all tasks))`` in float64.

    And whether all are finite.
    """
    out = torch.empty(rows, dtype=torch.float64) if squares is None else squares.contiguous()
    largest = compiled.rows.norms(tasks, rows, array(out), squares is None, lost, scale)
    return out, largest < math.inf


def sum_task(part: Dense, task: NormTask, total: np.ndarray) -> WeighTask | None:
    """Adds the weighted sum of ``part`` to a part of the total.

    Returns:
        None if ``part`` is not a plain matrix of that width.
    """
    if part.unpack is None and part.block is None and task[1].size == len(task[1]) * total.size:
        return task[1], None, total
    return None


def weighable(factors: Tensor, total: Tensor, rows: int) -> bool:
    """Whether ``weigh`` can take these factors, and add to this vector."""
    return (
        plain(total, torch.float64) and plain(factors, torch.float64) and factors.shape == (rows,)
    )


def weigh(tasks: list[WeighTask], factors: Tensor) -> None:
    """Works off the tasks with these weights."""
    compiled.rows.weigh(tasks, factors.shape[0], array(factors), 1.0)


# -- what a clip rule needs of norms, by torch: compiled, it saved less than 0.3 % of a step
# ------------


def flat_factors(norms: Tensor, clip: float) -> Tensor:
    """clip / max(norm, clip) for every norm."""
    # Not clip / norms: torch makes that a product with the reciprocal, which is not 1 at norm = C.
    return torch.full_like(norms, clip).div_(norms.clamp_min(clip))


def farthest(norms: Tensor, factors: Tensor, columns: Tensor | None = None) -> float:
    """The largest length of norm * factor together with a row's columns; nan if there is one."""
    moved = (factors * norms).abs_()
    if columns is not None:
        moved = torch.hypot(moved, torch.linalg.vector_norm(columns, dim=1))
    return moved.amax().item() if norms.shape[0] else 0.0


def longest(columns: Tensor) -> float:
    """The largest length of a row; nan if there is one."""
    return torch.linalg.vector_norm(columns, dim=1).amax().item() if columns.shape[0] else 0.0


def halves(norms: Tensor, limit: float) -> Tensor:
    """One column: +1/2 for a norm up to the limit, also to the last bit, and -1/2 beyond it."""
    return torch.copysign(torch.full_like(norms, 0.5), limit - norms).unsqueeze(1)


def slots(norms: Tensor, clip: float, width: int) -> Tensor:
    """So many columns, filled one after the other with √width (C - norm), up to C / √width each."""
    root = math.sqrt(width)
    most = clip / root
    full = [root * clip - slot * most for slot in range(width)]
    starts = torch.tensor(full, dtype=norms.dtype, device=norms.device)
    return torch.sub(starts, norms.unsqueeze(1), alpha=root).clamp_(0.0, most)


def sums(columns: Tensor) -> list[float]:
    """The sum of each column, in float64."""
    return columns.sum(0, dtype=torch.float64).tolist()
