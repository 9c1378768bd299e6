"""Noise and coins from a key: compiled where there was a compiler, by numpy otherwise, the same numbers."""

from __future__ import annotations

import numpy as np

from . import _numpy

try:
    from . import _chacha as _compiled
except ImportError:  # built where there was no C compiler
    _compiled = None  # type: ignore[assignment]

# add_noise rounds by adding 1.5 * 2^52: whole numbers must stay below this. A draw is never longer than 10.4.
LARGEST = 2.0**51
FARTHEST = 10.4


def noise_source() -> str:
    """What noise comes from: a run can be replayed only by the same."""
    return "chacha12 on a grid"


def normals(key: bytes, count: int) -> np.ndarray:
    """Standard normal values.

    Args:
        key: 32 secret bytes. The same key gives the same values.
        count: How many.

    Returns:
        A float64 array. Longer arrays of one key begin with the shorter ones.

    **Guarantee.** Each value is the exact normal value of its bits, to a few units in the last place: the
    radius comes from a uniform with 52 bits of relative precision and an exponent that is drawn as well, so
    tails reach beyond 10; the angle has 54 bits. ``bench/noise.py`` bounds what that leaves.
    """
    values = np.empty(count)
    (_compiled or _numpy).normals(key, values)
    return values


def add_noise(key: bytes, values: np.ndarray, inverse: float, scale: float) -> None:
    """Rounds sums to whole numbers of their grid and adds rounded noise, in place.

    Args:
        key: 32 secret bytes, for this one use.
        values: float64, contiguous; becomes ``round(value * inverse) + round(normal * scale)``.
        inverse: One over the grid, a power of two: the product is exact.
        scale: Standard deviation of the noise in units of the grid.

    Raises:
        ValueError: The noise, or a sum, could lie beyond what whole float64 numbers can tell apart.

    **Guarantee.** What comes out is a whole number. It is the rounding of (rounded sum + Gaussian noise) to
    the same grid: the Gaussian mechanism and nothing but a public function after it.
    """
    if not 0 <= FARTHEST * scale < LARGEST:
        raise ValueError(
            f"the noise would be {scale:.3g} steps of its grid, more than float64 can count exactly. "
            "Use a smaller noise multiplier, or fewer parameters"
        )
    (_compiled or _numpy).add_noise(key, values, inverse, scale)


def uniforms(key: bytes, count: int) -> np.ndarray:
    """Uniform numbers in [0, 1), multiples of 2^-53: coins that decide who joins a batch.

    Args:
        key: 32 secret bytes. Noise of the same key is another stream.
        count: How many.

    Returns:
        A float64 array.
    """
    values = np.empty(count)
    (_compiled or _numpy).uniforms(key, values)
    return values
