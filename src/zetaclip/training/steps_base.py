"""What private and ordinary updates share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..methods import Auto, WeightAverage
from .config import Config
from .diagnostics import Diagnostics
from .evaluate import Task
from .recipe import rate_at, steps_per_epoch, total_steps
from .records import class_weights, nominal_size

if TYPE_CHECKING:
    from ..data import Dataset
    from ..methods import Method


class StepsBase:
    """What both kinds share: the task, the learning rate schedule, the average of the weights.

    Args:
        config: The settings, all of them chosen.
        dataset: The data.
        method: The method.
        model: The network, on its device.
    """

    optimizer: Any

    def __init__(self, config: Config, dataset: Dataset, method: Method, model: nn.Module) -> None:
        self.config = config
        self.method = method
        self.model = model
        self.task = Task.of(dataset)
        self.device = torch.device(config.device)
        weights = class_weights(config, dataset)
        self.weights = None if weights is None else torch.tensor(weights, device=self.device)
        self.size, self.declared = nominal_size(config, dataset)
        self.per_epoch = steps_per_epoch(config, self.size)
        self.total = total_steps(config, self.size)
        self.done = 0
        self.clips: list[float] = []  # C of each update
        self.notes: list[str] = []
        self.wish: Callable[[], int] = lambda: 0
        self.diagnostics = Diagnostics() if config.non_private_diagnostics else None
        decay = config.weight_average
        self.average = (
            None
            if decay is None
            else WeightAverage([p for p in model.parameters() if p.requires_grad], decay)
        )

    def optimizer_options(self) -> dict[str, Any]:
        """Options over the method's own. Families without momentum get none, which equals 0."""
        options: dict[str, Any] = {"weight_decay": self.config.weight_decay}
        if self.config.momentum or self.method.family == "auto":
            options["momentum"] = self.config.momentum
        if self.method.family == "auto":
            regression = self.task.kind == "regression"
            options |= {"steps": self.total, "regression": regression, "decay": False}
            options["gain"] = self.config.method_options.get("gain")
        return options

    def set_rate(self, optimizer: torch.optim.Optimizer) -> float:
        """Sets the learning rate of the next update."""
        rate = rate_at(self.config, self.done, self.total)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate

    @property
    def users_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the method made."""
        return self.optimizer

    @property
    def last_rate(self) -> float:
        """The learning rate of the last update."""
        inner = self.users_optimizer
        return inner.rate if isinstance(inner, Auto) else float(inner.param_groups[0]["lr"])

    def backward(self, *batch: Tensor, divisor: int = 1) -> None:
        """Backpropagates the loss summed over these records.

        A sum keeps each record's gradient bit-identical whatever the batch size.

        Args:
            batch: The arguments of ``loss``.
            divisor: Divides the loss.
        """
        loss = self.loss(*batch)
        (loss if divisor == 1 else loss / divisor).backward()
        if self.diagnostics is not None:
            rows = len(batch[0])
            self.diagnostics.losses.append(loss.item() / rows)
            self.diagnostics.sizes.append(rows)

    def loss(self, *batch: Tensor) -> Tensor:
        """The loss summed over these records, weighted by class and record if that was declared.

        Args:
            batch: Inputs, targets, and a weight for each record if there are weights.
        """
        x, y, *weight = batch
        outputs, y = self.model(x.to(self.device)), y.to(self.device)
        if self.weights is None and not weight:
            return self.task.loss(outputs, y, reduction="sum")
        losses = self.task.loss(outputs, y, reduction="none")
        if self.weights is not None:
            losses = losses * self.weights[y.long()]
        return (losses * weight[0].to(self.device) if weight else losses).sum()

    def agreed(self) -> int:
        """The request of this process, or, with several ranks, the one they agreed on."""
        return self.wish()

    def moved(self, clip: float | None = None) -> None:
        """Counts an update, and notes its C."""
        self.done += 1
        if clip is not None:
            self.clips.append(clip)
        if self.average is not None:
            self.average.update()

    def extra(self, trainer: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint contains besides weights and optimizer."""
        average = None if self.average is None else self.average.state_dict()
        return {
            "average": average,
            "trainer": trainer,
            "clips": torch.tensor(self.clips, dtype=torch.float64),
        }

    def take(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Takes over ``extra`` from a checkpoint; returns the trainer's part."""
        if self.average is not None:
            self.average.load_state_dict(extra["average"])
        self.clips = extra["clips"].tolist()
        return dict(extra["trainer"])
