"""Canaries: records that an auditor puts into the training data by secret coins."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..training.config import Config
from ..training.steps import PrivateSteps

if TYPE_CHECKING:
    from ..data import Dataset
    from ..engine._rehearsal import MadeUp
    from ..methods import Method

# Longer than any clipping norm in use, so that every canary is clipped to exactly C.
_LENGTH = 1e6


class GradientCanaries(nn.Module):
    """A network with one more trained number for each canary.

    The gradient of canary i is 1 at number i and zero elsewhere, so canaries are orthogonal to each
    other and to every record. They take the whole way of a record: sampled, clipped, summed,
    noised.

    Args:
        model: The network that is trained.
        count: The number of canaries.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.model = model
        self.numbers = nn.Embedding(count + 1, 1)  # the last one is that of ordinary records
        nn.init.zeros_(self.numbers.weight)

    def forward(self, x: Tensor, canary: Tensor) -> tuple[Tensor, Tensor]:
        """The network's outputs, and the number that belongs to each record."""
        return self.model(x), self.numbers(canary).squeeze(1)


class TranscriptSteps(PrivateSteps):
    """The updates of a run with gradient canaries, and what the releases tell about each.

    Args:
        config: The settings, all of them chosen.
        dataset: The data, without canaries.
        method: The method.
        model: The network.
        included: The coins: True where a canary is in the data.
    """

    model: GradientCanaries

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        method: Method,
        model: nn.Module,
        included: np.ndarray,
    ) -> None:
        self.included = included
        self.scores = np.zeros(len(included))
        canaried = GradientCanaries(model, len(included)).to(config.device)
        super().__init__(config, dataset, method, canaried)

    def tensors(self, dataset: Dataset) -> tuple[Tensor, ...]:
        """The records, then the canaries that are in, each with its canary's number."""
        x, y = dataset.train.x, dataset.train.y
        chosen = torch.from_numpy(np.flatnonzero(self.included))
        ordinary = torch.full((len(y),), len(self.included))
        return (
            torch.cat([x, x.new_zeros(len(chosen), *x.shape[1:])]),
            torch.cat([y, y.new_zeros(len(chosen))]),
            torch.cat([ordinary, chosen]),
        )

    def owners(self, dataset: Dataset) -> Tensor | None:
        """Each canary is a unit of one row."""
        if dataset.owners is None:
            return None
        return torch.cat([dataset.owners, -1 - torch.from_numpy(np.flatnonzero(self.included))])

    def made_up(self, dataset: Dataset) -> MadeUp:
        """Made-up records, the first of them ordinary and the others canaries."""
        made = super().made_up(dataset)
        made.batch[2][0] = len(self.included)
        return made

    def loss(self, *batch: Tensor) -> Tensor:
        """The sum of the task's loss over records and of their numbers over canaries."""
        x, y, canary = (part.to(self.device) for part in batch)
        outputs, numbers = self.model(x, canary)
        ordinary = canary == len(self.included)
        losses = self.task.loss(outputs, y, reduction="none")
        if self.weights is not None:
            losses = losses * self.weights[y.long()]
        return torch.where(ordinary, losses, _LENGTH * numbers).sum()

    def moved(self, clip: float | None = None) -> None:
        """Adds what the release of this update says about each canary, in units of C."""
        super().moved(clip)
        gradient = self.model.numbers.weight.grad
        assert gradient is not None and clip is not None
        unit = 1.0 if self.config.decouple else clip
        self.scores += gradient[:-1, 0].double().cpu().numpy() / unit


def with_wrong_labels(
    dataset: Dataset, count: int, rng: np.random.Generator
) -> tuple[Dataset, Dataset, np.ndarray]:
    """Turns some training records into canaries: each gets a wrong label, and is in by a coin.

    Args:
        dataset: The data.
        count: The number of canaries.
        rng: Chooses them, their labels and the coins.

    Returns:
        The data with the canaries that are in; all canaries as a data set; the coins.

    Raises:
        ConfigError: There are too few records.
    """
    x, y = dataset.train.x, dataset.train.y
    if count > len(y) // 2:
        raise ConfigError(
            f"{count} canaries are more than half of the {len(y)} training records; use fewer"
            " (--canaries), or --attacker transcript, whose canaries are no records"
        )
    chosen = torch.from_numpy(np.sort(rng.choice(len(y), count, replace=False)))
    labels = _wrong(dataset, y[chosen], rng)
    included = rng.integers(0, 2, count) == 1
    rest = torch.ones(len(y), dtype=torch.bool)
    rest[chosen] = False
    coins = torch.from_numpy(included)
    train = type(dataset.train)(
        torch.cat([x[rest], x[chosen][coins]]), torch.cat([y[rest], labels[coins]])
    )
    canaries = type(dataset.train)(x[chosen], labels)
    return replace(dataset, train=train), replace(dataset, train=canaries), included


def _wrong(dataset: Dataset, y: Tensor, rng: np.random.Generator) -> Tensor:
    if dataset.task == "classification":
        shift = rng.integers(1, max(2, dataset.outputs), len(y))
        return (y + torch.from_numpy(shift)) % dataset.outputs
    if dataset.task == "binary":
        return 1 - y
    low, high = dataset.target_range or (float(y.min()), float(y.max()))
    return torch.where(y > (low + high) / 2, low, high).to(y)
