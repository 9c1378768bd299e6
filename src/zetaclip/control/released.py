"""Controllers that read what a pass released beside the gradient.

That is the private count, or how much shorter than C the gradients are.

They look at no record and at no weight. The count costs a share of the budget
(``plans.beside_count``), the slack costs nothing (``clipping.Slack``); both stand in the ledger.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from .base import Controller, Released, check_clip, check_inside

# A C without bounds must stay a positive number.
_LARGEST = 1e30


@dataclass(frozen=True)
class MovingClip:
    """C after ``step`` updates, and the share of short gradients that it came from."""

    clip: float
    step: int = 0
    share: float | None = None


@dataclass(frozen=True)
class PacedClip:
    """C, the smoothed clip rate, and the factor on the learning rate that follows it."""

    clip: float
    rate: float = 1.0
    clip_rate: float = 0.0
    step: int = 0


class _ReadsReleases(Controller):
    """A controller whose reading is what the last pass released beside the gradient.

    ``probe`` is None; ``needs`` is the name of the released value.
    """

    needs: ClassVar[str | None] = "count"
    reads_gradient: ClassVar[bool] = False

    def entry(self, state: Any) -> tuple[Any, ...] | None:
        """(step, C): C from that many updates on."""
        return (state.step, state.clip)


def _bounded(clip: float, bounds: tuple[float, float]) -> float:
    return min(max(clip, bounds[0], 1 / _LARGEST), bounds[1], _LARGEST)


def _moved(clip: float, by: float, bounds: tuple[float, float]) -> float:
    """C times e^by. exp(0) is 1 to the last bit, so a gain of 0 holds C exactly."""
    return _bounded(clip * math.exp(min(max(by, -50.0), 50.0)), bounds)


def check_bounds(bounds: Any) -> tuple[float, float]:
    """(lowest, highest) C; the highest may be infinite, the lowest 0."""
    low, high = (float(bound) for bound in bounds)
    if not (0 <= low <= high and high > 0 and low < math.inf):
        raise ValueError(f"bounds must be (lowest C, highest C), not {tuple(bounds)}")
    return low, high


def _share(released: Released) -> float:
    """The private share of gradients below the threshold, cut to [0, 1].

    The noise may take it out of that range.
    """
    return min(1.0, max(0.0, 0.5 + float(released.extras["count"][0])))


@dataclass(frozen=True)
class Quantile(_ReadsReleases):
    """C follows the norm below which a ``target`` share of the gradients lies.

    C <- C exp(-gain (share - target)).

    Args:
        initial: The first C.
        target: The share of gradients that shall be shorter than C.
        gain: How fast C moves.
        bounds: The smallest and the largest C.
    """

    initial: float = 0.1
    target: float = 0.5
    gain: float = 0.2
    bounds: tuple[float, float] = (1e-3, 1e3)

    def __post_init__(self) -> None:
        check_clip(self.initial)
        object.__setattr__(self, "bounds", check_bounds(self.bounds))
        check_inside("target", self.target, 0 < self.target < 1, "between 0 and 1")
        check_inside("gain", self.gain, 0 <= self.gain < math.inf, "at least 0")

    def init(self) -> MovingClip:
        """The initial C, within the bounds."""
        return MovingClip(_bounded(self.initial, self.bounds))

    def update(self, released: Released, state: MovingClip) -> MovingClip:
        """One step of C by the private count."""
        share = _share(released)
        clip = _moved(state.clip, -self.gain * (share - self.target), self.bounds)
        return MovingClip(clip, released.step + 1, share)


@dataclass(frozen=True)
class Paced(_ReadsReleases):
    """As ``Quantile`` with the target 1 - ``clip_rate``; the learning rate follows the same share.

    Args:
        initial: The first C.
        clip_rate: The share of gradients that shall be clipped.
        gain: How fast C moves.
        bounds: The smallest and the largest C.
        band: How far from ``clip_rate`` the share must be before the learning rate moves.
        up: Factor on the rate while few gradients are clipped.
        down: Factor on the rate while many are.
        rate_bounds: The smallest and the largest factor on the rate in all.
        smoothing: Decay of the average of the share.
    """

    initial: float = 3.0
    clip_rate: float = 0.2
    gain: float = 0.2
    bounds: tuple[float, float] = (0.1, 10.0)
    band: float = 0.1
    up: float = 1.01
    down: float = 0.995
    rate_bounds: tuple[float, float] = (0.1, 2.0)
    smoothing: float = 0.9

    def __post_init__(self) -> None:
        check_clip(self.initial)
        object.__setattr__(self, "bounds", check_bounds(self.bounds))
        object.__setattr__(self, "rate_bounds", check_bounds(self.rate_bounds))
        check_inside("clip_rate", self.clip_rate, 0 < self.clip_rate < 1, "between 0 and 1")
        check_inside("gain", self.gain, 0 <= self.gain < math.inf, "at least 0")
        check_inside("band", self.band, 0 <= self.band < math.inf, "at least 0")
        check_inside("up", self.up, 1 <= self.up < math.inf, "at least 1")
        check_inside("down", self.down, 0 < self.down <= 1, "above 0 and at most 1")
        check_inside("smoothing", self.smoothing, 0 <= self.smoothing < 1, "at least 0 and below 1")

    def init(self) -> PacedClip:
        """The initial C, within the bounds."""
        return PacedClip(_bounded(self.initial, self.bounds), clip_rate=self.clip_rate)

    def update(self, released: Released, state: PacedClip) -> PacedClip:
        """One step of C and of the learning rate by the private count."""
        share = _share(released)
        smoothed = self.smoothing * state.clip_rate + (1 - self.smoothing) * (1 - share)
        clip = _moved(state.clip, -self.gain * (share - (1 - self.clip_rate)), self.bounds)
        rate = state.rate
        if smoothed < self.clip_rate - self.band:
            rate = min(self.rate_bounds[1], self.up * rate)
        elif smoothed > self.clip_rate + self.band:
            rate = max(self.rate_bounds[0], self.down * rate)
        return PacedClip(clip, rate, smoothed, released.step + 1)

    def rate(self, state: Any) -> float:
        """What the engine multiplies the optimizer's learning rates by."""
        return state.rate


