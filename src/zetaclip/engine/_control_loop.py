"""From released values to the next C."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import nn

from ..control import BoundProbe, Controller, Released


class ControlLoop:
    """The controller of a run, with the probe that is bound to its module.

    **Guarantee.** The controller and the observer see releases, or what the probe reads of released
    weights; nothing else is handed to them.
    """

    def __init__(self, controller: Controller, probe: BoundProbe | None) -> None:
        self.controller = controller
        self.probe = probe
        self.steers = type(controller).rate is not Controller.rate  # learning rates, too
        self.observer: Callable[[Any, Any, Any], None] | None = None
        self.seconds = 0.0  # spent on reading and on moving C

    def rate(self, state: Any) -> float:
        """The factor on the learning rates."""
        return float(self.controller.rate(state))

    def layers(self, step: int) -> list[str] | None:
        """The parameters that will be read after so many updates; None for all of them.

        A probe may say more than it has to: ``reads_weights``, ``period``, and ``bound``, which has
        the names of its parameters as values.
        """
        probe: Any = self.probe
        if probe is None or not getattr(probe, "reads_weights", True):
            return []
        if step % getattr(probe, "period", 1):
            return []
        bound = getattr(probe, "bound", None)
        return None if bound is None else list(bound.values())

    def move(
        self, module: nn.Module, released: Released, step: int, state: Any, history: list[tuple]
    ) -> Any:
        """The controller's state after an update; adds its entry to the history."""
        begun = time.perf_counter()
        reading = released if self.probe is None else self.probe.read(module, step)
        if reading is None:
            return state
        moved = self.controller.update(reading, state)
        if self.observer is not None:
            self.observer(reading, state, moved)
        entry = self.controller.entry(moved)
        if entry is not None:
            history.append(entry)
        self.seconds += time.perf_counter() - begun
        return moved
