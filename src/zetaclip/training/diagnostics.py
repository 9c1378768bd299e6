"""Values that ε does not cover, for users who asked for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..clipping import ClipRule

if TYPE_CHECKING:
    from ..methods import Method, NoiseBudget, Plan


class Diagnostics:
    """Values that ε does not cover, collected only if the user asked for them."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.sizes: list[int] = []
        self.clipped: list[float] = []

    def flush(self) -> dict[str, Any]:
        """Returns what was collected, and starts again."""
        taken = {
            "batch_losses": self.losses,
            "batch_sizes": self.sizes,
            "clip_fractions": self.clipped,
        }
        self.__init__()  # type: ignore[misc]
        return taken


class _NotingRule(ClipRule):
    """A clip rule that also notes which share of a chunk it clipped."""

    def __init__(self, rule: ClipRule, notes: Diagnostics) -> None:
        self._rule, self._notes = rule, notes
        self.name = rule.name
        self.extras, self.transform = rule.extras, rule.transform  # type: ignore[method-assign]
        self.init, self.update = rule.init, rule.update  # type: ignore[method-assign]

    @property
    def counts(self) -> bool:
        return self._rule.counts

    @property
    def remembers(self) -> bool:
        return self._rule.remembers

    @property
    def maps(self) -> bool:
        return self._rule.maps

    def __repr__(self) -> str:
        return repr(self._rule)

    def factors(self, norms: Tensor, clip: float, generator: Any) -> Tensor:
        """The factors of the wrapped rule.

        Args:
            norms: The norm of each record's gradient.
            clip: The clipping norm.
            generator: For rules that need randomness.
        """
        factors = self._rule.factors(norms, clip, generator)
        if len(norms):
            self._notes.clipped.append(float((norms > clip).double().mean()))
        return factors

    def sensitivity(self, clip: float) -> float:
        """The sensitivity of the wrapped rule."""
        return self._rule.sensitivity(clip)


def noting(method: Method, notes: Diagnostics) -> Method:
    """The method with a rule that takes notes, also if its plan has another rule."""

    def plan(budget: NoiseBudget) -> Plan:
        found = method.plan(budget)
        return found if found.rule is None else replace(found, rule=_NotingRule(found.rule, notes))

    return replace(method, rule=_NotingRule(method.rule, notes), plan=plan)
