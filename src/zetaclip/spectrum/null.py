"""The null distribution of a fit: the exponents of Gaussian matrices of a given shape.

A tail fit gives a number for any matrix, and for a random one the number depends mostly on the
shape. So a fit means something only in comparison with fits of random matrices. The null is public:
it depends on the shape, the fit and a fixed seed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from scipy.linalg import eigvalsh_tridiagonal

from .fits import Array, fit_exponent

DRAWS = 32
_SEED = 20240


@dataclass(frozen=True)
class Null:
    """Exponents of ``DRAWS`` random matrices.

    Attributes:
        median: Their median.
        low: The smallest.
        high: The largest.
        ok: False if none could be fitted (shapes with fewer than 4 eigenvalues). The other
            attributes are then 0.
    """

    median: float
    low: float
    high: float
    ok: bool


def random_spectrum(shape: tuple[int, int], generator: np.random.Generator) -> Array:
    """Squared singular values of one standard Gaussian matrix, without creating the matrix.

    Householder reflections transform a Gaussian matrix into a bidiagonal one whose entries are
    independent chi variables, and do not change the singular values. Drawing those entries gives
    exactly the same distribution with O(n) random numbers and O(n²) work. That makes the null of a
    512 x 4608 kernel affordable.

    Args:
        shape: Rows and columns of the matrix.
        generator: Source of the random numbers.

    Returns:
        min(shape) values in descending order.

    Raises:
        ValueError: A side is 0.
    """
    rows, cols = min(shape), max(shape)
    if rows < 1:
        raise ValueError(f"a matrix of shape {shape} has no spectrum")
    diagonal = generator.chisquare(np.arange(cols, cols - rows, -1))
    if rows == 1:
        return diagonal
    below = generator.chisquare(np.arange(rows - 1, 0, -1))
    # The tridiagonal B Bᵀ for lower bidiagonal B, directly from the squares of B's entries.
    main = diagonal.copy()
    main[1:] += below
    off = np.sqrt(diagonal[:-1] * below)
    values = eigvalsh_tridiagonal(main, off, lapack_driver="sterf", check_finite=False)
    return np.maximum(values[::-1], 0.0)


def random_null(shape: tuple[int, int], method: str = "rank", k: int | None = None) -> Null:
    """The null of one shape and fit; a matrix and its transpose have the same. Results are cached.

    Args:
        shape: Rows and columns of the matrix.
        method: "rank", "hill" or "ks".
        k: Tail size; see ``fit_tail``.

    Returns:
        Median, smallest and largest exponent of random matrices.
    """
    return _null(min(shape), max(shape), method, k)


@functools.lru_cache(maxsize=256)
def _null(rows: int, cols: int, method: str, k: int | None) -> Null:
    generator = np.random.default_rng([_SEED, rows, cols])
    fits = [fit_exponent(random_spectrum((rows, cols), generator), method, k) for _ in range(DRAWS)]
    zetas = [fit.zeta for fit in fits if fit.ok]
    if not zetas:
        return Null(0.0, 0.0, 0.0, False)
    return Null(float(np.median(zetas)), min(zetas), max(zetas), True)
