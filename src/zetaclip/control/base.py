"""What a controller is: a released signal in, the next clipping norm out.

A controller is a pair of pure functions over a plain, frozen state. The engine owns the state,
reads ``state.clip`` once per logical batch, saves it, and replays it; the controller owns nothing
that moves.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Released:
    """What one private pass has released: safe to read, because it is in the ledger.

    Args:
        step: Updates before this one.
        phase: Which pass of the update.
        clip: C.
        sensitivity: How far one record could move the sum.
        noise_std: Standard deviation of the noise in the sum.
        gradient: The private mean gradient as one flat tensor, before any decoupling.
        extras: By name, the noisy sum of a clip rule's extra columns, divided by the declared batch
            size.
    """

    step: int
    phase: int
    clip: float
    sensitivity: float
    noise_std: float
    gradient: Tensor
    extras: dict[str, Tensor]


@runtime_checkable
class BoundProbe(Protocol):
    """The probe of one run: it knows what to read."""

    def read(self, module: nn.Module, step: int) -> Any | None:
        """A reading after ``step`` updates, or None to hold C."""


@runtime_checkable
class Probe(BoundProbe, Protocol):
    """Reads weights that DP training has already released."""

    def bind(self, module: nn.Module, trained: dict[str, nn.Parameter]) -> BoundProbe:
        """The probe of one run: chooses what to read, once, at ``make_private``.

        Leaves this object as it is, which may be given to several engines. Raises for tensors that
        training does not update.
        """


class Controller(ABC):
    """From released values to the next C. Subclass it: ``init`` and ``update`` are required.

    The state is a frozen dataclass of plain values (numbers, strings, None, tuples and dicts of
    them), so it can be saved, replayed and compared. Its ``clip`` is the next C.

    Attributes:
        probe: what it reads. A ``Probe`` reads the weights; None means that each pass's
            ``Released`` is the reading.
        needs: the query of a clip rule that it reads from ``Released.extras``, if any.
        reads_gradient: False says of a controller without a probe that it leaves
            ``Released.gradient`` alone, which saves a copy.

    **Guarantee.** Nothing but readings of its probe, or releases, is ever handed to it.
    """

    probe: Probe | None = None
    needs: ClassVar[str | None] = None
    reads_gradient: ClassVar[bool] = True

    @abstractmethod
    def init(self) -> Any:
        """The state before the first update."""

    @abstractmethod
    def update(self, reading: Any, state: Any) -> Any:
        """The state after a reading; a pure function of both."""

    def entry(self, state: Any) -> tuple[Any, ...] | None:
        """The line that ``optimizer.clip_history`` gets after an update; None for none."""
        return None

    def rate(self, state: Any) -> float:
        """The factor on the optimizer's learning rates."""
        return 1.0

    def finish(self, state: Any) -> dict[str, int]:
        """Counts for the result of a run, asked for at its end."""
        return {}


@dataclass(frozen=True)
class ClipState:
    """The least a controller can remember."""

    clip: float


class _Never:
    """A probe that reads nothing, so that C is held."""

    reads_weights = False

    def bind(self, module: nn.Module, trained: dict[str, nn.Parameter]) -> _Never:
        return self

    def read(self, module: nn.Module, step: int) -> None:
        return None


def bound_probe(
    controller: Controller, module: nn.Module, trained: dict[str, nn.Parameter]
) -> BoundProbe | None:
    """What a controller reads in one run.

    Args:
        controller: may serve other runs, too.
        module: whose weights are read.
        trained: the parameters that may be read, by name.

    Returns:
        The bound probe; None for a controller that reads releases.

    Raises:
        TypeError: if ``bind`` gives no probe back.
    """
    if controller.probe is None:
        return None
    bound = controller.probe.bind(module, trained)
    if not isinstance(bound, BoundProbe):
        raise TypeError(
            f"bind() of the probe {type(controller.probe).__name__} must return a probe with "
            f"read(), not {type(bound).__name__}: one probe may serve several engines, so bind() "
            "must not keep what it chooses in the object itself. Return a copy that holds it "
            "(chosen = copy.copy(self); chosen.name = ...; return chosen), or self if there is "
            "nothing to choose"
        )
    return bound


def check_inside(name: str, value: float, holds: bool, what: str) -> None:
    """Refuses the value of an option that is out of its range.

    Args:
        name: The option.
        value: Its value.
        holds: Whether it can be used.
        what: What it must be, in words.

    Raises:
        ValueError: ``holds`` is false.
    """
    if not holds:
        raise ValueError(f"{name} must be {what}, not {value!r}")


def check_clip(value: float) -> float:
    """``value`` as a float, refused unless it is a positive finite number."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"the clipping norm must be a number, not {type(value).__name__}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(
            f"the clipping norm must be positive and finite, not {value}; for no effective "
            "clipping use a large number such as 1e6 (the noise grows with it)"
        )
    return float(value)


class Constant(Controller):
    """The same C at every step: ordinary DP-SGD."""

    def __init__(self, clip: float) -> None:
        self.clip = check_clip(clip)
        self.probe: Probe | None = _Never()

    def init(self) -> ClipState:
        """The state that holds C."""
        return ClipState(self.clip)

    def update(self, reading: Any, state: ClipState) -> ClipState:
        """The state as it was."""
        return state

    def __repr__(self) -> str:
        return f"Constant({self.clip:g})"
