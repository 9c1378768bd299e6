"""What a method may spend, as steps of DP-SGD, and the noise that it then draws."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..clipping import ClipRule
from ..control import Released
from ..ledger import Event

# σ at each update, public: a number, or a function of the number of updates done.
NoiseSchedule = float | Callable[[int], float]


def at(schedule: NoiseSchedule, step: int) -> float:
    """The value of a schedule at a step."""
    return float(schedule(step) if callable(schedule) else schedule)


@dataclass(frozen=True)
class Pass:
    """One private gradient of an update.

    Args:
        name: For the ledger, if there are several passes.
        batch: Where its records come from: "fresh" (a Poisson batch of its own) or "same" (the
            records of the pass before).
        perturb: ``perturb(releases, memory)`` gives a flat vector and how far the weights go along
            it while the batch is out, or None. It sees this update's releases so far and what
            ``Method.remember`` kept.
    """

    name: str = "descent"
    batch: str = "fresh"
    perturb: (
        Callable[[Sequence[Released], dict[str, Tensor]], tuple[Tensor, float] | None] | None
    ) = None


@dataclass(frozen=True)
class NoiseBudget:
    """What a method may spend, as steps of DP-SGD: T steps of (q, z*).

    Args:
        noise_multiplier: DP-SGD's σ, z*.
        sample_rate: q.
        steps: Updates; None if the user did not say.
        delta: δ; None if the user did not say.
        accountant: Which accountant.
        expected_batch_size: L.
        steps_per_epoch: Updates per epoch.
    """

    noise_multiplier: NoiseSchedule
    sample_rate: float
    steps: int | None = None
    delta: float | None = None
    accountant: str = "pld"
    expected_batch_size: float | None = None
    steps_per_epoch: int | None = None

    def events(self) -> list[Event]:
        """What DP-SGD would release."""
        if self.steps is None:
            raise ValueError("the number of steps is not known: give epochs=")
        if not callable(self.noise_multiplier):
            return [Event(self.sample_rate, float(self.noise_multiplier), self.steps)]
        counts = Counter(at(self.noise_multiplier, step) for step in range(self.steps))
        return [Event(self.sample_rate, noise, count) for noise, count in sorted(counts.items())]


@dataclass(frozen=True)
class Plan:
    """The noise that a method draws for a budget.

    Args:
        noise_multipliers: σ of each pass's sum, in order.
        steps: For how many updates it holds; None for any number.
        rule: The clip rule with what it takes from the budget (the noise of its own queries, L);
            None for the rule as it is.
        sample_rate: Another q than DP-SGD's; None for the same.
    """

    noise_multipliers: tuple[NoiseSchedule, ...]
    steps: int | None = None
    rule: ClipRule | None = None
    sample_rate: float | None = None

    def check(self, name: str, steps: int | None) -> None:
        """Nothing is trained with noise that can't be accounted."""
        for schedule in self.noise_multipliers:
            for step in range(steps or 1) if callable(schedule) else (0,):
                value = at(schedule, step)
                if not (math.isfinite(value) and value >= 0):
                    raise ValueError(
                        f"method {name!r} would draw noise with multiplier {value} at step {step}"
                    )

    def events(
        self, passes: Sequence[Pass], beside: float | None, rate: float, start: int, stop: int
    ) -> list[Event]:
        """What updates from ``start`` to ``stop`` will release.

        A query of the clip rule itself counts with the sum that it stands beside. Passes over the
        same records count as one.

        Args:
            passes: The private gradients of one update.
            beside: The multiplier of the rule's own query; None for none.
            rate: The sampling rate.
            start: The first update.
            stop: The update after the last one.
        """
        counts: Counter[float] = Counter()
        moving = any(callable(schedule) for schedule in self.noise_multipliers)
        for step in range(start, stop) if moving else range(start, min(start + 1, stop)):
            batches: list[float] = []  # 1/s² of each batch
            for part, schedule in zip(passes, self.noise_multipliers, strict=True):
                cost = sum(
                    math.inf if s == 0 else s**-2
                    for s in (at(schedule, step), beside)
                    if s is not None
                )
                if part.batch == "fresh":
                    batches.append(cost)
                else:
                    batches[-1] += cost
            counts.update(0.0 if cost == math.inf else cost**-0.5 for cost in batches)
        each = 1 if moving else stop - start
        return [Event(rate, multiplier, each * count) for multiplier, count in counts.items()]


def same_for_all(budget: NoiseBudget) -> Plan:
    """One pass a step at the budget's own multiplier."""
    return Plan((budget.noise_multiplier,))
