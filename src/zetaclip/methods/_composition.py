"""What a method is, and how a budget becomes noise.

A method is one frozen composition of clip rule, controller, passes and update.

Nothing here is an engine. The engine runs any composition; a new method is a new value of
``Method``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..clipping import ClipRule, Extra, Flat
from ..control import Constant, Controller, Released
from ..ledger import Event
from ._updates import NoiseAware, build, check_family

# σ at each update, public: a number, or a function of the number of updates done.
NoiseSchedule = float | Callable[[int], float]


_PUBLIC = {ClipRule: "zetaclip.ClipRule", Controller: "zetaclip.control.Controller"}


def at(schedule: NoiseSchedule, step: int) -> float:
    """The value of a schedule at a step."""
    return float(schedule(step) if callable(schedule) else schedule)


@dataclass(frozen=True)
class Pass:
    """One private gradient of an update.

    ``batch`` says where its records come from: "fresh" (a Poisson batch of its own) or "same" (the
    records of the pass before). ``perturb(releases, memory)`` gives a flat vector and how far to go
    along it with the weights while the batch is out, or None; it sees this update's releases so far
    and what ``Method.remember`` kept.
    """

    name: str = "descent"
    batch: str = "fresh"
    perturb: (
        Callable[[Sequence[Released], dict[str, Tensor]], tuple[Tensor, float] | None] | None
    ) = None


@dataclass(frozen=True)
class NoiseBudget:
    """What a method may spend, in DP-SGD's currency: T steps of (q, z).

    ``expected_batch_size`` is L; ``steps`` and ``delta`` are None where the user did not say.
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
    """What a budget comes to: the noise multiplier of each pass's sum, in order.

    ``steps`` is how many updates it holds for (None: any). ``rule`` is the clip rule with what it
    takes from the budget (the noise of its own queries, L), and ``sample_rate`` another q than
    DP-SGD's; None leaves them as they are.
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

        A rule's own query, of multiplier ``beside``, counts with the sum that it stands beside;
        passes over the same records count as one.
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


@dataclass(frozen=True)
class Method:
    """Everything that distinguishes a private method, as data.

    The composition: ``plan(budget)`` turns what DP-SGD would draw into what this method draws; one
    whose multipliers depend on the number of steps sets ``needs_steps``. ``remember(released)``
    keeps released tensors for later perturbations; the optimizer and the user get gradients in
    other memory than those. ``fixed`` names what ``clipping=`` may replace only by its own kind:
    "rule", "controller", or both, with the reason where it is a mapping. A plan that completes the
    rule has it as its keyword ``rule`` (``functools.partial``), where a replacement finds it.
    ``family`` is the update that ``optimizer`` builds, with ``update`` as its options; other
    families are refused unless ``any_update``. ``clip_by_update`` takes C from the optimizer's
    ``clip_norm``, up to this number. ``unsound`` says why nothing is claimed, if nothing is.

    The description: ``lr`` is the default rate for a decoupled step, ``paper_lr`` the one for the
    published, coupled form (None: the literature gives none). ``options`` maps each option to
    (default, meaning), ``chosen`` to its value. ``weight_average`` is the decay of the averaged
    weights that the method evaluates, if it does.
    """

    name: str = "dp-sgd"
    rule: ClipRule = field(default_factory=Flat)
    controller: Controller = field(default_factory=lambda: Constant(1.0))
    passes: tuple[Pass, ...] = (Pass(),)
    plan: Callable[[NoiseBudget], Plan] = same_for_all
    needs_steps: bool = False
    remember: Callable[[Released], dict[str, Tensor]] | None = None
    fixed: Collection[str] = frozenset()
    family: str = "sgd"
    any_update: bool = True
    clip_by_update: float | None = None
    update: Mapping[str, Any] = field(default_factory=dict)
    private: bool = True
    unsound: str = ""
    lr: float = 1.0
    paper_lr: float | None = None
    weight_average: float | None = None
    summary: str = ""
    reads: str = ""
    queries: str = ""
    noise: str = ""
    source: str = ""
    options: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    chosen: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.passes or self.passes[0].batch != "fresh":
            raise ValueError(f"method {self.name!r}: its first pass must draw a fresh batch")
        for part in self.passes:
            if part.batch not in ("fresh", "same"):
                raise ValueError(
                    f"method {self.name!r}: a pass's batch is 'fresh' or 'same', not {part.batch!r}"
                )
        for value, kind in ((self.rule, ClipRule), (self.controller, Controller)):
            if not isinstance(value, kind):
                raise TypeError(
                    f"method {self.name!r}: {type(value).__name__} must subclass {_PUBLIC[kind]}"
                )

    def optimizer(
        self, params: Iterable[Any], lr: float | None = None, **options: Any
    ) -> Optimizer:
        """The method's own optimizer.

        ``options`` are those of its family (momentum, betas, weight_decay ...).
        """
        return build(self.family, params, self.lr if lr is None else lr, {**self.update, **options})

    def for_update(self, optimizer: Optimizer) -> Method:
        """This method with an optimizer, which is refused if this method is not it."""
        if not self.any_update:
            check_family(self.name, self.family, optimizer)
        if isinstance(optimizer, NoiseAware) and self.rule.maps:
            raise ValueError(
                f"{type(optimizer).__name__} subtracts one noise variance from every coordinate, "
                f"but method {self.name!r} gives each coordinate its own; use SGD, Adam or AdamW"
            )
        if self.clip_by_update is None:
            return self
        own = optimizer.clip_norm  # type: ignore[attr-defined]
        return replace(self, controller=Constant(min(own, self.clip_by_update)))

    def planned(self, budget: NoiseBudget) -> tuple[Method, Plan]:
        """The plan for a budget, and this method with the rule that the plan brings."""
        if self.needs_steps and (budget.steps is None or budget.delta is None):
            raise ValueError(
                f"the noise of method {self.name!r} depends on the number of steps: give epochs= "
                "and target_delta= too"
            )
        self._check_signal()
        plan = self.plan(budget)
        if len(plan.noise_multipliers) != len(self.passes):
            raise ValueError(
                f"method {self.name!r} plans noise for {len(plan.noise_multipliers)} passes, not "
                f"{len(self.passes)}"
            )
        plan.check(self.name, budget.steps)
        completed = self if plan.rule is None else replace(self, rule=plan.rule)
        completed._check_noise()
        return completed, plan

    def multipliers(self, budget: NoiseBudget) -> dict[str, tuple[float, float]]:
        """What each query would be noised with under this budget.

        query -> multipliers at the first and last step.
        """
        method, plan = self.planned(budget)
        last = max(0, (budget.steps or 1) - 1)
        found = {}
        for part, schedule in zip(method.passes, plan.noise_multipliers, strict=True):
            query = "sum" if len(method.passes) == 1 else f"{part.name} sum"
            found[query] = (at(schedule, 0), at(schedule, last))
            for name, extra in method._extras().items():
                if extra.noise_multiplier is not None:
                    found[f"{query}: {name}"] = (extra.noise_multiplier, extra.noise_multiplier)
        return found

    def _extras(self) -> dict[str, Extra]:
        """What the rule releases beside the sum, as an empty batch has it."""
        nothing = torch.zeros(0, dtype=torch.float64)
        return self.rule.extras(nothing, float(self.controller.init().clip))

    def beside(self) -> float | None:
        """The multiplier of all own queries of the rule together.

        They stand beside each sum; None if the rule has none.
        """
        own = [
            e.noise_multiplier or 0.0 for e in self._extras().values() if e.sensitivity is not None
        ]
        if not own:
            return None
        return 0.0 if 0.0 in own else sum(s**-2 for s in own) ** -0.5

    @property
    def _plan_completes_rule(self) -> bool:
        return isinstance(self.plan, partial) and "rule" in self.plan.keywords

    def _check_signal(self) -> None:
        """The controller reads nothing that the rule does not release."""
        needed = self.controller.needs
        if needed is not None and needed not in self._extras():
            raise ValueError(
                f"the controller {type(self.controller).__name__} reads the query {needed!r}, "
                f"which the clip rule {self.rule.name!r} of method {self.name!r} does not release: "
                "use one of the methods that bring both (quantile, dp-adam-ac, slaclip), with "
                "this controller as clipping="
            )

    def _check_noise(self) -> None:
        """The rule knows the noise of every query of its own."""
        for name, extra in self._extras().items():
            if extra.sensitivity is not None and extra.noise_multiplier is None:
                raise ValueError(
                    f"the clip rule {self.rule.name!r} releases {name!r} beside the sum and has no "
                    "noise_multiplier for it: give it one, or use a method that plans it, such as "
                    "quantile"
                )

    def check_budgeted(self, budget: NoiseBudget) -> None:
        """Refuses a rule whose own query would come on top of the budget.

        It would if the plan does not know of it.
        """
        own = [name for name, extra in self._extras().items() if extra.sensitivity is not None]
        if own and self.planned(budget)[1].rule is None:
            raise ValueError(
                f"the clip rule {self.rule.name!r} releases {own[0]!r} beside the sum, and the "
                f"noise of method {self.name!r} is chosen for the sum alone: the target ε would be "
                "exceeded. Use a method that plans both, such as quantile, or make_private with a "
                "noise_multiplier; the ledger counts both"
            )

    def with_clipping(self, clipping: Any) -> Method:
        """This method with another clipping norm, controller or clip rule."""
        if clipping is None:
            return self
        if isinstance(clipping, Controller):
            return self._replaced("controller", clipping)
        if isinstance(clipping, ClipRule):
            return self._replaced("rule", clipping)
        if isinstance(clipping, (int, float)) and not isinstance(clipping, bool):
            return self._replaced("controller", Constant(clipping))
        raise TypeError(
            "clipping= takes a number, a controller or a clip rule, not "
            f"{type(clipping).__name__}: a rule of your own must subclass {_PUBLIC[ClipRule]}, a "
            f"controller {_PUBLIC[Controller]}; a whole method goes into method="
        )

    def _replaced(self, part: str, value: Any) -> Method:
        own = self.rule if part == "rule" else self.controller
        if part in self.fixed and type(value) is not type(own):
            reason = f": {self.fixed[part]}" if isinstance(self.fixed, Mapping) else ""
            start = (
                "; its starting norm is the method's option clip="
                if isinstance(value, Constant) and "clip" in self.options
                else ""
            )
            raise ValueError(
                f"method {self.name!r} brings its own clip {part}, which clipping= can't "
                f"replace{reason}{start}"
            )
        changes: dict[str, Any] = {part: value}
        if part == "controller":
            changes["clip_by_update"] = None
        if part == "rule" and self._plan_completes_rule:
            completing: Any = self.plan
            changes["plan"] = partial(completing, rule=value)
        return replace(self, **changes)
