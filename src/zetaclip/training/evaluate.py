"""The task of a data set: its loss, its metrics, and how they are measured on held-out records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import metrics

if TYPE_CHECKING:
    from ..data import Dataset, Split

MOST_CLASSES = 30  # of a table of confusions
_ROWS = 250  # records at a time, so that evaluation needs no more memory than a step


@dataclass(frozen=True)
class Task:
    """What a network's outputs mean, and which metric sums up the run.

    A regression target is scaled so that its declared range becomes [-1, 1]. The step size then
    does not depend on the unit.

    Args:
        kind: classification, binary or regression.
        metric: The name of the main metric.
        middle: The middle of the target's range.
        half: Half the width of the target's range.
    """

    kind: str
    metric: str
    middle: float = 0.0
    half: float = 1.0

    @classmethod
    def of(cls, dataset: Dataset) -> Task:
        """The task of the data set."""
        if dataset.task == "regression":
            low, high = dataset.target_range or (-1.0, 1.0)
            return cls("regression", "rmse", (low + high) / 2, (high - low) / 2)
        return cls(dataset.task, {"classification": "accuracy", "binary": "auc"}[dataset.task])

    def loss(self, outputs: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """The loss of the outputs.

        Args:
            outputs: The network's outputs.
            y: The targets.
            reduction: mean, sum or none.
        """
        if self.kind == "classification":
            return functional.cross_entropy(outputs, y, reduction=reduction)
        if self.kind == "binary":
            return functional.binary_cross_entropy_with_logits(
                outputs.squeeze(1), y, reduction=reduction
            )
        return functional.mse_loss(
            outputs.squeeze(1), (y - self.middle) / self.half, reduction=reduction
        )

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, Any]:
        """Every metric of the task, from all outputs at once."""
        found: dict[str, Any] = {"loss": float(self.loss(outputs, y))}
        if self.kind == "regression":
            rmse = metrics.rmse(outputs.squeeze(1) * self.half + self.middle, y)
            return {**found, "rmse": rmse, "rmse_of_range": rmse / (2 * self.half)}
        if self.kind == "binary":
            logit = outputs.squeeze(1)
            two = torch.stack((torch.zeros_like(logit), logit), dim=1)
            return {
                **found,
                "auc": metrics.auc(logit, y),
                "accuracy": metrics.accuracy(two, y.long()),
                "ece": metrics.ece(two, y.long()),
            }
        return {**found, "accuracy": metrics.accuracy(outputs, y), "ece": metrics.ece(outputs, y)}

    def reliability(self, outputs: Tensor, y: Tensor) -> list[dict[str, Any]] | None:
        """Accuracy by confidence, in bins; None for a regression."""
        if self.kind == "regression":
            return None
        if self.kind == "binary":
            logit = outputs.squeeze(1)
            return metrics.reliability(
                torch.stack((torch.zeros_like(logit), logit), dim=1), y.long()
            )
        return metrics.reliability(outputs, y)

    def details(self, outputs: Tensor, y: Tensor, classes: Sequence[str]) -> dict[str, Any]:
        """What a single number hides, small enough for result.json.

        Args:
            outputs: The network's outputs on held-out records.
            y: Their targets.
            classes: Names of the classes that may be published; empty: they are numbered.

        Returns:
            For classes: "classes", "per_class" (records, and the share that was right),
            "confusion", "roc" and "precision_recall". With more than two classes the curves are
            over all pairs of a record and a class (one against the rest); "per_class" then has the
            area and both curves of each class, and "auc" the mean area. Above ``MOST_CLASSES``
            classes there are no confusions and no curves by class. For a regression "residuals".
            Curves have at most 100 points. Empty if an output is not finite.
        """
        if not outputs.isfinite().all():
            return {}
        if self.kind == "regression":
            predicted = outputs.squeeze(1).double() * self.half + self.middle
            return {"residuals": rounded(metrics.residuals(predicted, y))}
        count = 2 if self.kind == "binary" else outputs.shape[1]
        table = metrics.confusion(outputs, y, count)
        found: dict[str, Any] = {
            "classes": list(classes) or [str(number) for number in range(count)],
            "per_class": [
                {"records": sum(row), "accuracy": row[place] / sum(row) if sum(row) else None}
                for place, row in enumerate(table)
            ],
        }
        if count <= MOST_CLASSES:
            found["confusion"] = table
        if self.kind == "binary":
            return rounded(found | _curves(outputs.squeeze(1), y))
        chances = torch.softmax(outputs.double(), dim=1)
        truth = y.long()[:, None] == torch.arange(count)
        areas = [metrics.auc(chances[:, place], truth[:, place]) for place in range(count)]
        known = [area for area in areas if math.isfinite(area)]
        if known:
            found |= {"auc": sum(known) / len(known), **_curves(chances.flatten(), truth.flatten())}
        for place, (part, area) in enumerate(zip(found["per_class"], areas, strict=True)):
            part["auc"] = area if math.isfinite(area) else None
            if count <= MOST_CLASSES:
                part |= _curves(chances[:, place], truth[:, place], 40)
        return rounded(found)


def _curves(scores: Tensor, truth: Tensor, most: int = 100) -> dict[str, Any]:
    return {
        "roc": metrics.thinned(metrics.roc(scores, truth), most),
        "precision_recall": metrics.thinned(metrics.precision_recall(scores, truth), most),
    }


def rounded(value: Any) -> Any:
    """Floats with six significant digits: enough for a picture, and a third of the text."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


@torch.no_grad()
def outputs_of(model: nn.Module, split: Split, device: torch.device) -> Tensor:
    """The network's outputs on all records, computed in parts, on the CPU.

    The model is put into eval mode and back.

    Args:
        model: The network.
        split: The records.
        device: Where the network is.
    """
    mode = model.training
    model.eval()
    try:
        return torch.cat([model(rows.to(device)).float().cpu() for rows in split.x.split(_ROWS)])
    finally:
        model.train(mode)
