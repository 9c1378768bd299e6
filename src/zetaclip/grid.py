"""The public grid that every release lies on, and the sensitivity that covers the rounding.

A sum of float64 numbers with float64 noise leaks through its last digits: they reveal which sums
are possible. So sums are rounded to multiples of a power of two Δ, the noise is rounded to the same
grid, and a release is a function of integers. Δ depends on public numbers only.

**Guarantee.** Let S be the clip rule's bound on the norm of one record, and D the number of
coordinates. Then Δ√D <= S / 1024, so rounding increases the distance between the sums of two
neighbouring datasets by at most S / 1024. ``SLACK`` is twice that, and noise is scaled by
S * (1 + SLACK): the other half covers the arithmetic before the rounding (docs/privacy.md).
"""

from __future__ import annotations

import math

SLACK = 2.0**-9
"""Relative increase of the sensitivity over the clip rule's bound.

Half of it covers the rounding, half the arithmetic before it.
"""

ROUNDED = 1e-6
"""Relative difference that a rounding of a number to float32 can make, with room."""

FINEST = 2.0**-900
"""The smallest allowed Δ: far below it float64 loses precision."""


def widened(bound: float) -> float:
    """The sensitivity that noise is scaled by, for a clip rule's bound on a record's norm."""
    return bound * (1 + SLACK)


def spacing(bound: float, noise_multiplier: float, coordinates: int) -> float:
    """Δ: the largest power of two with Δ√D <= S / 1024 and Δ <= σS / 2^16.

    Args:
        bound: S, the clip rule's bound on the norm of one record.
        noise_multiplier: σ. 0 means no noise, so no grid and no privacy.
        coordinates: D, the number of coordinates that share this Gaussian. It is rounded up to a
            power of four, so that its root is a power of two.

    Returns:
        Δ, or 0.0 without noise.

    Raises:
        ValueError: ``bound`` or σ is so small that float64 has no such grid.
    """
    if noise_multiplier == 0:
        return 0.0
    root = 2 ** math.ceil(math.log2(max(coordinates, 1)) / 2)
    most = min(bound / 1024 / root, noise_multiplier * bound / 2**16)
    found = math.ldexp(1.0, math.frexp(most)[1] - 1) if most > 0 else 0.0
    if not found >= FINEST:
        raise ValueError(
            f"a clipping bound of {bound:.3g} with a noise multiplier of {noise_multiplier:.3g} "
            "is too small for float64. Scale the loss up, or clip at a larger norm"
        )
    return found


def widened_and_spacing(
    bound: float, noise_multiplier: float, coordinates: int
) -> tuple[float, float]:
    """``widened`` and ``spacing`` of one Gaussian.

    Args:
        bound: The largest length of what one record adds.
        noise_multiplier: σ.
        coordinates: How many numbers are released.
    """
    return widened(bound), spacing(bound, noise_multiplier, coordinates)


def fits(sensitivity: float, grid: float, bound: float, noise_multiplier: float) -> bool:
    """Whether a row's sensitivity and grid are those of its bound and its noise.

    The sensitivity may differ by a rounding to float32.

    Args:
        sensitivity: Of the row.
        grid: Of the row.
        bound: The largest length of what one record adds.
        noise_multiplier: σ.
    """
    return abs(sensitivity - widened(bound)) <= ROUNDED * sensitivity and on_grid(
        grid, bound, noise_multiplier
    )


def on_grid(grid: float, bound: float, noise_multiplier: float, coordinates: int = 1) -> bool:
    """Whether a grid is fine enough for its noise and at least ``coordinates`` coordinates.

    Args:
        grid: Δ as recorded in a row of a ledger.
        bound: S, the clip rule's bound on the norm of one record.
        noise_multiplier: σ. Without noise the grid must be 0.
        coordinates: Lower bound of D.

    Returns:
        True if the grid is a power of two and at most ``spacing`` of the other arguments.
    """
    if noise_multiplier == 0:
        return grid == 0
    if not 0 < grid < math.inf or math.frexp(grid)[0] != 0.5:
        return False
    return grid <= spacing(bound, noise_multiplier, coordinates)
