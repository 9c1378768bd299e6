"""What pure noise would read: the exponents of Gaussian matrices of a given shape.

A tail fit gives a number for any matrix, and for a random one the number depends mostly on the shape. So a
reading means something only beside the readings of noise. The null is public: shape, fit and a fixed seed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from scipy.linalg import eigvalsh_tridiagonal

from .tail import Array, fit_tail

DRAWS = 32
_SEED = 20240


@dataclass(frozen=True)
class Null:
    """Exponents of ``DRAWS`` random matrices: their median, smallest and largest.

    If not one of them could be fitted (shapes with fewer than 4 eigenvalues), ``ok`` is False and the rest 0.
    """

    median: float
    low: float
    high: float
    ok: bool


def random_spectrum(shape: tuple[int, int], generator: np.random.Generator) -> Array:
    """The squared singular values of one standard Gaussian matrix of that shape, without the matrix.

    Householder reflections turn a Gaussian matrix into a bidiagonal one whose entries are independent
    chi variables, and leave the singular values alone. Drawing those entries gives exactly the same law for
    O(n) random numbers and O(n²) work, which is what makes a null for a 512 x 4608 kernel affordable.
    """
    rows, cols = min(shape), max(shape)
    if rows < 1:
        raise ValueError(f"a matrix of shape {shape} has no spectrum")
    diagonal = generator.chisquare(np.arange(cols, cols - rows, -1))
    if rows == 1:
        return diagonal
    below = generator.chisquare(np.arange(rows - 1, 0, -1))
    # B Bᵀ for lower bidiagonal B, written in squares to avoid taking roots twice
    main = diagonal.copy()
    main[1:] += below
    off = np.sqrt(diagonal[:-1] * below)
    values = eigvalsh_tridiagonal(main, off, lapack_driver="sterf", check_finite=False)
    return np.maximum(values[::-1], 0.0)


def random_null(shape: tuple[int, int], method: str = "rank", k: int | None = None) -> Null:
    """The null of one shape and fit. The transpose has the same; repeated calls cost nothing."""
    return _null(min(shape), max(shape), method, k)


@functools.lru_cache(maxsize=256)
def _null(rows: int, cols: int, method: str, k: int | None) -> Null:
    generator = np.random.default_rng([_SEED, rows, cols])
    fits = [fit_tail(random_spectrum((rows, cols), generator), method, k) for _ in range(DRAWS)]
    zetas = [fit.zeta for fit in fits if fit.ok]
    if not zetas:
        return Null(0.0, 0.0, 0.0, False)
    return Null(float(np.median(zetas)), min(zetas), max(zetas), True)
