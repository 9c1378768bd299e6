"""What a controller is: a released signal in, the next clipping norm out.

A controller is a pair of pure functions over a plain, frozen state. The engine owns the state, reads
``state.clip`` once per logical batch, saves it, and replays it; the controller owns nothing that moves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Released:
    """All that one private pass let out: safe to read, because it stands in the ledger.

    ``gradient`` is the private mean gradient as one flat float tensor, before any decoupling; ``extras``
    holds, per name, the noisy sum of a clip rule's extra columns divided by the declared batch size.
    """

    step: int
    phase: int
    clip: float
    sensitivity: float
    noise_std: float
    gradient: Tensor
    extras: dict[str, Tensor]


class Probe(Protocol):
    """Reads weights that DP training has already released."""

    def bind(self, module: nn.Module, trained: dict[str, nn.Parameter]) -> Probe:
        """The probe of one run: chooses what to read, once, at ``make_private``.

        Leaves this object as it is, which may be given to several engines. Raises for tensors that training does not update.
        """

    def read(self, module: nn.Module, step: int) -> Any | None:
        """A reading after ``step`` updates, or None to hold C."""


@runtime_checkable
class Controller(Protocol):
    """``init() -> state`` and ``update(reading, state) -> state``; ``state.clip`` is the next C.

    The state is a frozen dataclass of plain values (numbers, strings, None, tuples and dicts of them), so
    it can be saved, replayed and compared. ``probe`` says what the controller reads: a ``Probe`` reads the
    weights, ``None`` means that each pass's ``Released`` is the reading. Nothing else is ever handed over.
    ``entry(state)`` is the line that ``optimizer.clip_history`` gets after an update, or None. Two more are optional:
    ``needs`` names the query that it reads of a clip rule, and ``reads_gradient = False`` says of one without a probe that it leaves
    ``Released.gradient`` alone, which saves a copy of it.
    """

    probe: Probe | None

    def init(self) -> Any: ...

    def update(self, reading: Any, state: Any) -> Any: ...

    def entry(self, state: Any) -> tuple[Any, ...] | None: ...


@dataclass(frozen=True)
class ClipState:
    """The least a controller can remember."""

    clip: float


class _Never:
    """A probe that reads nothing, so that C is held."""

    def bind(self, module: nn.Module, trained: dict[str, nn.Parameter]) -> _Never:
        return self

    def read(self, module: nn.Module, step: int) -> None:
        return None


def bound_probe(
    controller: Controller, module: nn.Module, trained: dict[str, nn.Parameter]
) -> Probe | None:
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
    if not hasattr(bound, "read"):
        raise TypeError(
            f"bind() of the probe {type(controller.probe).__name__} must return a probe with read(), not "
            f"{type(bound).__name__}: one probe may serve several engines, so bind() must not keep what it chooses in the object itself. "
            "Return a copy that holds it (chosen = copy.copy(self); chosen.name = ...; return chosen), or self if there is nothing to "
            "choose"
        )
    return bound


def check_inside(name: str, value: float, holds: bool, what: str) -> None:
    """Refuses an option whose value ``holds`` says is outside of what it must be."""
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
            f"the clipping norm must be positive and finite, not {value}; for no effective clipping use a large "
            "number such as 1e6 (the noise grows with it)"
        )
    return float(value)


class Constant:
    """The same C at every step: ordinary DP-SGD."""

    def __init__(self, clip: float) -> None:
        self.clip = check_clip(clip)
        self.probe: Probe | None = _Never()

    def init(self) -> ClipState:
        return ClipState(self.clip)

    def update(self, reading: Any, state: ClipState) -> ClipState:
        return state

    def entry(self, state: ClipState) -> None:
        return None

    def __repr__(self) -> str:
        return f"Constant({self.clip:g})"
