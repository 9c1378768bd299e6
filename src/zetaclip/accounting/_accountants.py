"""How each accountant computes ε. The rest of the package calls ``_accounting.py``."""

from __future__ import annotations

import functools
import math
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import AccountingError
from ..ledger import Event
from ._composed import closed_form, condense, merged, set_aside, steps_of, trivial
from ._pld import pld
from ._renyi import divergence, spent

# Rényi orders: Opacus's own (1.1 to 63), finer ones below for large ε, coarser ones above for small
# ε. Above 1029 binomial coefficients overflow.
_ORDERS = sorted(
    {1.001, 1.0025, 1.005, 1.01, 1.02, 1.035, 1.05, 1.075}
    | {1 + tenths / 10 for tenths in range(1, 100)}
    | set(range(12, 64))
    | {64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1020}
)
_COARSE = sorted({*_ORDERS[::9], _ORDERS[-1]})
# Measured: 1.2 to 1.8 µs and 170 bytes per point of the grid, so at most a minute and 5 GB per kind
# of step.
PRV_SECONDS_PER_POINT = 1.8e-6
_PRV_MOST_POINTS = 3 * 10**7
# What the libraries raise when their numbers overflow or become invalid.
FAILURES = (ArithmeticError, ValueError, RuntimeError, IndexError, MemoryError)
Compute = Callable[[list[Event], float], float]


