"""How fast the upper tail of a spectrum decays: one exponent ζ, three ways to fit it.

ζ is the exponent of the density, p(λ) ∝ λ^-ζ above λ_min, so the fraction of eigenvalues above λ
decays as λ^-(ζ-1). Every fit accepts any values: it returns a ``TailFit`` without an exception and
without a NaN, and ``ok`` is true if its ζ may be used.

- ``rank``: robust straight line (Theil-Sen) through log rank against log λ over the largest k.
- ``hill``: maximum likelihood over the largest k, with the next eigenvalue as λ_min.
- ``ks``: maximum likelihood with the λ_min whose fit has the smallest Kolmogorov-Smirnov distance.
  This is WeightWatcher's alpha, including its rule for fewer than 20 eigenvalues.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .eigenvalues import FLOOR

METHODS = ("rank", "hill", "ks")

# A slope through fewer distinct tail eigenvalues would be meaningless.
MIN_DISTINCT = 4

# WeightWatcher's manual requires this many eigenvalues; with fewer a fit is usable but weak.
ENOUGH = 50

# Weights have single precision or less, so eigenvalues closer than this (relative) count as equal.
_SAME = 1e-6

# Standard deviation of the "rank" slope in units of slope / sqrt(k), measured on sampled power
# laws: 1.1 for long tails, 1.3 for short ones. Likelihood fits have 1.
_RANK_SPREAD = 1.2

# Theil-Sen needs every pair of points; a longer tail is thinned to this many evenly spaced ranks.
_MAX_POINTS = 1024

# Elements of the candidate-by-eigenvalue table of "ks" that are in memory at once.
_CHUNK = 1 << 20

# The first pass over the candidates of "ks" evaluates every _STRIDE-th eigenvalue.
_STRIDE = 16

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True)
class TailFit:
    """One fitted tail.

    Attributes:
        zeta: The exponent; 0 if not ``ok``.
        lambda_min: The eigenvalue at which the tail begins.
        n_tail: Number of eigenvalues in the tail.
        ks: Kolmogorov-Smirnov distance between the tail and the fitted power law.
        stderr: Standard error of ``zeta``; infinite if not ``ok``. It treats eigenvalues as
            independent draws. Those of a matrix repel each other, so it is a guide and not a
            confidence interval.
        ok: Whether ``zeta`` may be used.
        weak: Whether the fit is usable but not convincing: too few eigenvalues, or a value that
            random matrices of the same shape also give.
        reason: Why the fit is not ``ok``, or why it is weak; otherwise empty.
    """

    zeta: float
    lambda_min: float
    n_tail: int
    ks: float
    stderr: float
    ok: bool
    weak: bool
    reason: str


def fit_exponent(
    eigs: Tensor | Array | Sequence[float], method: str = "rank", k: int | None = None
) -> TailFit:
    """``fit_tail`` without the comparison with random matrices.

    Args:
        eigs: Eigenvalues, i.e. squared singular values, in any order and scale.
        method: "rank", "hill" or "ks".
        k: Tail size of "rank" and "hill"; see ``fit_tail``.

    Returns:
        The fit.

    Raises:
        ValueError: The method is unknown or ``k`` is below 1.
    """
    if method not in METHODS:
        raise ValueError(f"unknown fit {method!r}; choose one of {', '.join(METHODS)}")
    if k is not None and k < 1:
        raise ValueError(f"the tail size k must be at least 1, not {k}")
    values = np.asarray(eigs, dtype=np.float64).ravel()
    if not np.isfinite(values).all():
        return _failed("values that are not finite", 0)
    top = float(values.max(initial=0.0))
    if top <= 0.0:
        return _failed("no eigenvalue above zero", 0)
    # Logarithms relative to the largest, so that the scale drops out: ascending, the last one is 0.
    logs = np.sort(np.log(values[values > FLOOR * top] / top))
    if method == "ks":
        zeta, first, n_tail, stderr, ks = _fit_ks(logs)
    else:
        zeta, first, n_tail, stderr, ks = (_fit_rank if method == "rank" else _fit_hill)(logs, k)
    distinct = _count_distinct(logs[len(logs) - n_tail :])
    if distinct < MIN_DISTINCT:
        return _failed(f"{distinct} distinct tail eigenvalues, {MIN_DISTINCT} needed", n_tail)
    if not (math.isfinite(zeta) and math.isfinite(ks)):
        return _failed("the fit did not converge to a finite exponent", n_tail)
    reason = f"{len(logs)} eigenvalues, {ENOUGH} wanted" if len(logs) < ENOUGH else ""
    return TailFit(zeta, math.exp(first) * top, n_tail, ks, stderr, True, bool(reason), reason)


def _failed(reason: str, n_tail: int) -> TailFit:
    return TailFit(0.0, 0.0, n_tail, 1.0, math.inf, False, False, reason)


def _count_distinct(tail: Array) -> int:
    return len(np.unique(np.round((tail - tail[-1]) / _SAME))) if len(tail) else 0


def _default_tail(count: int) -> int:
    """The default k of "rank" and "hill": the upper half, but at least 4 if there are that many."""
    return max(math.ceil(count / 2), min(count, MIN_DISTINCT))


def _fit_rank(logs: Array, k: int | None) -> tuple[float, float, int, float, float]:
    k = min(k or _default_tail(len(logs)), len(logs))
    tail = logs[::-1][:k]
    ranks = np.log(np.arange(1, k + 1) / len(logs))
    if k > _MAX_POINTS:
        chosen = np.linspace(0, k - 1, _MAX_POINTS).round().astype(int)
        points, ranks = tail[chosen], ranks[chosen]
    else:
        points = tail
    left, right = np.triu_indices(len(points), 1)
    run = points[left] - points[right]
    separate = run > _SAME  # equal eigenvalues have no slope between them
    if not separate.any():
        return math.inf, float(tail[-1]), k, math.inf, math.inf
    slope = float(np.median(((ranks[right] - ranks[left])[separate]) / run[separate]))
    zeta = 1.0 + slope
    return (
        zeta,
        float(tail[-1]),
        k,
        slope * _RANK_SPREAD / math.sqrt(k),
        _distance(tail[::-1], float(tail[-1]), zeta),
    )


def _fit_hill(logs: Array, k: int | None) -> tuple[float, float, int, float, float]:
    # The next eigenvalue below the tail is λ_min, so one must remain.
    k = min(k or _default_tail(len(logs)), len(logs) - 1)
    if k < 1:
        return math.inf, 0.0, len(logs), math.inf, math.inf
    tail, first = logs[len(logs) - k :], float(logs[len(logs) - k - 1])
    spread = float(np.sum(tail - first))
    if spread <= 0.0:
        return math.inf, first, k, math.inf, math.inf
    slope = k / spread
    return 1.0 + slope, first, k, slope / math.sqrt(k), _distance(tail, first, 1.0 + slope)


def _distance(tail: Array, first: float, zeta: float) -> float:
    """KS distance between an ascending tail (logarithms) and the power law above ``first``."""
    model = -np.expm1((1.0 - zeta) * (tail - first))
    return float(np.abs(model - np.arange(len(tail)) / len(tail)).max())


# WeightWatcher 0.7.7 corrects the likelihood's bias below this many eigenvalues, and then uses no
# tail shorter than _SMALL_TAIL (unless there are fewer in all).
_SMALL = 20
_SMALL_TAIL = 8


def _fit_ks(logs: Array) -> tuple[float, float, int, float, float]:
    """Maximum likelihood with the best λ_min among all eigenvalues except the largest."""
    count = len(logs)
    if count < 2:
        return math.inf, 0.0, count, math.inf, math.inf
    sizes = np.arange(count, 1, -1, dtype=np.float64)  # of the tail that starts at each candidate
    spreads = np.cumsum(logs[::-1])[::-1][:-1] - sizes * logs[:-1]
    usable = spreads > 1e-12 * sizes
    if count < _SMALL:
        usable &= sizes >= min(_SMALL_TAIL, count)
    if not usable.any():
        return math.inf, 0.0, count, math.inf, math.inf
    counted = sizes - 1.0 if count < _SMALL else sizes
    slopes = np.divide(counted, spreads, out=np.ones_like(sizes), where=usable)
    best = _closest(logs, slopes, np.flatnonzero(usable))
    slope, n_tail = float(slopes[best]), count - best
    distance = float(_distances(logs, slopes, np.array([best]), 1)[0])
    return 1.0 + slope, float(logs[best]), n_tail, slope / math.sqrt(n_tail), distance


def _closest(logs: Array, slopes: Array, candidates: Indices) -> int:
    """The candidate λ_min with the smallest KS distance.

    A distance is a maximum over the tail, so evaluating every _STRIDE-th eigenvalue gives a lower
    bound. The few candidates with the lowest bounds are evaluated in full, and after that only the
    candidates whose bound is not above the best of these. The result is the same as for a full
    evaluation of all candidates.
    """
    bounds = _distances(logs, slopes, candidates, _STRIDE)
    leaders = candidates[np.argsort(bounds)[:_STRIDE]]
    limit = float(_distances(logs, slopes, leaders, 1).min())
    contenders = candidates[bounds <= limit]
    return int(contenders[np.argmin(_distances(logs, slopes, contenders, 1))])


def _distances(logs: Array, slopes: Array, candidates: Indices, stride: int) -> Array:
    """The KS distance of each candidate, over every ``stride``-th eigenvalue; rows in chunks."""
    count = len(logs)
    columns = np.arange(count - 1, -1, -stride)[::-1]
    rows = max(1, _CHUNK // len(columns))
    parts = []
    for start in range(0, len(candidates), rows):
        first = candidates[start : start + rows, None]
        # Columns below a row's own candidate are not in its tail: the survival function is limited
        # to 1 and the rank to 0 there, so that they contribute 0.
        table = np.exp(np.minimum(slopes[first] * (logs[first] - logs[columns]), 0.0))
        table -= 1.0
        table += np.maximum(columns - first, 0) / (count - first)
        parts.append(np.abs(table).max(axis=1))
    return np.concatenate(parts)
