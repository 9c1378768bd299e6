"""Clip rules: from per-example norms to factors, and the sensitivity that the factors guarantee.

A rule says two things that must agree: by how much each example is scaled, and how far one example
can then move the sum. The mechanism checks the agreement at every step, on the values themselves.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..control import Released


@dataclass(frozen=True)
class Extra:
    """Columns that a rule releases beside the gradient.

    Args:
        columns: A row per example.
        sensitivity: None: the columns are further coordinates of the sum's own Gaussian. An
            example's factor * norm and its columns together stay within the rule's sensitivity. A
            number: they are a query of their own, and each example's columns have at most this
            norm.
        noise_multiplier: For a query of its own: its noise has this many times ``sensitivity`` as
            standard deviation, and is composed with that of the sum.
    """

    columns: Tensor
    sensitivity: float | None = None
    noise_multiplier: float | None = None


@dataclass(frozen=True)
class Affine:
    """A map of each coordinate before the norm, from released values: mask * (g - shift) / scale.

    Each part has one value per coordinate of the flat gradient.

    Args:
        shift: Subtracted from every gradient; None for nothing.
        scale: Divides what is left; None for 1.
        mask: Which coordinates are used; the others are neither summed nor noised. None for all.
    """

    shift: Tensor | None = None
    scale: Tensor | None = None
    mask: Tensor | None = None

    def apply(self, gradients: Tensor) -> Tensor:
        # One new tensor and then in place: with many parameters this is where the time of a mapped
        # step goes.
        mapped = gradients.clone() if self.shift is None else gradients - self.shift
        if self.scale is not None:
            mapped /= self.scale
        if self.mask is not None:
            mapped *= self.mask
        return mapped

    def coefficients(self, numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The map as ``multiplier * gradient - subtracted``, in float64.

        Raises:
            ValueError: A number of it is not finite, for example where a scale is zero.
        """
        # Converted one by one: mixed types and masked_fill_ take a few times as long.
        if self.scale is None:
            multiplier = torch.ones(numel, dtype=torch.float64, device=device)
        else:
            multiplier = self.scale.double().reciprocal()
        if self.mask is not None:
            multiplier *= self.mask.double()
        if self.shift is None:
            subtracted = torch.zeros_like(multiplier)
        else:
            subtracted = multiplier * self.shift.double()
        if not math.isfinite(float(multiplier.sum() + subtracted.sum())):
            raise ValueError(
                "the map of a clip rule must be finite, and its scale not zero, in all coordinates"
            )
        return multiplier, subtracted

    def undo(self, mean: Tensor) -> Tensor:
        """The private mean of the mapped gradients, mapped back.

        A function of released values only.
        """
        if self.scale is not None:
            mean = mean * self.scale
        if self.shift is not None:
            mean = mean + self.shift
        if self.mask is not None:
            mean = mean * self.mask
        return mean


class ClipRule(ABC):
    """How long each record's gradient may be.

    A subclass must have ``factors`` and ``sensitivity``. The other methods do nothing by default:
    they release further columns (``extras``), keep a state of released values (``init``,
    ``update``), or map gradients before the norm (``transform``).

    **Guarantee.** The mechanism checks at every step that ``factor * norm <= sensitivity``, and
    stops before anything is released if a rule breaks it.
    """

    name: str

    @abstractmethod
    def factors(self, norms: Tensor, clip: float, coins: Any) -> Tensor:
        """One float64 factor per norm.

        Args:
            norms: of the records' gradients, float64.
            clip: C.
            coins: ``coins(count)`` gives secret float64 uniforms in [0, 1). The same ones come
                however the batch is split into chunks, if one is asked for per record, in order.
        """

    @abstractmethod
    def sensitivity(self, clip: float) -> float:
        """S such that ``factor * norm <= S`` for every norm, also 0 and very large ones.

        Noise is scaled by 2^-9 more, for rounding and arithmetic.
        """

    def extras(self, norms: Tensor, clip: float) -> dict[str, Extra]:
        """What is released beside the gradient; see ``Extra``.

        Called with no norms, it must still say which columns there are.
        """
        return {}

    def init(self, numel: int) -> Any:
        """The state before the first release, for ``numel`` trained numbers.

        A dict of plain values and tensors.
        """
        return None

    def update(self, released: Released, state: Any) -> Any:
        """The state after a release; a function of released values only."""
        return state

    def transform(self, state: Any) -> Affine | None:
        """A map of each gradient before its norm is taken; None for none."""
        return None

    @property
    def remembers(self) -> bool:
        """Whether it keeps a state from one release to the next."""
        return type(self).update is not ClipRule.update or type(self).init is not ClipRule.init

    @property
    def counts(self) -> bool:
        """Whether it releases anything beside the gradient."""
        return type(self).extras is not ClipRule.extras

    @property
    def maps(self) -> bool:
        """Whether it maps gradients before their norm."""
        return type(self).transform is not ClipRule.transform


