"""What a method is.

A method is one frozen composition of clip rule, controller, passes and update.

Nothing here is an engine. The engine runs any composition; a new method is a new value of
``Method``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..clipping import ClipRule, Extra, Flat
from ..control import Constant, Controller, Released
from ._noise_plan import NoiseBudget, Pass, Plan, at, same_for_all
from ._updates import NoiseAware, build, check_family

_PUBLIC = {ClipRule: "zetaclip.ClipRule", Controller: "zetaclip.control.Controller"}


@dataclass(frozen=True)
class Method:
    """Everything that distinguishes a private method, as data.

    Args:
        name: Its name.
        rule: From norms to factors.
        controller: Moves C.
        passes: The private gradients of one update.
        plan: ``plan(budget)`` turns what DP-SGD would draw into what this method draws. One that
            completes the rule has it as its keyword ``rule`` (``functools.partial``), where a
            replacement finds it.
        needs_steps: Whether the multipliers depend on the number of steps.
        remember: ``remember(released)`` keeps released tensors for later perturbations; the
            optimizer and the user get gradients in other memory.
        fixed: What ``clipping=`` may replace only by its own kind: "rule", "controller", or both; a
            mapping also gives the reasons.
        family: The update that ``optimizer`` builds.
        any_update: Whether other families are accepted.
        clip_by_update: The largest C that is taken from the optimizer's ``clip_norm``; None takes
            none.
        update: Options of the update.
        private: Whether it is private.
        unsound: Why nothing is claimed, if nothing is.
        lr: The default rate for a decoupled step.
        paper_lr: The rate of the published, coupled form; None if the literature gives none.
        weight_average: Decay of the averaged weights that the method evaluates; None for none.
        summary: What it is, in one sentence.
        reads: What it reads.
        queries: What it releases.
        noise: How much noise.
        source: Where it was published.
        options: (default, meaning) of each option.
        chosen: The value of each option.
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
        """Noise multipliers of each query under this budget, at the first and the last step."""
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
        """The multiplier of all queries of the rule itself, taken together; None if it has none."""
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
        """Refuses a rule with a query of its own that the plan does not know of.

        Such a query would cost more than the budget.
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
