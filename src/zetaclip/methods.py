"""A method is one frozen composition: clip rule, controller, passes, and how a budget becomes noise.

Nothing here is an engine. The engine runs any composition; a new method is a new value of ``Method``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from .clipping import ClipRule, Flat
from .control import Constant, Controller, Released

# σ at each update, public: a number, or a function of the number of updates done.
Schedule = float | Callable[[int], float]


def at(schedule: Schedule, step: int) -> float:
    """The value of a schedule at a step."""
    return float(schedule(step) if callable(schedule) else schedule)


@dataclass(frozen=True)
class Pass:
    """One private gradient of an update.

    ``batch`` says where its records come from: "fresh" (a Poisson batch of its own) or "same" (the records of the
    pass before). ``perturb(releases, memory)`` gives a flat direction that is added to the weights while the batch is
    out, or None; it sees this update's releases so far and what ``Method.remember`` kept.
    """

    name: str = "descent"
    batch: str = "fresh"
    perturb: Callable[[Sequence[Released], dict[str, Tensor]], Tensor | None] | None = None


@dataclass(frozen=True)
class Budget:
    """What a method may spend, in DP-SGD's currency: T steps of (q, z)."""

    noise_multiplier: Schedule
    sample_rate: float
    steps: int | None = None
    delta: float | None = None
    accountant: str = "prv"


@dataclass(frozen=True)
class Plan:
    """The noise multiplier of each pass's sum, in order, and how many updates the plan holds for (None: any)."""

    noise_multipliers: tuple[Schedule, ...]
    steps: int | None = None


def same_for_all(budget: Budget) -> Plan:
    """One pass a step at the budget's own multiplier."""
    return Plan((budget.noise_multiplier,))


@dataclass(frozen=True)
class Method:
    """Everything that distinguishes a private method, as data.

    ``plan(budget)`` turns what DP-SGD would draw into what this method draws; one whose multipliers depend on the
    number of steps sets ``needs_steps``. ``remember(released)`` keeps released tensors for later perturbations.
    ``fixed`` names what ``clipping=`` may not replace: "rule", "controller", or both.
    """

    name: str = "dp-sgd"
    rule: ClipRule = field(default_factory=Flat)
    controller: Controller = field(default_factory=lambda: Constant(1.0))
    passes: tuple[Pass, ...] = (Pass(),)
    plan: Callable[[Budget], Plan] = same_for_all
    needs_steps: bool = False
    remember: Callable[[Released], dict[str, Tensor]] | None = None
    fixed: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.passes or self.passes[0].batch != "fresh":
            raise ValueError(f"method {self.name!r}: its first pass must draw a fresh batch")
        for part in self.passes:
            if part.batch not in ("fresh", "same"):
                raise ValueError(f"method {self.name!r}: a pass's batch is 'fresh' or 'same', not {part.batch!r}")

    def with_clipping(self, clipping: Any) -> Method:
        """This method with another clipping norm, controller or clip rule."""
        if clipping is None:
            return self
        if isinstance(clipping, Controller):
            return self._replaced("controller", controller=clipping)
        if isinstance(clipping, ClipRule):
            return self._replaced("rule", rule=clipping)
        if isinstance(clipping, (int, float)) and not isinstance(clipping, bool):
            return self._replaced("controller", controller=Constant(clipping))
        raise TypeError(
            f"clipping= takes a number, a controller or a clip rule, not {type(clipping).__name__}; a whole method goes "
            "into method="
        )

    def _replaced(self, part: str, **change: Any) -> Method:
        if part in self.fixed:
            raise ValueError(f"method {self.name!r} brings its own clip {part}, which clipping= can't replace")
        return replace(self, **change)
