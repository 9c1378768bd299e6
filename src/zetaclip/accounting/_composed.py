"""Steps before an accountant sees them: counted, joined, and the cases with a closed form."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from ..errors import AccountingError
from ..ledger import Event
from ..words import counted

# If there are more kinds of step than this, ``condense`` joins similar ones.
_KINDS = 64
# Fast Fourier transforms in double precision spread about 1e-17 of probability per composed step
# over the whole distribution (measured against 80-bit transforms). Ten to twenty times that much
# of δ is reserved for it.
_SMEAR = 2e-16


def steps_of(events: list[Event]) -> int:
    """The number of steps."""
    return sum(event.count for event in events)


def merged(events: Iterable[Event]) -> list[Event]:
    """Joins equal kinds of step, and all steps without sampling into one equivalent Gaussian."""
    counts: defaultdict[tuple[float, float], int] = defaultdict(int)
    precision = 0.0  # the sum of 1/σ² over the steps without sampling
    for event in events:
        if not (
            0 <= event.sample_rate <= 1
            and 0 <= event.noise_multiplier < math.inf
            and event.count >= 0
        ):
            raise ValueError(f"{event} is not a sequence of steps")
        if event.count == 0 or (event.sample_rate == 0 and event.noise_multiplier > 0):
            continue
        if event.sample_rate == 1 and event.noise_multiplier > 0:
            precision += event.count / event.noise_multiplier**2
        else:
            counts[event.sample_rate, event.noise_multiplier] += event.count
    if precision:
        counts[1.0, precision**-0.5] += 1
    return [Event(rate, noise, count) for (rate, noise), count in sorted(counts.items())]


def condense(events: list[Event]) -> list[Event]:
    """At most about ``_KINDS`` kinds of step, by rounding similar multipliers down to the smallest.

    Less noise never costs less, so ε can only grow. If the largest multiplier is twice the
    smallest, a group is 1 % wide and ε grows by about as much.
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


def trivial(events: list[Event]) -> float | None:
    """0 without events, infinity if a step has no noise, otherwise None."""
    if not events:
        return 0.0
    return math.inf if any(event.noise_multiplier == 0 for event in events) else None


def closed_form(events: list[Event], delta: float) -> float | None:
    """The exact ε if all steps are without sampling, otherwise None.

    With μ = 1/σ, δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ).
    """
    if (known := trivial(events)) is not None or len(events) > 1 or events[0].sample_rate < 1:
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


def set_aside(events: list[Event], delta: float) -> float:
    """The part of δ that is reserved for rounding errors of the Fourier transforms."""
    smeared = _SMEAR * (steps_of(events) + 1000)
    if smeared > delta / 4:
        limit = (
            f"{counted(steps_of(events), 'step')} in double precision need δ >= {4 * smeared:.1g}"
        )
        raise AccountingError(f"{limit}, not {delta:g}: use accountant='rdp' or a larger δ")
    return smeared