@dataclass(frozen=True)
class SlackControl(_ReadsReleases):
    """C from the binned distribution of norms in the slots of ``clipping.Slack``.

    p_j is the share of records whose norm is below the j-th bin. C rises while fewer than the
    target lie below the first.

    Args:
        initial: The first C.
        beta: How far the target falls with the slack in the last bin; 0 keeps it at 1.
        gain: How fast C moves.
        bounds: The smallest and the largest C.
    """

    needs: ClassVar[str | None] = "slack"
    initial: float = 1.0
    beta: float = 0.5
    gain: float = 0.2
    bounds: tuple[float, float] = (0.1, 50.0)

    def __post_init__(self) -> None:
        check_clip(self.initial)
        object.__setattr__(self, "bounds", check_bounds(self.bounds))
        check_inside("beta", self.beta, 0 <= self.beta < math.inf, "at least 0")
        check_inside("gain", self.gain, 0 <= self.gain < math.inf, "at least 0")

    def init(self) -> MovingClip:
        """The initial C, within the bounds."""
        return MovingClip(_bounded(self.initial, self.bounds))

    def update(self, released: Released, state: MovingClip) -> MovingClip:
        """One step of C by the unused norm that was released."""
        slots = released.extras["slack"].tolist()
        width = released.clip / math.sqrt(len(slots))
        first, last = slots[0] / width, slots[-1] / width
        target = min(1.0, max(0.0, 1.0 - self.beta * (1.0 - last / released.clip)))
        clip = _moved(state.clip, self.gain * (target - first), self.bounds)
        return MovingClip(clip, released.step + 1, first)
