"""Noise and uniform numbers from a key, by compiled code or by numpy, with identical results."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..threads import ALONE, team
from . import _numpy

try:
    from . import _chacha as _compiled
except ImportError:  # there was no C compiler at installation
    _compiled = None  # type: ignore[assignment]

# add_noise rounds by adding 1.5 * 2^52, so integers must stay below 2^51.
LARGEST = 2.0**51
_SHARED = 1 << 16  # a number of values that is worth several threads
FARTHEST = 10.4  # no standard normal value is larger


def noise_source() -> str:
    """Name of the noise generator: a run can be replayed only with the same one."""
    return "chacha12 on a grid"


def normals(key: bytes, count: int) -> np.ndarray:
    """Standard normal values.

    Args:
        key: 32 secret bytes. The same key gives the same values.
        count: How many.

    Returns:
        A float64 array. A longer array of the same key begins with the shorter one.

    **Guarantee.** Each value is the exact normal value of its random bits, to a few units in the
    last place. The radius comes from a uniform number with 52 bits of relative precision and a
    random exponent, so tails extend beyond 10; the angle has 54 bits. ``bench/noise.py`` bounds the
    remaining difference from a Gaussian.
    """
    values = np.empty(count)
    (_compiled or _numpy).normals(key, values)
    return values


def add_noise(key: bytes, values: np.ndarray, inverse: float, scale: float) -> None:
    """Rounds sums to multiples of their grid and adds rounded noise, in place.

    Args:
        key: 32 secret bytes, for this one use.
        values: float64, contiguous; becomes ``round(value * inverse) + round(normal * scale)``.
        inverse: One divided by the grid, a power of two, so that the product is exact.
        scale: Standard deviation of the noise in units of the grid.

    Raises:
        ValueError: The noise could be too large to be counted exactly in float64.

    **Guarantee.** The results are integers. Each is the rounding of (rounded sum + Gaussian noise)
    to the same grid: the Gaussian mechanism, followed only by a public function.
    """
    if not 0 <= FARTHEST * scale < LARGEST:
        raise ValueError(
            f"the noise would be {scale:.3g} steps of its grid, more than float64 can count "
            "exactly. Use a smaller noise multiplier, or fewer parameters"
        )
    given = key, values, inverse, scale
    if _compiled is None:
        _numpy.add_noise(*given)
    else:
        _compiled.add_noise(*given, ALONE if len(values) < _SHARED else team())


def uniforms(key: bytes, count: int) -> np.ndarray:
    """Uniform numbers in [0, 1), multiples of 2^-53, for example to choose a Poisson batch.

    Args:
        key: 32 secret bytes. Noise of the same key is independent of these numbers.
        count: How many.

    Returns:
        A float64 array.
    """
    values = np.empty(count)
    (_compiled or _numpy).uniforms(key, values)
    return values


def poisson_indices(key: bytes, records: int, sample_rate: float) -> Tensor:
    """The records of a Poisson batch, in order: each joins with probability q, independently.

    Args:
        key: 32 secret bytes, for this batch.
        records: The number of records.
        sample_rate: q. The coins have 53 bits, so that a small q is met as declared.
    """
    if sample_rate >= 1.0:
        return torch.arange(records)
    return torch.from_numpy(np.flatnonzero(uniforms(key, records) < sample_rate))
