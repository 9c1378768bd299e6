"""Norms and sums of small float32 matrices, all layers of a chunk in one compiled call.

On a small network torch spends more time on being called than on the numbers. Matrices that are large, lie on another
device, or are not float32 stay with torch, which has more threads; so does everything where ``_rows.c`` was not compiled.
The two ways agree to rounding, not bit for bit.

**Guarantee.** Nothing is read or written by address before ``compiled.plain`` has seen the tensor, and its size has been compared with
what the compiled part will go through.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import compiled
from .compiled import plain
from .contributions import Contribution, Dense, Single

# From so many floats on the work is worth torch's threads. It only decides speed.
LARGEST = 1 << 20

# What the compiled part takes for one matrix, or for two that belong together: addresses and widths; see ``_rows.c``.
Task = tuple[int, int, int, int]


def source() -> str:
    """Who takes the norms and sums of small matrices here: part of what an exact replay depends on."""
    return "torch" if compiled.rows is None else "compiled"


def fits(matrix: Tensor, rows: int) -> bool:
    """Whether the compiled part can take this tensor as a matrix of so many rows."""
    return (
        plain(matrix, torch.float32) and 0 < matrix.numel() <= LARGEST and matrix.shape[0] == rows
    )


def norm_task(part: Contribution, rows: int) -> Task | None:
    """The matrices whose row norms make up the norms of ``part``, as ``norms`` takes them; None if they are not for it."""
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
    """``scale * (lost + sqrt(squares + those of all tasks))`` in float64, and whether all are finite."""
    out = torch.empty(rows, dtype=torch.float64) if squares is None else squares
    largest = compiled.rows.norms(tasks, rows, out.data_ptr(), squares is None, lost, scale)
    return out, largest < float("inf")


def sum_task(part: Dense, task: Task, numel: int, address: int) -> Task | None:
    """Adds the weighted sum of ``part`` to so many doubles at an address; None if it is not a plain matrix of that width."""
    if part.unpack is None and part.block is None and task[3] == numel:
        return task[2], numel, 0, address
    return None


def scale_task(part: Single, task: Task) -> tuple[Task, Tensor, Tensor]:
    """Scales the rows of x or g, whichever is narrower. Then the weighted sum is the product leftᵀ right."""
    scaled = torch.empty(part.narrow.shape, dtype=torch.float64)
    if part.narrow is part.x:
        return (task[0], task[1], scaled.data_ptr(), 0), part.g.double(), scaled
    return (task[2], task[3], scaled.data_ptr(), 0), scaled, part.x.double()


def numbers(values: Tensor, rows: int) -> bool:
    """Whether this is one float64 number per row, where the compiled part can read it."""
    return plain(values, torch.float64) and values.shape == (rows,)


def weighable(factors: Tensor, total: Tensor, rows: int) -> bool:
    """Whether ``weigh`` can take these factors, and add to this vector."""
    return plain(total, torch.float64) and numbers(factors, rows)


def weigh(tasks: list[int], factors: Tensor, by: float) -> None:
    """Works off the tasks with the weights ``by * factors``."""
    compiled.rows.weigh(tasks, factors.shape[0], factors.data_ptr(), by)


def flat_factors(norms: Tensor, clip: float) -> Tensor:
    """clip / max(norm, clip) for every norm."""
    if not numbers(norms, norms.shape[0]):
        # Not clip / norms: torch makes that a product with the reciprocal, which is not 1 at norm = C.
        return torch.full_like(norms, clip).div_(norms.clamp_min(clip))
    factors = torch.empty_like(norms)
    compiled.rows.flat(norms.shape[0], clip, norms.data_ptr(), factors.data_ptr())
    return factors


def farthest(norms: Tensor, factors: Tensor, columns: Tensor | None = None) -> float:
    """The largest length of norm * factor together with a row's columns; nan if there is one."""
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
    """The largest length of a row; nan if there is one."""
    rows = columns.shape[0]
    if _table(columns, rows):
        return compiled.rows.farthest(rows, 0, 0, columns.data_ptr(), columns.shape[1])
    return torch.linalg.vector_norm(columns, dim=1).amax().item() if rows else 0.0


def halves(norms: Tensor, limit: float) -> Tensor:
    """One column: +1/2 for a norm up to the limit, also to the last bit, and -1/2 beyond it."""
    rows = norms.shape[0]
    if not numbers(norms, rows):
        return torch.copysign(torch.full_like(norms, 0.5), limit - norms).unsqueeze(1)
    column = torch.empty(rows, 1, dtype=torch.float64)
    compiled.rows.halves(rows, limit, norms.data_ptr(), column.data_ptr())
    return column


def slots(norms: Tensor, clip: float, width: int) -> Tensor:
    """So many columns, filled one after the other with √width (C - norm), up to C / √width each."""
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
    """Whether these are some float64 numbers per row, where the compiled part can read them."""
    return plain(columns, torch.float64) and columns.dim() == 2 and columns.shape[0] == rows


def advance(
    places: list[Tensor], starts: list[Tensor], vector: Tensor, distance: float
) -> bool | None:
    """Each start, and what stands for it in the unit vector times a distance, into its place.

    False, and nothing written, where the vector has no direction; None: not for the compiled part.
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
    torch.autograd.graph.increment_version(places)  # as torch's own writing would
    return True
