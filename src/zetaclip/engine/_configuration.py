"""What two processes, or a run and its replay, must have in common."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.optim import Optimizer

from ..gradients import Layout, matmul, products, rows
from ..methods import Method, Plan
from ..randomness import noise_source
from ._settings import Settings


def configuration(
    settings: Settings, method: Method, plan: Plan, optimizer: Optimizer, layout: Layout
) -> dict[str, Any]:
    """What must be equal for an exact replay, as plain values.

    Schedules are compared by their values.
    """
    horizon = plan.steps or 1000
    multipliers = [
        float(m) if not callable(m) else [float(m(step)) for step in range(horizon)]
        for m in plan.noise_multipliers
    ]
    return {
        "settings": dataclasses.asdict(settings),
        "method": method.name,
        "options": {name: repr(value) for name, value in method.chosen.items()},
        "rule": repr(method.rule),
        "controller": described(method.controller),
        "optimizer": type(optimizer).__name__,
        "noise_multipliers": multipliers,
        "parameters": list(layout.names),
        "noise_source": noise_source() + ("" if layout.shards is None else ", for each shard"),
        "rows_source": rows.source(),
        "products_source": f"{products.source()}, {matmul.source()}",
    }


def described(controller: Any) -> str:
    """A controller in words, the same in every process."""
    text = repr(controller)
    # The default repr of an object is its address, which says nothing and differs in every process.
    return type(controller).__name__ if " object at 0x" in text else text
