"""Clip rules of the named methods. ``Flat``, and what a rule must promise, is in ``_base.py``.

**Guarantee.** For every rule and every norm, 0 or huge, factor * norm (with the columns that share
its Gaussian) is at most ``sensitivity(clip)``; every query of a rule's own is bounded by the
sensitivity that it declares. ``tests/test_clipping.py`` tries them all, and the mechanism checks
each batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._base import ClipRule, Extra, flat_factors


@dataclass(frozen=True)
class AutoS(ClipRule):
    """Every gradient becomes nearly a vector of length C: C g / (|g| + γ).

    There is nothing to tune but the step.

    **Edge cases.** norm 0: factor C/γ, which scales nothing.
    """

    gamma: float = 0.01
    name: str = "auto-s"

    def factors(self, norms: Tensor, clip: float, coins: Any) -> Tensor:
        return clip / (norms + self.gamma)

    def sensitivity(self, clip: float) -> float:
        return clip


@dataclass(frozen=True)
class Psac(ClipRule):
    """C g / (n + r / (n + r)): like AUTO-S for long gradients, and no blow-up of the tiny ones.

    **Edge cases.** norm 0: factor C exactly.
    """

    r: float = 0.1
    name: str = "dp-psac"

    def factors(self, norms: Tensor, clip: float, coins: Any) -> Tensor:
        return clip / (norms + self.r / (norms + self.r))

    def sensitivity(self, clip: float) -> float:
        return clip


@dataclass(frozen=True)
class Thinned(ClipRule):
    """A record joins with probability min(1, norm / C) and then adds C times its direction.

    **Guarantee.** A record that joins moves the sum by C. No record joins with a higher probability
    than the rate at which candidates are drawn, and that rate is accounted.
    **Edge cases.** norm 0 never joins. The coins are drawn one per candidate in order, so chunks
    don't matter.
    """

    name: str = "thinned"

    def factors(self, norms: Tensor, clip: float, coins: Any) -> Tensor:
        joins = coins(len(norms)).to(norms.device) < norms.clamp_max(clip) / clip
        # Below the floor the quotient would not be finite; such a record is shorter than C, never
        # longer.
        return torch.where(joins, clip / norms.clamp_min(1e-150), torch.zeros_like(norms))

    def sensitivity(self, clip: float) -> float:
        return clip


@dataclass(frozen=True)
class Counted(ClipRule):
    """Ordinary clipping that also counts the gradients shorter than τC.

    The count is a query of its own. Each record adds +1/2 or -1/2, so its sensitivity is 1/2;
    counting 0 and 1 would make it 1.

    Args:
        tau: Gradients shorter than ``tau`` times C are counted.
        normalised: Divide the sum by C, so that its sensitivity is 1 and C moves no step size.
        noise_multiplier: Of the count; the plan of the method gives it.
        name: For messages and the ledger.
    """

    tau: float = 1.0
    normalised: bool = False
    noise_multiplier: float | None = None
    name: str = "counted"

    def factors(self, norms: Tensor, clip: float, coins: Any) -> Tensor:
        if self.normalised:
            return norms.clamp_min(clip).reciprocal()
        return flat_factors(norms, clip)

    def sensitivity(self, clip: float) -> float:
        return 1.0 if self.normalised else clip

    def extras(self, norms: Tensor, clip: float) -> dict[str, Extra]:
        below = halves(norms, self.tau * clip)
        return {"count": Extra(below, sensitivity=0.5, noise_multiplier=self.noise_multiplier)}


@dataclass(frozen=True)
class Slack(ClipRule):
    """Ordinary clipping that also releases how much shorter than C the gradients are.

    Each record's unused norm is written into K more coordinates of the same Gaussian.

    With λ = C / √K the slots are filled one after the other, up to λ each, with √K (C - n). For n
    <= C their squares sum to at most λ Σ e = C (C - n), and n² + C (C - n) <= C²; beyond C they are
    0. So they cost no noise at all.
    """

    slots: int = 10
    name: str = "slack"

    def factors(self, norms: Tensor, clip: float, coins: Any) -> Tensor:
        return flat_factors(norms, clip)

    def sensitivity(self, clip: float) -> float:
        return clip

    def extras(self, norms: Tensor, clip: float) -> dict[str, Extra]:
        return {"slack": Extra(slots(norms, clip, self.slots))}


def halves(norms: Tensor, limit: float) -> Tensor:
    """One column: +1/2 for a norm up to the limit, also to the last bit, and -1/2 beyond it."""
    return torch.copysign(torch.full_like(norms, 0.5), limit - norms).unsqueeze(1)


def slots(norms: Tensor, clip: float, width: int) -> Tensor:
    """So many columns, filled one after the other with √width (C - norm), up to C / √width each."""
    root = math.sqrt(width)
    most = clip / root
    full = [root * clip - slot * most for slot in range(width)]
    starts = torch.tensor(full, dtype=norms.dtype, device=norms.device)
    return torch.sub(starts, norms.unsqueeze(1), alpha=root).clamp_(0.0, most)