@dataclass(frozen=True)
class Flat(ClipRule):
    """Scale an example's whole gradient down to norm C where it is longer: ordinary DP-SGD.

    **Guarantee.** factor * norm <= C for every norm; the identity for norm <= C.
    **Edge cases.** norm 0: factor 1. A norm that is not finite never arrives: such an example
    counts as zero.
    """

    name: str = "flat"

    def factors(self, norms: Tensor, clip: float, coins: Any) -> Tensor:
        return flat_factors(norms, clip)

    def sensitivity(self, clip: float) -> float:
        return clip


def checked_factors(
    rule: ClipRule, norms: Tensor, clip: float, coins: Any, joint: Tensor | None, bound: float
) -> Tensor:
    """The factors of a rule, after the check that they keep its word.

    Args:
        rule: The rule.
        norms: Of the records' gradients.
        clip: C.
        coins: As of ``ClipRule.factors``.
        joint: Columns that share the Gaussian of the sum, one row per record; None for none.
        bound: What the rule declared as its sensitivity.

    Raises:
        RuntimeError: An example could move the sum by more than the bound.
    """
    factors = rule.factors(norms, clip, coins)
    check_factors(norms, factors, joint, bound, rule.name)
    return factors


def check_factors(
    norms: Tensor, factors: Tensor, joint: Tensor | None, sensitivity: float, rule: str
) -> None:
    """Raises if an example could move the sum by more than the rule says."""
    _check_farthest(farthest(norms, factors, joint), sensitivity, rule)


def check_columns(columns: Tensor, sensitivity: float, rule: str) -> None:
    """Raises if an example could move a query of the rule's own by more than it says."""
    _check_farthest(longest(columns), sensitivity, rule)


def _check_farthest(farthest: float, sensitivity: float, rule: str) -> None:
    # Written so that nan is refused too. The message names no number: they are private.
    if not farthest <= sensitivity * (1 + 1e-6):
        raise RuntimeError(
            f"the clip rule {rule!r} scaled an example beyond the sensitivity {sensitivity:.6g} "
            "that it declares; nothing was released. This is a bug in the rule"
        )


def flat_factors(norms: Tensor, clip: float) -> Tensor:
    """clip / max(norm, clip) for every norm."""
    # Not clip / norms: torch makes that a product with the reciprocal, which is not 1 at norm = C.
    return torch.full_like(norms, clip).div_(norms.clamp_min(clip))


def farthest(norms: Tensor, factors: Tensor, columns: Tensor | None = None) -> float:
    """The largest length of norm * factor together with a row's columns; nan if there is one."""
    moved = (factors * norms).abs_()
    if columns is not None:
        moved = torch.hypot(moved, torch.linalg.vector_norm(columns, dim=1))
    return moved.amax().item() if norms.shape[0] else 0.0


def longest(columns: Tensor) -> float:
    """The largest length of a row; nan if there is one."""
    return torch.linalg.vector_norm(columns, dim=1).amax().item() if columns.shape[0] else 0.0
