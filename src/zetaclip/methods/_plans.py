"""From what DP-SGD would spend to the noise of a method that releases something else.

Every function here takes a budget, T steps of (q, z), and returns a ``Plan`` that costs no more
than it. Queries on one batch with multipliers s_k cost what one with (Σ s_k⁻²)^(-1/2) costs, which
has a closed form; other batches, another q or a moving σ are solved with the accountant that the
budget names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..accounting import calibrate, epsilon
from ..accounting._accounting import AccountingError
from ..ledger import Event
from ._noise_plan import NoiseBudget, NoiseSchedule, Plan, at


def mapped(schedule: NoiseSchedule, change: Callable[[float], float]) -> NoiseSchedule:
    """The same change at every step of a schedule."""
    if not callable(schedule):
        return change(float(schedule))
    moving = schedule
    return lambda step: change(float(moving(step)))


def beside_count(budget: NoiseBudget, rule: Any, sigma_b: float | None = None) -> Plan:
    """A centred count (sensitivity 1/2, noise σ_b) beside the sum.

    The sum then has z_sum = (z⁻² - (2 σ_b)⁻²)^(-1/2). Without ``sigma_b``, σ_b is L/20 or 2z,
    whichever is larger: the noise of the sum grows by at most 3.3 %.
    """
    assert budget.expected_batch_size is not None
    given = sigma_b is not None
    if sigma_b is None:
        sigma_b = max(budget.expected_batch_size / 20, 2 * at(budget.noise_multiplier, 0))
    count = 2 * float(sigma_b)

    def remaining(z: float) -> float:
        if z == 0:
            return 0.0
        if z >= count:
            otherwise = f" (twice that, {z:.4g}, costs little), or leave it out" if given else ""
            raise ValueError(
                f"sigma_b = {count / 2:g} is too small for this budget: the count alone would cost "
                f"more than all of it. Set sigma_b above {z / 2:.4g}{otherwise}"
            )
        return (z**-2 - count**-2) ** -0.5

    return Plan(
        (mapped(budget.noise_multiplier, remaining),), rule=replace(rule, noise_multiplier=count)
    )


def exact_count(budget: NoiseBudget, rule: Any) -> Plan:
    """The count without noise, as published: no ε can be claimed, and the ledger's is infinite."""
    return Plan((budget.noise_multiplier,), rule=replace(rule, noise_multiplier=0.0))


def same_batch(budget: NoiseBudget, share: float) -> Plan:
    """Two sums on one batch; the first takes ``share`` of the precision 1/z²."""
    first, second = share**-0.5, (1 - share) ** -0.5
    z = budget.noise_multiplier
    return Plan((mapped(z, lambda value: first * value), mapped(z, lambda value: second * value)))


def two_batches(budget: NoiseBudget, share: float) -> Plan:
    """Two sums, each on a fresh batch: 2T steps that together cost what T steps of (q, z) do."""
    assert budget.steps is not None
    ratio = math.sqrt((1 - share) / share)
    q, steps = budget.sample_rate, budget.steps
    z = _solved(budget, lambda s: [Event(q, ratio * s, steps), Event(q, s, steps)])
    return Plan((ratio * z, z), steps=steps)


@dataclass(frozen=True)
class Decay:
    """σ of epoch e: start * ratio^e, but not below the floor."""

    start: float
    ratio: float
    floor: float
    steps_per_epoch: int

    def __call__(self, step: int) -> float:
        return max(self.floor, self.start * self.ratio ** (step // self.steps_per_epoch))

    def events(self, sample_rate: float, steps: int) -> list[Event]:
        firsts = range(0, steps, self.steps_per_epoch)
        return [
            Event(sample_rate, self(first), min(self.steps_per_epoch, steps - first))
            for first in firsts
        ]


def decaying(budget: NoiseBudget, ratio: float, floor: float) -> Plan:
    """A σ that falls from epoch to epoch.

    Its start is solved so that the whole schedule fits the budget.
    """
    assert budget.steps is not None and budget.steps_per_epoch is not None
    if callable(budget.noise_multiplier):
        raise ValueError(
            "this method brings its own schedule of noise; give noise_multiplier= as a number"
        )
    if floor and floor >= budget.noise_multiplier > 0:
        raise ValueError(
            f"sigma_min = {floor:g} is not below {budget.noise_multiplier:.4g}, the constant noise "
            "of this budget: nothing could decay. Lower it, or use dp-adamw"
        )
    q, steps, epoch = budget.sample_rate, budget.steps, budget.steps_per_epoch
    start = _solved(budget, lambda s: Decay(s, ratio, floor, epoch).events(q, steps))
    return Plan((Decay(start, ratio, floor if start else 0.0, epoch),), steps=steps)


def capped_rate(budget: NoiseBudget, cap: float, unsound: bool) -> Plan:
    """Candidates drawn with q_max = cap * q, and accounted at q_max.

    That is the largest probability with which any record is included.
    """
    rate = cap * budget.sample_rate
    if rate > 1:
        raise ValueError(
            f"cap = {cap:g} times the sampling rate {budget.sample_rate:.4g} is {rate:.4g}, and a "
            f"probability is at most 1; lower it to {1 / budget.sample_rate:.4g} or less"
        )
    if cap == 1:
        return Plan((budget.noise_multiplier,))
    if unsound:
        return Plan((budget.noise_multiplier,), sample_rate=rate)
    assert budget.steps is not None
    steps = budget.steps
    return Plan(
        (_solved(budget, lambda s: [Event(rate, s, steps)]),), steps=steps, sample_rate=rate
    )


def told_batch_size(budget: NoiseBudget, rule: Any) -> Plan:
    """DP-SGD's noise, and a rule that knows L."""
    return Plan((budget.noise_multiplier,), rule=replace(rule, batch=budget.expected_batch_size))


def two_stages(budget: NoiseBudget, rule: Any, warmup: float) -> Plan:
    """DP-SGD's noise, and a rule that knows L and when its first stage ends."""
    if budget.steps is None:
        raise ValueError("the method's first stage is a share of all steps: give epochs= too")
    first = min(budget.steps, max(1, math.ceil(warmup * budget.steps - 1e-9)))
    return Plan(
        (budget.noise_multiplier,),
        rule=replace(rule, batch=budget.expected_batch_size, first=first),
    )


def _solved(budget: NoiseBudget, make_events: Callable[[float], list[Event]]) -> float:
    """The smallest s whose events cost no more than the budget; 0 where it has no noise."""
    assert budget.delta is not None
    delta, accountant, start = budget.delta, budget.accountant, None
    target = epsilon(budget.events(), delta, accountant)
    if math.isinf(target):
        return 0.0
    if accountant != "rdp":
        # Both sides by RDP, which takes milliseconds: its excess cancels, and hardly any search is
        # left for the slow one.
        with suppress(AccountingError):
            start = calibrate(make_events, epsilon(budget.events(), delta, "rdp"), delta, "rdp")
    return calibrate(make_events, target, delta, accountant, start=start)