def _divergences(
    events: Iterable[Event], orders: Sequence[float]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The Rényi divergence of all steps together, at each order."""
    total = np.zeros(len(orders))
    for event in events:
        total += event.count * np.array(
            [divergence(event.sample_rate, event.noise_multiplier, float(o)) for o in orders]
        )
    return total


def rdp_epsilon(events: list[Event], delta: float) -> float:
    """ε by Rényi divergences."""
    if (known := trivial(events)) is not None:
        return known

    def best(orders: list[float]) -> tuple[float, float]:
        return spent(orders, _divergences(condense(events), orders), delta)

    try:
        with np.errstate(all="ignore"):
            # The bound has a single minimum over the orders, so the fine orders are needed only
            # around the best coarse one.
            first, order = best(_COARSE)
            around = bisect_left(_COARSE, order)
            left, right = _COARSE[max(around - 1, 0)], _COARSE[min(around + 1, len(_COARSE) - 1)]
            second, _ = best([order for order in _ORDERS if left < order < right])
    except FAILURES as failure:
        raise AccountingError(
            f"the RDP analysis failed ({failure}); try accountant='pld'"
        ) from failure
    if not math.isfinite(result := float(min(first, second))):
        raise AccountingError(f"the RDP analysis gave ε = {result}; try accountant='pld'")
    return max(result, 0.0)  # a bound below 0 also holds at 0


def renyi(events: Iterable[Event], orders: Sequence[float]) -> list[float]:
    """The Rényi divergence of all ``events`` together at each order.

    **Guarantee.** An upper bound, for adding and for removing a record.

    **Edge cases.** No events: 0. A multiplier of 0, or an order at which the analysis fails:
    infinity.
    """
    kinds = merged(events)
    if (known := trivial(kinds)) is not None:
        return [known] * len(orders)
    with np.errstate(all="ignore"):
        total = _divergences(condense(kinds), orders)
    return [math.inf if math.isnan(value) else max(0.0, float(value)) for value in total]


@functools.cache
def _prv_class() -> Any:
    """Opacus's PRV accountant with a grid width from cached Rényi divergences.

    Its own search for that width computes all of them again, which is four fifths of its time.
    """
    from opacus.accountants import PRVAccountant, RDPAccountant
    from opacus.accountants.analysis.prv import Domain

    class Accountant(PRVAccountant):
        def _get_domain(
            self, prvs: Any, num_self_compositions: Any, eps_error: float, delta_error: float
        ) -> Any:
            orders, steps = RDPAccountant.DEFAULT_ALPHAS, sum(num_self_compositions)
            whole = [Event(rate, noise, count) for noise, rate, count in self.history]

            def width(events: list[Event], delta: float) -> float:
                return spent(orders, _divergences(events, orders), delta)[0]

            each = [Event(event.sample_rate, event.noise_multiplier, 1) for event in whole]
            widths = [
                width(whole, delta_error / 4),
                *(width([one], delta_error / (8 * steps)) for one in each),
            ]
            half = max(*widths, eps_error) + 3
            return Domain.create_aligned(
                -half, half, eps_error / np.sqrt(steps * np.log(12 / delta_error) / 2)
            )

    return Accountant


def prv_epsilon(events: list[Event], delta: float) -> float:
    """ε by Opacus's numerical composition."""
    if (known := closed_form(events, delta)) is not None:
        return known
    from scipy.integrate import IntegrationWarning

    room = delta - set_aside(events, delta)
    points, error, bound = prv_size(events, delta)
    if points > _PRV_MOST_POINTS:
        raise AccountingError(
            f"the PRV accountant would need {points:.0e} points; use accountant='pld'"
        )
    accountant = _prv_class()()
    accountant.history = [(e.noise_multiplier, e.sample_rate, e.count) for e in condense(events)]
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.filterwarnings("ignore", message="Optimal order is the", category=UserWarning)
            # The grid is centred by a numerical integral; an inexact one would shift every step.
            warnings.simplefilter("error", IntegrationWarning)
            result = float(accountant.get_epsilon(room, eps_error=error, delta_error=delta / 1000))
    except (*FAILURES, IntegrationWarning) as failure:
        raise AccountingError(
            f"the PRV accountant failed ({failure}); use accountant='pld'"
        ) from failure
    # RDP is an upper bound as well, so a PRV value clearly above it is wrong.
    if not -error <= result <= 1.02 * bound + 2 * error:
        strange = f"ε = {result:.6g}, where RDP proves {bound:.6g}"
        raise AccountingError(f"the PRV accountant returned {strange}; use accountant='pld'")
    return max(result, 0.0)


def pld_epsilon(events: list[Event], delta: float) -> float:
    """ε by privacy loss distributions."""
    if (known := closed_form(events, delta)) is not None:
        return known
    room = delta - set_aside(events, delta)
    kinds = condense(events)
    try:
        result = pld(kinds, room, _pld_interval(kinds, delta))
    except FAILURES as failure:
        raise AccountingError(
            f"the PLD accountant failed ({failure}); try accountant='rdp'"
        ) from failure
    if not 0 <= result < math.inf:
        raise AccountingError(
            f"the PLD accountant returned ε = {result}; try accountant='rdp' or a larger δ"
        )
    return result


def group_epsilon(events: Iterable[Event], delta: float, records: int) -> float:
    """ε for a group (all records of a person or a trip), whose records join batches independently.

    Args:
        events: What was released.
        delta: δ.
        records: The largest number of records in a group.

    Returns:
        An upper bound on ε. For one record it is the ε of "pld".

    Raises:
        AccountingError: The computation fails.
        ValueError: An argument has a value that is not allowed.

    **Guarantee.** An upper bound, at the same δ. The number of the group's records in a batch is
    binomial, so a step is dominated by a mixture of Gaussians shifted by 0 to ``records``
    sensitivities (dp-accounting's, rounded upwards).

    **Edge cases.** The privacy loss of a large group is large, so the grid is coarse: it costs some
    tenths of a per cent of ε.
    """
    from dp_accounting.pld import privacy_loss_distribution as distributions
    from scipy.stats import binom

    if not (isinstance(records, int) and records >= 1):
        raise ValueError(f"a group has a positive whole number of records, not {records!r}")
    kinds = condense(merged(events))
    if (known := trivial(kinds)) is not None:
        return known
    scale = records * rdp_epsilon(kinds, delta)
    interval = min(0.05, max(1e-4, scale / 400))
    counts = list(range(records + 1))
    try:
        whole = distributions.identity(value_discretization_interval=interval)
        for event in kinds:
            one = distributions.from_mixture_gaussian_mechanism(
                event.noise_multiplier,
                [float(count) for count in counts],
                [float(p) for p in binom.pmf(counts, records, event.sample_rate)],
                value_discretization_interval=interval,
            )
            whole = whole.compose(one.self_compose(event.count))
        result = float(whole.get_epsilon_for_delta(delta - set_aside(kinds, delta)))
    except FAILURES as failure:
        raise AccountingError(
            f"the ε of a group of {records} records cannot be computed ({failure})"
        ) from failure
    if not 0 <= result < math.inf:
        raise AccountingError(f"the ε of a group of {records} records comes out as {result}")
    return result


def _pld_interval(events: list[Event], delta: float) -> float:
    """The grid of the privacy loss: fine enough to cost about 0.1 % of ε, and not finer.

    Rounding a loss to a grid of width h adds about h²/6 to its variance. If h is a twentieth of the
    standard deviation of one step's loss, this adds 0.04 %, however many steps are composed.
    """
    variance = largest = 0.0
    for event in events:
        q, sigma = event.sample_rate, event.noise_multiplier
        x = np.linspace(-10 * sigma, 1 + 10 * sigma, 4001)
        with np.errstate(divide="ignore"):
            loss = np.logaddexp(np.log1p(-q), math.log(q) + (2 * x - 1) / (2 * sigma**2))
        weight = (1 - q) * np.exp(-((x / sigma) ** 2) / 2) + q * np.exp(
            -(((x - 1) / sigma) ** 2) / 2
        )
        weight /= weight.sum()
        mean = float(weight @ loss)
        variance += event.count * float(weight @ (loss - mean) ** 2)
        largest = max(largest, float(loss[-1]))
    interval = 0.05 * math.sqrt(variance / steps_of(events))
    # With few steps ε depends on single losses, so the grid must also be fine relative to ε.
    interval = min(interval, 1e-3 * max(1.0, rdp_epsilon(events, delta)))
    # At most some 10^5 points, in one step and in the sum, which takes a second or two.
    return max(interval, largest / 1.5e5, 2 * rdp_epsilon(events, 1e-15) / 4e5)


def prv_size(events: list[Event], delta: float) -> tuple[float, float, float]:
    """(points of the PRV grid, error to allow in ε, ε by RDP)."""
    bound = rdp_epsilon(events, delta)
    error = min(max(0.01, 1e-3 * bound), max(0.002, 0.02 * bound), 0.5)
    half = rdp_epsilon(events, delta / 4000) + 3
    mesh = error / math.sqrt(steps_of(events) * math.log(12_000 / delta) / 2)
    return 2 * half / mesh, error, bound


COMPUTE: dict[str, Compute] = {"rdp": rdp_epsilon, "prv": prv_epsilon, "pld": pld_epsilon}
ACCOUNTANTS = tuple(COMPUTE)
