"""How many records of a batch are in memory at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .config import Config

if TYPE_CHECKING:
    from ..data import Dataset

# Activations of so many floats are bearable at once. Poisson batches differ in size, so a freed
# block seldom fits the next step: without a bound the heap grows to many times what a step needs.
FLOATS = 1 << 26
_FEWEST = 64


def rows_at_once(
    config: Config, dataset: Dataset, model: nn.Module, forward: Callable[[], Any]
) -> int | None:
    """The rows of a batch that a private step takes at once; None for all of them.

    It depends on the settings, the network and the shape of a record alone.

    Args:
        config: The settings, all of them chosen; what they say is taken.
        dataset: The data.
        model: The network.
        forward: Runs it on one made-up record.
    """
    assert config.batch_size is not None
    if config.physical_batch_size is not None:
        return config.physical_batch_size
    pictures = config.features == "none" and len(dataset.input_shape) == 3
    # Units and views have a rule of their own; diagnostics are noted for whole batches.
    others = dataset.owners is not None or config.views > 1 or config.non_private_diagnostics
    if not pictures or others or config.device != "cpu":
        return None
    rows = max(_FEWEST, FLOATS // activations(model, forward))
    return rows if rows < config.batch_size else None


def activations(model: nn.Module, forward: Callable[[], Any]) -> int:
    """How many numbers the layers of a network put out in a forward pass."""
    found = [1]

    def note(module: nn.Module, given: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            found.append(output.numel())

    leaves = [part for part in model.modules() if not any(part.children())]
    handles = [part.register_forward_hook(note) for part in leaves]
    training = model.training
    try:
        with torch.no_grad():
            model.eval()
            forward()
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return sum(found)
