"""Rules that clip in coordinates scaled by what was released before.

AdaCLiP, and AdaDPIGU, which also leaves coordinates out.

A record's gradient g becomes w = (g - a) / b, is clipped at C, summed and noised; b S / L + a is
the private gradient. a follows its mean, b its spread over records, both worked out from private
gradients alone. All is in units of C: b = 1 everywhere is DP-SGD.

b_j = sqrt(s_j Σ_k s_k) / C gives the least total noise among scales with E|w|² <= C², where s_j is
the standard deviation of coordinate j across records. A private gradient G shows s_j² / L, and
noise; hence

    var_j <- β₂ var_j + (1 - β₂) clamp(L (G - a)_j² - noise_j² L, low, high)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..control import Released
from ._base import Affine, ClipRule, Flat

# A scale below this would divide by nearly nothing.
SMALLEST_SCALE = 1e-8


@dataclass(frozen=True)
class Moments:
    """How the mean and the spread of each coordinate follow the releases.

    Args:
        beta1: Decay of the mean.
        beta2: Decay of the variance.
        low: Smallest variance that is read off a release.
        high: Largest variance that is read off a release.
        cap: Keep the sum of the variances at most C². Without it, a spread far below the noise
            (ordinary for many parameters and small batches) is estimated as noise, which makes the
            next noise larger.
    """

    beta1: float = 0.99
    beta2: float = 0.9
    low: float = 1e-12
    high: float = 10.0
    cap: bool = True

    def start(self, like: Tensor, kept: int) -> dict[str, Tensor]:
        """No shift, and s = C / √kept everywhere: b = 1."""
        return {
            "mean": torch.zeros_like(like),
            "variance": torch.full_like(like, 1.0 / kept),
            "scale": torch.ones_like(like),
        }

    def scale(self, variance: Tensor, mask: Tensor | None) -> Tensor:
        """b in units of C."""
        spread = variance.sqrt()
        if mask is not None:
            spread = spread * mask
        if self.cap:
            total = float(torch.linalg.vector_norm(spread))
            spread /= max(1.0, total)
        # The root of a zero takes ten times as long as that of another number.
        return spread.mul_(spread.sum()).clamp_min_(SMALLEST_SCALE**2).sqrt_()

    def scale_of(self, state: dict[str, Any], mask: Tensor | None) -> Tensor:
        """b of a state; earlier checkpoints hold the variance alone."""
        kept: Tensor | None = state.get("scale")
        return self.scale(state["variance"], mask) if kept is None else kept

    def update(
        self, released: Released, state: dict[str, Any], batch: float, mask: Tensor | None
    ) -> dict[str, Tensor]:
        clip, gradient = released.clip, released.gradient
        mean = state["mean"]
        # In place where it can be: with many parameters this is a good part of a step.
        noise = self.scale_of(state, mask) * released.noise_std
        seen = (gradient - mean).square_().sub_(noise.square_()).mul_(batch)
        seen.clamp_(self.low, self.high).div_(clip**2)
        variance = (state["variance"] * self.beta2).add_(seen, alpha=1 - self.beta2)
        return {
            "mean": (mean * self.beta1).add_(gradient, alpha=1 - self.beta1),
            "variance": variance,
            "scale": self.scale(variance, mask),
        }


class _Clipped(ClipRule):
    """Ordinary clipping in the mapped coordinates."""

    def factors(self, norms: Tensor, clip: float, coins: Any) -> Tensor:
        return Flat().factors(norms, clip, coins)

    def sensitivity(self, clip: float) -> float:
        return clip


@dataclass(frozen=True)
class Whitened(_Clipped):
    """AdaCLiP: clip where every coordinate has been scaled by its own spread.

    Args:
        moments: How mean and spread follow the releases.
        adapt: False: no map, which is DP-SGD.
        batch: The expected batch size; the plan of the method gives it.
        name: For messages and the ledger.

    **Guarantee.** One record moves the sum of mapped gradients by at most C, whatever a and b are;
    they are functions of releases.
    **Edge cases.** An empty batch releases a plus noise.
    """

    moments: Moments = Moments()
    adapt: bool = True
    batch: float = 0.0
    name: str = "whitened"

    def init(self, numel: int) -> dict[str, Any]:
        return {}

    def update(self, released: Released, state: dict[str, Any]) -> dict[str, Any]:
        if not self.adapt:
            return state
        return self.moments.update(
            released,
            state or self.moments.start(released.gradient, len(released.gradient)),
            self.batch,
            None,
        )

    def transform(self, state: dict[str, Any]) -> Affine | None:
        # Nothing was released yet: a = 0 and b = 1, which needs no map.
        return Affine(state["mean"], self.moments.scale_of(state, None)) if state else None


@dataclass(frozen=True)
class Important(_Clipped):
    """AdaDPIGU: after ``first`` updates only the largest coordinates are trained, whitened.

    The largest are those with the largest summed |G|.

    Args:
        keep: The share of coordinates that is trained after the first stage.
        moments: How mean and spread follow the releases.
        whiten: Scale the kept coordinates by their released spread.
        batch: The expected batch size; the plan of the method gives it.
        first: Updates of the first stage.
        name: For messages and the ledger.

    **Guarantee.** The mask is a function of released gradients. Coordinates outside of it are
    neither summed nor noised, and don't count towards a record's norm.
    **Edge cases.** If noise dominates the releases, the mask is nearly random.
    """

    keep: float = 0.6
    moments: Moments = Moments(beta1=0.9, beta2=0.999, low=1e-6, high=1e6)
    whiten: bool = True
    batch: float = 0.0
    first: int = 1
    name: str = "important"

    def init(self, numel: int) -> dict[str, Any]:
        return {"updates": 0}

    def update(self, released: Released, state: dict[str, Any]) -> dict[str, Any]:
        updates = state["updates"] + 1
        if updates > self.first:
            moments = (
                self.moments.update(released, state, self.batch, state["mask"])
                if self.whiten
                else {}
            )
            return {**state, **moments, "updates": updates}
        importance = released.gradient.abs()
        if "importance" in state:
            importance += state["importance"]
        if updates < self.first:
            return {"updates": updates, "importance": importance}
        numel = len(importance)
        kept = max(1, round(self.keep * numel))
        mask = torch.zeros_like(importance, dtype=torch.bool)
        mask[importance.topk(kept).indices] = True
        return {
            "updates": updates,
            "mask": mask,
            **(self.moments.start(importance, kept) if self.whiten else {}),
        }

    def transform(self, state: dict[str, Any]) -> Affine | None:
        if "mask" not in state or (self.keep == 1 and not self.whiten):
            return None
        if not self.whiten:
            return Affine(mask=state["mask"])
        mask = state["mask"]
        return Affine(state["mean"], self.moments.scale_of(state, mask), mask)
