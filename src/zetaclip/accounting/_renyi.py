"""Rényi divergences of Poisson-sampled Gaussian steps, and the ε that they prove.

The series are those of Mironov, Talwar and Zhang (2019), the conversion is that of Balle, Barthe,
Gaboardi, Hsu and Sato (2020).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_Array = np.ndarray[Any, np.dtype[np.float64]]
_NEGLIGIBLE = -30.0  # a term whose logarithm is below ends the series
_CHUNK = 64
_MOST = 1 << 20
_LARGEST = 1029  # above, binomial coefficients leave float64
_NORMAL = 1e-300  # variances below lose digits


@functools.lru_cache(maxsize=1 << 15)
def divergence(sample_rate: float, noise_multiplier: float, order: float) -> float:
    """The Rényi divergence of one step.

    The series is added up by numpy and not term by term; large orders have a thousand terms.

    Args:
        sample_rate: q, above 0 and at most 1.
        noise_multiplier: σ, above 0.
        order: The Rényi order, above 1.

    Returns:
        The divergence, the larger one of adding and removing a record.

    **Edge cases.** Infinity where the series can't be added up in float64; that is a bound, too.
    """
    q, variance = sample_rate, noise_multiplier * noise_multiplier
    if q == 1.0:
        return order / (2 * variance) if variance > 0 else math.inf
    if order > _LARGEST or not _NORMAL < variance < math.inf:
        return math.inf
    try:
        total = (_whole if order.is_integer() else _fractional)(q, variance, order)
    except _LosesDigits:
        return math.inf
    return total / (order - 1)


class _LosesDigits(ArithmeticError):
    """A series that float64 can't hold."""


def spent(orders: Sequence[float], divergences: _Array, delta: float) -> tuple[float, float]:
    """The smallest ε that the divergences prove, and the order that proves it.

    Args:
        orders: Rényi orders above 1.
        divergences: At each order, of all steps together.
        delta: δ.

    Returns:
        ε, and the order.

    **Edge cases.** ε may be below 0, where 0 holds, too; infinity if no order proves anything.
    """
    alpha = np.asarray(orders, dtype=float)
    bounds = divergences + np.log1p(-1 / alpha) - (math.log(delta) + np.log(alpha)) / (alpha - 1)
    bounds = np.where(np.isnan(bounds), math.inf, bounds)
    best = int(bounds.argmin())
    return float(bounds[best]), float(alpha[best])


def _weights(q: float, order: float, i: _Array) -> tuple[_Array, _Array]:
    """The logarithms of |binom(α, i)| q^i (1 - q)^(α - i), and the binomials' signs."""
    from scipy.special import binom

    coefficients = binom(order, i)
    if not np.isfinite(coefficients).all() or not coefficients.all():
        raise _LosesDigits
    logarithms = np.log(np.abs(coefficients)) + i * math.log(q) + (order - i) * math.log1p(-q)
    return logarithms, np.sign(coefficients)


def _log_sum(terms: _Array, signs: _Array | float = 1.0) -> float:
    """ln Σ ± exp(terms); no sum on the way may be negative, because its digits would be lost."""
    largest = float(terms.max())
    total = np.cumsum(signs * np.exp(terms - largest))
    if not (total >= 0).all() or total[-1] == 0:
        raise _LosesDigits
    return largest + math.log(float(total[-1]))


def _whole(q: float, variance: float, order: float) -> float:
    """ln A of the paper's section 3.3 at an integer, from A - 1: a tiny one keeps its digits."""
    i = np.arange(2, int(order) + 1, dtype=float)
    powers = (i * i - i) / (2 * variance)
    terms = _weights(q, order, i)[0] + powers + np.log(-np.expm1(-powers))
    return float(np.logaddexp(0.0, _log_sum(terms)))


def _fractional(q: float, variance: float, order: float) -> float:
    """The same at an order that is no integer: two infinite series."""
    from scipy.special import log_ndtr

    sigma = math.sqrt(variance)
    middle = variance * math.log(1 / q - 1) + 0.5  # where both integrals are cut
    below: list[_Array] = []
    above: list[_Array] = []
    signs: list[_Array] = []
    done = False
    while not done:
        start = len(signs) * _CHUNK
        i = np.arange(start, start + _CHUNK, dtype=float)
        j = order - i
        weights, sign = _weights(q, order, i)
        swapped = weights + (j - i) * (math.log(q) - math.log1p(-q))
        low = weights + (i * i - i) / (2 * variance) + log_ndtr((middle - i) / sigma)
        high = swapped + (j * j - j) / (2 * variance) + log_ndtr((j - middle) / sigma)
        larger = np.maximum(low, high)
        if np.isnan(larger).any() or start > _MOST:
            raise _LosesDigits
        small = np.flatnonzero((larger < _NEGLIGIBLE) & (i > order))
        done = len(small) > 0
        stop = int(small[0]) + 1 if done else _CHUNK
        below.append(low[:stop])
        above.append(high[:stop])
        signs.append(sign[:stop])
    sign = np.concatenate(signs)
    left, right = (_log_sum(np.concatenate(terms), sign) for terms in (below, above))
    return max(0.0, float(np.logaddexp(left, right)))
