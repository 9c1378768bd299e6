"""A moving average of the weights: free of privacy cost, because it reads only weights that were released."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class WeightAverage:
    """avg <- D * avg + (1 - D) * θ after every update, without the bias towards where it started.

    The first updates weigh more than the decay says: with t updates done the decay is min(D, (1 + t) / (10 + t)), so that
    the random initial weights are forgotten at once. Buffers are copied, not averaged.

    **Guarantee.** Post-processing: it reads the module's parameters between two updates and nothing else.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"the decay of a weight average is between 0 and 1, not {decay}")
        self.decay = decay
        self.updates = 0
        self._module = module
        self._average = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self) -> None:
        """Takes the module's present weights in; call it after each ``optimizer.step()`` that moved them."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        own = dict(self._module.named_parameters())
        average = list(self._average.values())
        torch._foreach_lerp_(average, [own[name].detach() for name in self._average], 1 - decay)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """The module with the averaged weights in place; afterwards it has its own again, bit for bit."""
        parameters = dict(self._module.named_parameters())
        kept = {name: parameters[name].detach().clone() for name in self._average}
        try:
            self._put(parameters, self._average)
            yield self._module
        finally:
            self._put(parameters, kept)

    @staticmethod
    @torch.no_grad()
    def _put(parameters: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            parameters[name].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "average": dict(self._average)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["average"].keys() != self._average.keys():
            raise ValueError("the weight average was made for another model")
        self.updates = int(state["updates"])
        for name, value in state["average"].items():
            self._average[name].copy_(value)
