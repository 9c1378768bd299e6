"""Privacy loss distributions of Poisson-subsampled Gaussians, composed by Fourier transforms.

The discretisation is that of Doroshenko, Ghazi, Kamath, Kumar and Manurangsi (2022, "connect the
dots"): the mass between two points of the grid is split between them so that the probabilities
under both neighbours stay what they are. It dominates the exact distribution, so ε can only grow.
dp-accounting computes the same; its import alone takes half a second, and it composes kinds of step
one after the other, where one product in the Fourier domain is enough. ``tests/test_pld.py``
compares both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ledger import Event

Array = np.ndarray[Any, np.dtype[np.float64]]

# ln of the mass that is cut off on each side of one step. What is cut above counts as an infinite
# loss, what is cut below moves up to the first point of the grid.
_LOG_CUT = -50.0
# The mass of the sum outside the window of the transform; it counts as an infinite loss as well.
_TAIL = 1e-15
# Relative rounding errors of masses and losses, which are below 1e-12 a step.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class _Losses:
    """Masses at (first + i) * interval, and a mass at infinity."""

    first: int
    masses: Array
    infinite: float


def pld(events: list[Event], delta: float, interval: float) -> float:
    """ε at ``delta`` of all events together.

    Args:
        events: Kinds of step, with multipliers above 0 and rates in (0, 1].
        delta: δ.
        interval: Width of the grid of losses.

    Returns:
        The larger ε of adding and of removing a record.

    Raises:
        ArithmeticError: The mass of infinite losses is at least ``delta``.

    **Guarantee.** An upper bound, up to the rounding errors of the Fourier transforms: the caller
    reserves a part of δ for them.
    """
    return max(
        _composed_epsilon([(_one_step(event, interval, adding), event.count) for event in events],
                          delta, interval)
        for adding in (False, True)
    )  # fmt: skip


def _one_step(event: Event, interval: float, adding: bool) -> _Losses:
    """The discretised loss of one step.

    With a record, a coordinate x is drawn from (1 - q) N(0, σ²) + q N(1, σ²); without it from
    N(0, σ²). The loss of removing the record is ln(1 - q + q exp((2x - 1) / 2σ²)), which rises with
    x; that of adding it is the negative of this.
    """
    from scipy.special import log_ndtr

    q, sigma = event.sample_rate, event.noise_multiplier
    # Φ(-reach) = exp(_LOG_CUT), from above: Φ(-t) < exp(-t²/2) / 2.
    reach = math.sqrt(-2 * _LOG_CUT)
    assert log_ndtr(-reach) <= _LOG_CUT

    def loss(x: float) -> float:
        return float(np.logaddexp(_log1m(q), math.log(q) + (2 * x - 1) / (2 * sigma**2)))

    low, high = -sigma * reach, sigma * reach + (0.0 if adding else 1.0)
    if adding:
        first, last = math.floor(-loss(high) / interval), math.ceil(-loss(low) / interval)
    else:
        first, last = math.floor(loss(low) / interval), math.ceil(loss(high) / interval)
    grid = interval * np.arange(first, last + 1, dtype=np.float64)
    x = _coordinate(-grid if adding else grid, q, sigma)
    without = _between(x / sigma)
    drawn = _between((x - 1) / sigma)
    with_record = (1 - q) * without + q * drawn
    ours, theirs = (without, with_record) if adding else (with_record, without)
    # Between two points: mass = lower + upper, and theirs = lower e^-a + upper e^-b.
    # An exponent that is cut moves more of the mass up.
    upper = (ours - theirs * np.exp(np.minimum(grid[:-1], 700.0))) / -math.expm1(-interval)
    upper = np.clip(upper, 0.0, ours)
    masses = np.zeros(len(grid))
    masses[:-1] += ours - upper
    masses[1:] += upper
    edges = np.array([-math.inf, *sorted((x[0], x[-1])), math.inf])
    below, _, above = (1 - q) * _between(edges / sigma) + q * _between((edges - 1) / sigma)
    if adding:  # small losses are those of a large x
        below, _, above = _between(edges / sigma)[::-1]
    masses[0] += below
    return _Losses(first, masses, float(above))


def _log1m(q: float) -> float:
    return math.log1p(-q) if q < 1 else -math.inf


def _coordinate(losses: Array, q: float, sigma: float) -> Array:
    """The x at which removing a record has these losses; -inf below the smallest possible one."""
    with np.errstate(divide="ignore", invalid="ignore"):
        # ln((e^l - 1 + q) / q), without overflow for large losses
        far = losses > 30
        near = np.log(np.maximum(np.expm1(np.where(far, 0.0, losses)) + q, 0.0))
        ratio = np.where(far, losses + np.log1p((q - 1) * np.exp(-losses)), near) - math.log(q)
    return np.asarray(sigma**2 * ratio + 0.5)


def _between(z: Array) -> Array:
    """The mass of a standard Gaussian between neighbours, with a small relative error in tails."""
    from scipy.special import ndtr

    tail = ndtr(-np.abs(z))
    left, right = z[:-1], z[1:]
    same = np.abs(tail[1:] - tail[:-1])
    return np.where((left < 0) != (right < 0), 1.0 - tail[1:] - tail[:-1], same)


def _composed_epsilon(steps: list[tuple[_Losses, int]], delta: float, interval: float) -> float:
    from scipy.fft import irfft, next_fast_len, rfft

    infinite = (
        -math.expm1(sum(count * math.log1p(-losses.infinite) for losses, count in steps))
        + 2 * _TAIL
    )
    low, high = _window(steps, interval)
    size = next_fast_len(high - low + 1, real=True)
    product: Any = 1.0
    for losses, count in steps:
        product = product * rfft(_folded(losses, size)) ** count
    cyclic = irfft(product, size)
    # Place i of the result has every sum that is i modulo the size. Inside the window there is one.
    masses = np.maximum(np.roll(cyclic, -(low % size)), 0.0)
    first = max(0, -low)  # losses below 0 don't matter to an ε of 0 or more
    return _epsilon(interval * np.arange(low + first, low + size), masses[first:], infinite, delta)


def _folded(losses: _Losses, size: int) -> Array:
    places = (losses.first + np.arange(len(losses.masses))) % size
    return np.asarray(np.bincount(places, weights=losses.masses, minlength=size), dtype=np.float64)


def _window(steps: list[tuple[_Losses, int]], interval: float) -> tuple[int, int]:
    """The first and last point of the sum, outside of which a mass of at most 2 ``_TAIL`` lies."""
    least = sum(count * losses.first for losses, count in steps)
    most = sum(count * (losses.first + len(losses.masses) - 1) for losses, count in steps)
    places = [losses.first + np.arange(len(losses.masses), dtype=np.float64) for losses, _ in steps]
    variance = 0.0
    for (losses, count), place in zip(steps, places, strict=True):
        mean = _dot(losses.masses, place)
        variance += count * _dot(losses.masses, (place - mean) ** 2)
    # The t that is best for a Gaussian. Heavier tails want a smaller one.
    start = math.sqrt(-2 * math.log(_TAIL) / max(variance, 1e-300))

    def bound(t: float) -> float:
        """The point beyond which ``_TAIL`` lies, in the direction of t, by Chernoff's bound.

        P(S >= s) <= E exp(t S) exp(-t s) for every t > 0.
        """
        total = -math.log(_TAIL)
        for (losses, count), place in zip(steps, places, strict=True):
            top = max(t * place[0], t * place[-1])
            total += count * (top + math.log(_dot(losses.masses, np.exp(t * place - top))))
        return total / abs(t)

    edges = math.log(start / 1e4), math.log(4 * start)
    low = _least(lambda u: bound(-math.exp(u)), *edges)
    high = _least(lambda u: bound(math.exp(u)), *edges)
    return max(least, math.floor(-low)), min(most, math.ceil(high))


def _dot(masses: Array, values: Array) -> float:
    """The sum of products, the same on every machine.

    Not by BLAS: its threads split the sum by their number, and on a busy machine they wait for each
    other with the processor on, which took several times the time of the work.
    """
    return float((masses * values).sum())


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """About the smallest value of a function with one minimum, by golden sections."""
    golden = (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(10):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = function(right)
    return min(at_left, at_right)


def _epsilon(values: Array, masses: Array, infinite: float, delta: float) -> float:
    """The smallest ε >= 0 with infinite + Σ masses (1 - exp(ε - value))+ <= delta."""
    if infinite >= delta:
        raise ArithmeticError(f"losses without a bound have a probability of {infinite:.2g}")

    def excess(place: int) -> float:
        """The excess of δ if ε is ``values[place]``."""
        tail = _dot(masses[place + 1 :], -np.expm1(values[place] - values[place + 1 :]))
        return infinite + tail - delta

    if not len(values):
        return 0.0
    if infinite + _dot(masses, -np.expm1(-values)) <= delta:
        return 0.0
    low, high = -1, len(values) - 1  # excess(low) > 0 >= excess(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    # Between the two points exactly the masses from ``high`` on count.
    weights = _dot(masses[high:], np.exp(values[high] - values[high:]))
    ratio = (infinite + float(masses[high:].sum()) - delta) / weights
    return max(0.0, float(values[high]) + math.log(ratio)) * (1 + _ROUNDING)
