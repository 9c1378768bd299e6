"""The public grid that every release lies on, and the sensitivity that pays for it.

A sum of float64 numbers with float64 noise leaks through its last digits: they tell which sums are possible.
So sums are rounded to multiples of a power of two Δ, the noise is rounded to the same grid, and what leaves is a
function of whole numbers. Δ comes from public numbers alone.

**Guarantee.** For S, the bound of one record's length by the clip rule, Δ√D <= S / 1024, where D counts the
coordinates: rounding moves the sums of two neighbours apart by at most S / 1024. ``SLACK`` is twice that, and
noise is scaled by S * (1 + SLACK): the other half covers the arithmetic before the rounding (docs/privacy.md).
"""

from __future__ import annotations

import math

SLACK = 2.0**-9
"""What a sensitivity has on top of the clip rule's bound: half for rounding, half for arithmetic."""

FINEST = 2.0**-900
"""No grid is finer: far below it float64 has no digits left."""


def widened(bound: float) -> float:
    """The sensitivity that noise is scaled by, for a rule that bounds one record's length by ``bound``."""
    return bound * (1 + SLACK)


def spacing(bound: float, noise_multiplier: float, coordinates: int) -> float:
    """Δ: the largest power of two with Δ√D <= S / 1024 and Δ <= σS / 2^16.

    Args:
        bound: S, what the clip rule bounds one record's length by.
        noise_multiplier: σ. 0 means no noise, hence no grid and no claim.
        coordinates: D, all coordinates that share this Gaussian. It is rounded up to a power of four, so that
            its root is a power of two.

    Returns:
        Δ, or 0.0 without noise.

    Raises:
        ValueError: C or σ is so small that float64 has no such grid.
    """
    if noise_multiplier == 0:
        return 0.0
    root = 2 ** math.ceil(math.log2(max(coordinates, 1)) / 2)
    most = min(bound / 1024 / root, noise_multiplier * bound / 2**16)
    found = math.ldexp(1.0, math.frexp(most)[1] - 1) if most > 0 else 0.0
    if not found >= FINEST:
        raise ValueError(
            f"a clipping bound of {bound:.3g} with a noise multiplier of {noise_multiplier:.3g} is too small for float64. "
            "Scale the loss up, or clip at a larger norm"
        )
    return found


def on_grid(grid: float, bound: float, noise_multiplier: float, coordinates: int = 1) -> bool:
    """Whether a row's grid is fine enough for its noise, and for at least so many coordinates."""
    if noise_multiplier == 0:
        return grid == 0
    if not 0 < grid < math.inf or math.frexp(grid)[0] != 0.5:
        return False
    return grid <= spacing(bound, noise_multiplier, coordinates)
