"""From what was released to ε, and from a target ε to σ.

Everything is for add/remove-one-record adjacency and Poisson batches. Three accountants answer the same
question: ``"rdp"`` (Opacus's Rényi analysis: fast, 15 to 25 % too large), ``"prv"`` (Opacus's numerical
composition: tight, slow for very many steps) and ``"pld"`` (dp-accounting's: as tight, fast). Importing
either library takes seconds, so that happens on first use, and nowhere else in the package.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import numpy as np

from zetaclip.errors import AccountingError, NoGuarantee
from zetaclip.ledger import Event

__all__ = [
    "ACCOUNTANTS",
    "AccountingError",
    "NoGuarantee",
    "affordable",
    "calibrate",
    "epsilon",
    "group_epsilon",
    "noise_multiplier_for",
    "renyi",
]

# Rényi orders: Opacus's own (1.1 to 63), finer below for large ε, coarser above for small. Past 1029 its
# binomial coefficients overflow.
_ORDERS = sorted(
    {1.001, 1.0025, 1.005, 1.01, 1.02, 1.035, 1.05, 1.075}
    | {1 + tenths / 10 for tenths in range(1, 100)}
    | set(range(12, 64))
    | {64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1020}
)
_COARSE = sorted({*_ORDERS[::9], _ORDERS[-1]})
# More kinds of step than this are rounded together, see _condense.
_KINDS = 64
# Fast Fourier transforms in double precision smear about 1e-17 of probability per composed step over the
# whole distribution (measured against 80-bit transforms). Ten to twenty times that is set aside in δ.
_SMEAR = 2e-16
# Measured: 1.2 to 1.8 µs and 170 bytes per point of the grid, so at most a minute and 5 GB per kind of step.
_PRV_SECONDS_PER_POINT = 1.8e-6
_PRV_MOST_POINTS = 3 * 10**7
_SIGMA_RANGE = (0.01, 1e5)
# What the libraries raise when their numbers get out of hand.
_FAILURES = (ArithmeticError, ValueError, RuntimeError, IndexError, MemoryError)
_Compute = Callable[[list[Event], float], float]


def epsilon(events: Iterable[Event], delta: float, accountant: str = "prv") -> float:
    """ε at ``delta`` of all ``events`` together.

    **Guarantee.** An upper bound on the ε of Poisson-subsampled Gaussians with these rates and multipliers,
    in any order, if the multipliers were fixed in advance. "rdp" is the best of Opacus's bound over its
    orders and some more; a floor of about ln(1/δ)/1000 remains. "prv" is Opacus's upper bound, whose error
    is set to 0.01 for ε from 0.5 to 10, to 2 % of ε below (at least 0.002) and to 0.1 % above. "pld" rounds
    losses upwards, on a grid that costs about 0.1 % of ε. "prv" and "pld" set a part of δ aside that covers
    the rounding errors of their Fourier transforms.

    **Edge cases.** No events: 0. A multiplier of 0: infinity. If every sampling rate is 1, the whole is one
    Gaussian, and "prv" and "pld" both give its exact ε in closed form. More than 64 kinds of step (a schedule
    that moves at every step) are rounded together towards less noise. Where "prv" or "pld" would be
    unreliable, as for δ below about 1e-15 per step, they raise ``AccountingError``. "prv" warns before it
    computes for more than 10 seconds or 10^5 steps.
    """
    compute = _lookup(accountant, delta)
    kinds = _merged(events)
    if accountant == "prv":
        _warn_if_slow(kinds, delta, evaluations=1)
    return compute(kinds, delta)


def noise_multiplier_for(
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = "prv",
    tolerance: float = 1e-3,
) -> float:
    """The smallest σ for which ``steps`` steps at ``sample_rate`` stay within the target.

    **Guarantee.** ``epsilon`` was evaluated at the σ returned and was at or below the target; at
    ``(1 - tolerance)`` times it, it is above.
    """
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must be in (0, 1], not {sample_rate}")
    if not (isinstance(steps, int) and steps > 0):
        raise ValueError(f"steps must be a positive whole number, not {steps!r}")
    return calibrate(
        lambda sigma: [Event(sample_rate, sigma, steps)], target_epsilon, target_delta, accountant, tolerance
    )


def calibrate(
    make_events: Callable[[float], list[Event]],
    target_epsilon: float,
    target_delta: float,
    accountant: str = "prv",
    tolerance: float = 1e-3,
    start: float | None = None,
) -> float:
    """The smallest σ for which the steps that ``make_events(σ)`` describes stay within the target.

    ``make_events`` turns one number into everything a method would release: a schedule, several batches per
    update, a second query. More σ must mean more noise. A ``start`` close to the answer saves evaluations.

    **Guarantee.** As ``noise_multiplier_for``. A σ at which the accountant fails is never returned.

    **Edge cases.** A target that no σ reaches (below what the accountant resolves, or released without noise
    anyway) and one that every σ reaches (δ so large that it allows publishing records) are errors.
    """
    compute = _lookup(accountant, target_delta)
    if not 0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon must be positive and finite, not {target_epsilon}")
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must be in (0, 1), not {tolerance}")
    target = f"ε = {target_epsilon:g} at δ = {target_delta:g}"

    def excess(sigma: float, using: _Compute = compute) -> float:
        """ln(ε / target): at most 0 where the target is met, and nearly straight in ln σ."""
        return math.log(max(using(_merged(make_events(sigma)), target_delta) / target_epsilon, 1e-9))

    first = 0.1 if start is None else 4 * tolerance
    if start is None:
        start = 1.0
        if compute is not _rdp_epsilon:
            # RDP takes milliseconds and comes within some per cent; the slow accountants start from there.
            with suppress(AccountingError):  # it may not resolve what the others do
                start = _smallest(lambda sigma: excess(sigma, _rdp_epsilon), 1.0, 0.02, target)
    if accountant == "prv":
        _warn_if_slow(_merged(make_events(start)), target_delta, evaluations=8 if first == 0.1 else 4)
    return _smallest(excess, start, tolerance, target, first)


def _smallest(
    excess: Callable[[float], float], start: float, tolerance: float, target: str, first: float = 0.1
) -> float:
    """The smallest x with excess(x) <= 0, to a relative ``tolerance`` and from above; ``first`` steps around the start."""
    least, most = (math.log(limit) for limit in _SIGMA_RANGE)

    def try_at(position: float) -> float:
        try:
            return excess(math.exp(position))
        except AccountingError:
            return math.inf  # as good as above the target: it moves the bracket and is never returned

    high, growth = math.log(start), first
    low: float | None = None
    while (at_high := excess(math.exp(high))) > 0:
        low, at_low = high, at_high
        if high >= most:
            raise AccountingError(
                f"no noise multiplier up to {_SIGMA_RANGE[1]:g} reaches {target} with this accountant: raise "
                "the target ε or δ, take fewer steps or a smaller sampling rate, or use accountant='pld', "
                "which resolves the smallest ε"
            )
        high, growth = min(high + growth, most), 2 * growth
    growth = first
    while low is None:
        trial = max(high - growth, least)
        if (at_trial := try_at(trial)) > 0:
            low, at_low = trial, at_trial
        elif trial <= least:
            raise AccountingError(
                f"every noise multiplier down to {_SIGMA_RANGE[0]:g} reaches {target}, so the target asks "
                "for nothing: lower the target δ (far below 1 / number of records) or ε"
            )
        else:
            high, at_high, growth = trial, at_trial, 2 * growth
    turn = 0
    while high - low > math.log1p(tolerance):
        middle, turn = (low + high) / 2, turn + 1
        if math.isfinite(at_low) and turn % 3:
            # Where the straight line through both ends crosses zero, moved a little towards the farther end,
            # so that a good guess closes the bracket from both sides in two evaluations. Every third time
            # the middle itself, in case the line is a bad guess.
            crossing = low + (high - low) * at_low / (at_low - at_high)
            crossing += math.copysign(tolerance / 3, middle - crossing)
            margin = 0.02 * (high - low)
            middle = min(max(crossing, low + margin), high - margin)
        if (at_middle := try_at(middle)) > 0:
            low, at_low = middle, at_middle
        else:
            high, at_high = middle, at_middle
    return math.exp(high)


def affordable(
    events_up_to: Callable[[int], list[Event]],
    done: int,
    most: int,
    limit: float,
    delta: float,
    accountant: str = "prv",
) -> int:
    """The largest number of updates, from ``done`` to ``most``, whose ε is at or below ``limit``.

    ``events_up_to(count)`` is everything that will have been released after ``count`` updates. What is done is taken as given.
    """

    def fits(count: int) -> bool:
        events = events_up_to(count)
        return not events or epsilon(events, delta, accountant) <= limit

    low, high = done, most
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def renyi(events: Iterable[Event], orders: Sequence[float]) -> list[float]:
    """The Rényi divergence of all ``events`` together at each of the orders.

    **Guarantee.** An upper bound, for both directions of adding and removing a record.
    **Edge cases.** No events: 0. A multiplier of 0, or an order at which the analysis breaks down: infinity.
    """
    kinds = _merged(events)
    if (known := _trivial(kinds)) is not None:
        return [known] * len(orders)
    from opacus.accountants.analysis.rdp import compute_rdp

    total = np.zeros(len(orders))
    with np.errstate(all="ignore"):
        for event in _condense(kinds):
            q, sigma, steps = event.sample_rate, event.noise_multiplier, event.count
            total += compute_rdp(q=q, noise_multiplier=sigma, steps=steps, orders=list(orders))
    return [math.inf if math.isnan(value) else max(0.0, float(value)) for value in total]


def _rdp_epsilon(events: list[Event], delta: float) -> float:
    if (known := _trivial(events)) is not None:
        return known
    from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent

    def best(orders: list[float]) -> tuple[float, float]:
        total = np.zeros(len(orders))
        for event in _condense(events):
            q, sigma, steps = event.sample_rate, event.noise_multiplier, event.count
            total += compute_rdp(q=q, noise_multiplier=sigma, steps=steps, orders=orders)
        return get_privacy_spent(orders=orders, rdp=total, delta=delta)

    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            # The bound holds at any order. That the best is the last of a list, here often a part of the
            # orders, is nothing that a user could act on.
            warnings.filterwarnings("ignore", message="Optimal order is the", category=UserWarning)
            # The bound has one valley over the orders: the fine ones are needed only around the coarse best.
            first, order = best(_COARSE)
            around = bisect_left(_COARSE, order)
            left, right = _COARSE[max(around - 1, 0)], _COARSE[min(around + 1, len(_COARSE) - 1)]
            second, _ = best([order for order in _ORDERS if left < order < right])
    except _FAILURES as failure:
        raise AccountingError(f"the RDP analysis failed ({failure}); try accountant='pld'") from failure
    if not math.isfinite(result := float(min(first, second))):
        raise AccountingError(f"the RDP analysis gave ε = {result}; try accountant='pld'")
    return max(result, 0.0)  # a bound below 0 also holds at 0


def _prv_epsilon(events: list[Event], delta: float) -> float:
    if (known := _closed_form(events, delta)) is not None:
        return known
    from opacus.accountants import PRVAccountant
    from scipy.integrate import IntegrationWarning

    room = delta - _set_aside(events, delta)
    points, error, bound = _prv_size(events, delta)
    if points > _PRV_MOST_POINTS:
        raise AccountingError(f"the PRV accountant would need {points:.0e} points; use accountant='pld'")
    accountant = PRVAccountant()
    accountant.history = [(e.noise_multiplier, e.sample_rate, e.count) for e in _condense(events)]
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.filterwarnings("ignore", message="Optimal order is the", category=UserWarning)
            # The grid is centred with a numerical integral. One that says it is inexact shifts every step.
            warnings.simplefilter("error", IntegrationWarning)
            result = float(accountant.get_epsilon(room, eps_error=error, delta_error=delta / 1000))
    except (*_FAILURES, IntegrationWarning) as failure:
        raise AccountingError(f"the PRV accountant failed ({failure}); use accountant='pld'") from failure
    # RDP bounds the same thing, so a PRV value clearly above it has broken down.
    if not -error <= result <= 1.02 * bound + 2 * error:
        strange = f"ε = {result:.6g}, where RDP proves {bound:.6g}"
        raise AccountingError(f"the PRV accountant returned {strange}; use accountant='pld'")
    return max(result, 0.0)


def _pld_epsilon(events: list[Event], delta: float) -> float:
    if (known := _closed_form(events, delta)) is not None:
        return known
    from dp_accounting.pld import privacy_loss_distribution as distributions

    room = delta - _set_aside(events, delta)
    kinds = _condense(events)
    interval = _pld_interval(kinds, delta)
    try:
        whole = distributions.identity(value_discretization_interval=interval)
        for event in kinds:
            one = distributions.from_gaussian_mechanism(
                standard_deviation=event.noise_multiplier,
                sampling_prob=event.sample_rate,
                value_discretization_interval=interval,
                pessimistic_estimate=True,
            )
            whole = whole.compose(one.self_compose(event.count))
        result = float(whole.get_epsilon_for_delta(room))
    except _FAILURES as failure:
        raise AccountingError(f"the PLD accountant failed ({failure}); try accountant='rdp'") from failure
    if not 0 <= result < math.inf:
        raise AccountingError(f"the PLD accountant returned ε = {result}; try accountant='rdp' or a larger δ")
    return result


def group_epsilon(events: Iterable[Event], delta: float, records: int) -> float:
    """ε for a person or a thing that has up to ``records`` records, each of which joins batches on its own.

    **Guarantee.** An upper bound, at the same δ. The number of the group's records in a batch is binomial, so a step is dominated by
    a mixture of Gaussians shifted by 0 to ``records`` sensitivities (dp-accounting's, rounded upwards). One record: PLD's own ε.

    **Edge cases.** The grid is coarse, some tenths of a per cent of ε, because the loss of a large group is large.
    """
    from dp_accounting.pld import privacy_loss_distribution as distributions
    from scipy.stats import binom

    if not (isinstance(records, int) and records >= 1):
        raise ValueError(f"a group has a positive whole number of records, not {records!r}")
    kinds = _condense(_merged(events))
    if (trivial := _trivial(kinds)) is not None:
        return trivial
    scale = records * _rdp_epsilon(kinds, delta)
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
        result = float(whole.get_epsilon_for_delta(delta - _set_aside(kinds, delta)))
    except _FAILURES as failure:
        raise AccountingError(f"the ε of a group of {records} records can't be computed ({failure})") from failure
    if not 0 <= result < math.inf:
        raise AccountingError(f"the ε of a group of {records} records comes out as {result}")
    return result


_COMPUTE: dict[str, _Compute] = {"rdp": _rdp_epsilon, "prv": _prv_epsilon, "pld": _pld_epsilon}
ACCOUNTANTS = tuple(_COMPUTE)


def _lookup(accountant: str, delta: float) -> _Compute:
    if accountant not in _COMPUTE:
        raise ValueError(f"unknown accountant {accountant!r}: use one of {', '.join(ACCOUNTANTS)}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be between 0 and 1, not {delta}")
    return _COMPUTE[accountant]


def _total(events: list[Event]) -> int:
    return sum(event.count for event in events)


def _merged(events: Iterable[Event]) -> list[Event]:
    """Equal kinds counted once, steps without sampling folded into the one Gaussian that they amount to."""
    counts: defaultdict[tuple[float, float], int] = defaultdict(int)
    precision = 0.0  # 1/σ² adds up where nothing is sampled
    for event in events:
        if not (0 <= event.sample_rate <= 1 and 0 <= event.noise_multiplier < math.inf and event.count >= 0):
            raise ValueError(f"{event} is no sequence of steps")
        if event.count == 0 or (event.sample_rate == 0 and event.noise_multiplier > 0):
            continue
        if event.sample_rate == 1 and event.noise_multiplier > 0:
            precision += event.count / event.noise_multiplier**2
        else:
            counts[event.sample_rate, event.noise_multiplier] += event.count
    if precision:
        counts[1.0, precision**-0.5] += 1
    return [Event(rate, noise, count) for (rate, noise), count in sorted(counts.items())]


def _condense(events: list[Event]) -> list[Event]:
    """About ``_KINDS`` kinds at most: nearby multipliers of one sampling rate become the smallest of them.

    Less noise never costs less, so ε can only grow. Where the largest multiplier is twice the smallest, a
    group is 1 % wide and ε grows by about as much.
    """
    if len(events) <= _KINDS:
        return events
    by_rate: defaultdict[float, list[Event]] = defaultdict(list)
    for event in events:
        by_rate[event.sample_rate].append(event)
    grouped: list[Event] = []
    spread = 0.0
    for group in by_rate.values():
        spread += math.log(group[-1].noise_multiplier / group[0].noise_multiplier)
    for rate, group in by_rate.items():
        floor, count = group[0].noise_multiplier, 0
        for event in group:  # in ascending order of noise
            if math.log(event.noise_multiplier / floor) > spread / _KINDS:
                grouped.append(Event(rate, floor, count))
                floor, count = event.noise_multiplier, 0
            count += event.count
        grouped.append(Event(rate, floor, count))
    return grouped


def _trivial(events: list[Event]) -> float | None:
    if not events:
        return 0.0
    return math.inf if any(event.noise_multiplier == 0 for event in events) else None


def _closed_form(events: list[Event], delta: float) -> float | None:
    """The exact ε if nothing was sampled: with μ = 1/σ, δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ)."""
    if (known := _trivial(events)) is not None or len(events) > 1 or events[0].sample_rate < 1:
        return known
    from scipy.optimize import brentq
    from scipy.special import log_ndtr

    mu = 1 / events[0].noise_multiplier

    def excess(eps: float) -> float:
        upper, lower = log_ndtr(mu / 2 - eps / mu), eps + log_ndtr(-mu / 2 - eps / mu)
        return upper + math.log(-math.expm1(min(lower - upper, -1e-300))) - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    ceiling = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))  # the tail bound of the loss
    return float(brentq(excess, 0.0, ceiling + 1.0, xtol=1e-12)) * (1 + 1e-9)


def _set_aside(events: list[Event], delta: float) -> float:
    """The part of δ that rounding in the Fourier transforms may eat."""
    smeared = _SMEAR * (_total(events) + 1000)
    if smeared > delta / 4:
        limit = f"{_total(events)} steps in double precision need δ >= {4 * smeared:.1g}"
        raise AccountingError(f"{limit}, not {delta:g}: use accountant='rdp' or a larger δ")
    return smeared


def _prv_size(events: list[Event], delta: float) -> tuple[float, float, float]:
    """(points of the PRV grid, error to allow in ε, ε by RDP)."""
    bound = _rdp_epsilon(events, delta)
    error = min(max(0.01, 1e-3 * bound), max(0.002, 0.02 * bound), 0.5)
    half = _rdp_epsilon(events, delta / 4000) + 3
    mesh = error / math.sqrt(_total(events) * math.log(12_000 / delta) / 2)
    return 2 * half / mesh, error, bound


def _warn_if_slow(events: list[Event], delta: float, evaluations: int) -> None:
    if _closed_form(events, delta) is not None:
        return
    steps, kinds = _total(events), len(_condense(events))
    seconds = evaluations * kinds * (0.1 + _PRV_SECONDS_PER_POINT * _prv_size(events, delta)[0])
    if steps > 10**5 or seconds > 10:
        warnings.warn(
            f"the PRV accountant will take about {max(seconds, 1):.0f} s for {steps} steps; "
            "accountant='pld' is as tight and much faster",
            stacklevel=3,
        )


def _pld_interval(events: list[Event], delta: float) -> float:
    """The grid of the privacy loss: fine enough to cost about 0.1 % of ε, and no finer.

    Rounding a loss to a grid of width h adds about h²/6 to its variance. A twentieth of the standard
    deviation of one step's loss therefore adds 0.04 %, however many steps are composed.
    """
    variance = largest = 0.0
    for event in events:
        q, sigma = event.sample_rate, event.noise_multiplier
        x = np.linspace(-10 * sigma, 1 + 10 * sigma, 4001)
        with np.errstate(divide="ignore"):
            loss = np.logaddexp(np.log1p(-q), math.log(q) + (2 * x - 1) / (2 * sigma**2))
        weight = (1 - q) * np.exp(-((x / sigma) ** 2) / 2) + q * np.exp(-(((x - 1) / sigma) ** 2) / 2)
        weight /= weight.sum()
        mean = float(weight @ loss)
        variance += event.count * float(weight @ (loss - mean) ** 2)
        largest = max(largest, float(loss[-1]))
    interval = 0.05 * math.sqrt(variance / _total(events))
    # Few steps: ε hangs on single losses, so it must also be resolved itself.
    interval = min(interval, 1e-3 * max(1.0, _rdp_epsilon(events, delta)))
    # But a grid of no more than some 10^5 points, in one step and in the sum: a second or two.
    return max(interval, largest / 1.5e5, 2 * _rdp_epsilon(events, 1e-15) / 4e5)
