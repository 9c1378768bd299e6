"""Norms and sums of small float32 matrices, all layers of a chunk in one compiled call.

On a small network the overhead of torch calls takes more time than the arithmetic. Matrices that
are large, on another device, or not float32 are processed by torch, which has more threads; so is
everything if ``_rows.c`` was not compiled. The two ways agree up to rounding, not bit for bit.

**Guarantee.** Memory is read or written by address only after ``compiled.plain`` has accepted the
tensor and its size has been compared with what the compiled code will access.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import compiled
from .compiled import plain
from .contributions import Contribution, Dense, Single

# Matrices with more floats are faster with torch's threads. This affects only speed.
LARGEST = 1 << 20

# Addresses and widths of one matrix, or of two that belong together, for ``_rows.c``.
Task = tuple[int, int, int, int]


def source() -> str:
    """What computes norms and sums of small matrices; an exact replay needs the same."""
    return "torch" if compiled.rows is None else "compiled"


def fits(matrix: Tensor, rows: int) -> bool:
    """Whether compiled code can process this tensor as a matrix with ``rows`` rows."""
    return (
        plain(matrix, torch.float32) and 0 < matrix.numel() <= LARGEST and matrix.shape[0] == rows
    )


def norm_task(part: Contribution, rows: int) -> Task | None:
    """The input of ``norms`` for the row norms of ``part``; None if torch must compute them."""
    if type(part) is Single:
        x, g = part.x, part.g
        if fits(x, rows) and fits(g, rows):
            return x.data_ptr(), x.numel() // rows, g.data_ptr(), g.numel() // rows
    elif type(part) is Dense:
        stored = part.stored
        if fits(stored, rows):
            return 0, 0, stored.data_ptr(), stored.numel() // rows
    return None


def norms(
    tasks: list[int], squares: Tensor | None, rows: int, lost: float, scale: float
) -> tuple[Tensor, bool]:
    """Norms over all tasks: ``scale * (lost + sqrt(squares + squares of all tasks))``.

    Args:
        tasks: From ``norm_task``, one after the other.
        squares: Squared norms of the parts that torch computed; overwritten by the result.
        rows: Number of records.
        lost: What underflow may have hidden; see ``contributions.floor``.
        scale: Factor of every gradient.

    Returns:
        One float64 norm per record, and whether all are finite.
    """
    out = torch.empty(rows, dtype=torch.float64) if squares is None else squares
    largest = compiled.rows.norms(tasks, rows, out.data_ptr(), squares is None, lost, scale)
    return out, largest < float("inf")


def sum_task(part: Dense, task: Task, numel: int, address: int) -> Task | None:
    """The input of ``weigh`` that adds the weighted sum of ``part`` to a vector.

    Args:
        part: The gradients.
        task: Its ``norm_task``.
        numel: Width of the gradients.
        address: Of ``numel`` doubles.

    Returns:
        The task, or None if the part is not a plain matrix of that width.
    """
    if part.unpack is None and part.block is None and task[3] == numel:
        return task[2], numel, 0, address
    return None


def scale_task(part: Single, task: Task) -> tuple[Task, Tensor, Tensor]:
    """The input of ``weigh`` that scales the rows of x or g, whichever has fewer columns.

    Returns:
        The task, and two matrices. After ``weigh`` the weighted sum is leftᵀ right.
    """
    scaled = torch.empty(part.narrow.shape, dtype=torch.float64)
    if part.narrow is part.x:
        return (task[0], task[1], scaled.data_ptr(), 0), part.g.double(), scaled
    return (task[2], task[3], scaled.data_ptr(), 0), scaled, part.x.double()


def numbers(values: Tensor, rows: int) -> bool:
    """Whether this is one float64 number per row that compiled code can read."""
    return plain(values, torch.float64) and values.shape == (rows,)


def weighable(factors: Tensor, total: Tensor, rows: int) -> bool:
    """Whether ``weigh`` can read these factors and add to this vector.

    Args:
        factors: One per row.
        total: The vector.
        rows: Number of rows.

    Returns:
        True if both are float64 in memory that compiled code can access.
    """
    return plain(total, torch.float64) and numbers(factors, rows)


def weigh(tasks: list[int], factors: Tensor, by: float) -> None:
    """Executes tasks with the weights ``by * factors``.

    Args:
        tasks: From ``sum_task`` and ``scale_task``, one after the other.
        factors: One per row.
        by: Common factor.
    """
    compiled.rows.weigh(tasks, factors.shape[0], factors.data_ptr(), by)


def flat_factors(norms: Tensor, clip: float) -> Tensor:
    """The factor ``clip / max(norm, clip)`` for every norm."""
    if not numbers(norms, norms.shape[0]):
        # Not clip / norms: torch multiplies by the reciprocal, and the result is not 1 at norm = C.
        return torch.full_like(norms, clip).div_(norms.clamp_min(clip))
    factors = torch.empty_like(norms)
    compiled.rows.flat(norms.shape[0], clip, norms.data_ptr(), factors.data_ptr())
    return factors


def farthest(norms: Tensor, factors: Tensor, columns: Tensor | None = None) -> float:
    """The largest norm of a row's release: norm * factor together with its columns.

    Args:
        norms: One per row.
        factors: One per row.
        columns: Further released numbers, some per row.

    Returns:
        The largest norm; NaN if one is NaN.
    """
    rows = norms.shape[0]
    if numbers(norms, rows) and numbers(factors, rows):
        if columns is None:
            return compiled.rows.farthest(rows, norms.data_ptr(), factors.data_ptr(), 0, 0)
        if _table(columns, rows):
            places = norms.data_ptr(), factors.data_ptr(), columns.data_ptr(), columns.shape[1]
            return compiled.rows.farthest(rows, *places)
    moved = (factors * norms).abs_()
    if columns is not None:
        moved = torch.hypot(moved, torch.linalg.vector_norm(columns, dim=1))
    return moved.amax().item() if rows else 0.0


def longest(columns: Tensor) -> float:
    """The largest norm of a row; NaN if one is NaN."""
    rows = columns.shape[0]
    if _table(columns, rows):
        return compiled.rows.farthest(rows, 0, 0, columns.data_ptr(), columns.shape[1])
    return torch.linalg.vector_norm(columns, dim=1).amax().item() if rows else 0.0


def halves(norms: Tensor, limit: float) -> Tensor:
    """One column: exactly +1/2 for a norm up to the limit (inclusive), and -1/2 above it."""
    rows = norms.shape[0]
    if not numbers(norms, rows):
        return torch.copysign(torch.full_like(norms, 0.5), limit - norms).unsqueeze(1)
    column = torch.empty(rows, 1, dtype=torch.float64)
    compiled.rows.halves(rows, limit, norms.data_ptr(), column.data_ptr())
    return column


def slots(norms: Tensor, clip: float, width: int) -> Tensor:
    """Distributes √width (C - norm) over ``width`` columns, at most C / √width in each.

    Args:
        norms: One per row.
        clip: C.
        width: Number of columns; each is filled before the next one.

    Returns:
        A float64 matrix; a norm above C gives zeros.
    """
    rows = norms.shape[0]
    if not numbers(norms, rows):
        root = math.sqrt(width)
        most = clip / root
        full = torch.tensor(
            [root * clip - slot * most for slot in range(width)],
            dtype=norms.dtype,
            device=norms.device,
        )
        return torch.sub(full, norms.unsqueeze(1), alpha=root).clamp_(0.0, most)
    columns = torch.empty(rows, width, dtype=torch.float64)
    compiled.rows.slots(rows, clip, width, norms.data_ptr(), columns.data_ptr())
    return columns


def sums(columns: Tensor) -> list[float]:
    """The sum of each column, in float64."""
    rows = columns.shape[0]
    if _table(columns, rows):
        return compiled.rows.sums(rows, columns.data_ptr(), columns.shape[1])
    return columns.sum(0, dtype=torch.float64).tolist()


def _table(columns: Tensor, rows: int) -> bool:
    """Whether this is a float64 matrix of ``rows`` rows that compiled code can read."""
    return plain(columns, torch.float64) and columns.dim() == 2 and columns.shape[0] == rows


def advance(
    places: list[Tensor], starts: list[Tensor], vector: Tensor, distance: float
) -> bool | None:
    """Writes ``start + distance * vector / |vector|`` into each place.

    Args:
        places: Where to write, one tensor per parameter.
        starts: Values to start from.
        vector: Direction, as one flat vector over all parameters.
        distance: How far to move.

    Returns:
        True if it was written; False if the vector has no direction; None if torch must do it.
    """
    if not plain(vector, torch.float32):
        return None
    tasks: list[int] = []
    address = vector.data_ptr()
    for place, start in zip(places, starts, strict=True):
        size = start.numel()
        if not (
            plain(place, torch.float32)
            and plain(start, torch.float32)
            and place.numel() == size <= LARGEST
        ):
            return None
        tasks += place.data_ptr(), size, start.data_ptr(), address
        address += 4 * size
    if address != vector.data_ptr() + 4 * vector.numel():
        return None
    if not compiled.rows.advance(tasks, vector.data_ptr(), vector.numel(), distance):
        return False
    torch.autograd.graph.increment_version(places)  # as an in-place operation of torch does
    return True
