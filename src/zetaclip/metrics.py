"""Accuracy, AUC, RMSE, calibration, curves and residuals, exact where there are ties.

Logits have shape (n, classes). For two classes they may have shape (n,) or (n, 1): the logit of the
second class. Every function raises ``ValueError`` for empty input or shapes that do not fit. A NaN
in a network's output is never ignored: ``accuracy`` counts its row as wrong, every other metric is
NaN. scikit-learn's functions raise on NaN and infinite scores, so they are not used here.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def accuracy(logits: Tensor, y: Tensor) -> float:
    """The share of records whose largest logit is that of their class.

    Args:
        logits: (n, classes), or one logit per record: class 1 is predicted if it is above 0.
        y: Classes as numbers.

    Returns:
        A number in [0, 1]. If several logits are the largest, the first of them is the prediction.
    """
    logits, y = _pair(logits, y)
    if logits.dim() == 1:
        right = ((logits > 0) == (y > 0.5)) & ~logits.isnan()
        return float(right.double().mean())
    rows = torch.arange(len(y))
    top = logits.max(dim=1).values
    chosen = logits[rows, y.long()]
    earlier = (logits == top[:, None]).cumsum(1)[rows, y.long()]
    right = (chosen == top) & (earlier == 1)  # a NaN equals nothing
    return float(right.double().mean())


def auc(scores: Tensor, y: Tensor) -> float:
    """The probability that a record of class 1 has a higher score than one of class 0.

    Args:
        scores: One score per record.
        y: 0 or 1 per record.

    Returns:
        A number in [0, 1], in which a tie counts half; NaN if one of the classes has no records.
    """
    scores, y = _pair(scores, y)
    if scores.dim() != 1:
        raise ValueError(f"scores must have one value per record, not shape {tuple(scores.shape)}")
    if scores.isnan().any():
        return math.nan
    positive = y > 0.5
    ones = int(positive.sum())
    zeros = len(y) - ones
    if not ones or not zeros:
        return math.nan
    _, inverse, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    # Twice the mean rank of each value, counted from 1: integers, so the sum is exact.
    last = counts.cumsum(0)
    ranks = (2 * last - counts + 1)[inverse]
    return (int(ranks[positive].sum()) - ones * (ones + 1)) / (2 * ones * zeros)


def rmse(pred: Tensor, y: Tensor) -> float:
    """The square root of the mean squared error, in the units of ``y``.

    Args:
        pred: One prediction per record.
        y: One target per record.

    Returns:
        The error; NaN if a prediction is NaN.
    """
    pred, y = _pair(pred, y)
    if pred.shape != y.shape:
        raise ValueError(f"predictions have shape {tuple(pred.shape)}, targets {tuple(y.shape)}")
    return float((pred - y).square().mean().sqrt())


def ece(logits: Tensor, y: Tensor, bins: int = 15) -> float:
    """Expected calibration error: the mean gap between confidence and accuracy over bins.

    Args:
        logits: (n, classes), or one logit per record.
        y: Classes as numbers.
        bins: Number of bins of equal width over the confidence.

    Returns:
        The mean over the bins, weighted by their number of records; NaN if a probability is NaN.
    """
    table = reliability(logits, y, bins)
    if not table:
        return math.nan
    total = sum(row["count"] for row in table)
    return sum(
        row["count"] / total * abs(row["confidence"] - row["accuracy"])
        for row in table
        if row["count"]
    )


def reliability(logits: Tensor, y: Tensor, bins: int = 15) -> list[dict[str, float]]:
    """The reliability diagram as a table: accuracy per bin of the confidence.

    The confidence is the probability of the predicted class.

    Args:
        logits: (n, classes), or one logit per record.
        y: Classes as numbers.
        bins: Number of bins of equal width.

    Returns:
        One row per bin (low, high], with "low", "high", "count", "confidence" and "accuracy"; the
        last two are means over the records of the bin, NaN if it is empty. An empty list if a
        probability is NaN, which infinite logits cause as well.
    """
    if bins < 1:
        raise ValueError(f"at least one bin is needed, not {bins}")
    logits, y = _pair(logits, y)
    if logits.dim() == 1:
        chosen, right = torch.sigmoid(logits.abs()), (logits > 0) == (y > 0.5)
    else:
        chosen, place = torch.softmax(logits, dim=1).max(dim=1)
        right = place == y.long()
    if chosen.isnan().any():
        return []
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    place = torch.bucketize(chosen, edges[1:-1])  # (low, high]
    counts = torch.bincount(place, minlength=bins)
    confidence = torch.bincount(place, weights=chosen, minlength=bins) / counts
    correct = torch.bincount(place, weights=right.double(), minlength=bins) / counts
    return [
        {
            "low": float(edges[i]),
            "high": float(edges[i + 1]),
            "count": int(counts[i]),
            "confidence": float(confidence[i]),
            "accuracy": float(correct[i]),
        }
        for i in range(bins)
    ]


def confusion(logits: Tensor, y: Tensor, classes: int) -> list[list[int]]:
    """How often each class was taken for which: a row per true class, a column per predicted one.

    Args:
        logits: (n, classes), or one logit per record: class 1 is predicted if it is above 0.
        y: Classes as numbers.
        classes: Number of classes.

    Returns:
        The counts; an empty list if a logit is NaN.
    """
    logits, y = _pair(logits, y)
    if logits.isnan().any():
        return []
    chosen = (logits > 0).long() if logits.dim() == 1 else logits.argmax(dim=1)
    counts = torch.bincount(y.long() * classes + chosen, minlength=classes * classes)
    return [[int(count) for count in row] for row in counts.reshape(classes, classes)]


def roc(scores: Tensor, y: Tensor) -> list[tuple[float, float]]:
    """The ROC curve as (false positive rate, true positive rate), from (0, 0) to (1, 1).

    Args:
        scores: One score per record.
        y: 0 or 1 per record.

    Returns:
        A point for each different score; an empty list if a score is NaN or a class is missing.
    """
    found = _cumulated(scores, y)
    if found is None:
        return []
    right, wrong = found
    return [
        (0.0, 0.0),
        *zip((wrong / wrong[-1]).tolist(), (right / right[-1]).tolist(), strict=True),
    ]


def precision_recall(scores: Tensor, y: Tensor) -> list[tuple[float, float]]:
    """The precision-recall curve as (recall, precision), from the highest score down.

    Args:
        scores: One score per record.
        y: 0 or 1 per record.

    Returns:
        A point for each different score; an empty list if a score is NaN or a class is missing.
    """
    found = _cumulated(scores, y)
    if found is None:
        return []
    right, wrong = found
    return list(zip((right / right[-1]).tolist(), (right / (right + wrong)).tolist(), strict=True))


def _cumulated(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Records of class 1 and of class 0 whose score is at least each score, highest first."""
    scores, y = _pair(scores, y)
    if scores.dim() != 1:
        raise ValueError(f"scores must have one value per record, not shape {tuple(scores.shape)}")
    positive = (y > 0.5).double()
    if scores.isnan().any() or not 0 < positive.sum() < len(y):
        return None
    values, place = torch.unique(-scores, return_inverse=True)  # ascending: the highest first
    ones = torch.bincount(place, weights=positive, minlength=len(values)).cumsum(0)
    zeros = torch.bincount(place, weights=1 - positive, minlength=len(values)).cumsum(0)
    return ones, zeros


def residuals(pred: Tensor, y: Tensor, bins: int = 40) -> dict[str, Any]:
    """How far predictions are off: prediction minus target, in the units of ``y``.

    Args:
        pred: One prediction per record.
        y: One target per record.
        bins: Number of bins of the histogram, and of the targets.

    Returns:
        "mean", "absolute" (the mean absolute error), "r2" (None if all targets are equal),
        "quantiles" (at 5, 25, 50, 75 and 95 %), "histogram" ("edges" and "counts"), and
        "by_target": rows of "target", "prediction" and "count", means over bins of the target. An
        empty dict if a prediction is not finite.
    """
    pred, y = _pair(pred, y)
    if pred.shape != y.shape:
        raise ValueError(f"predictions have shape {tuple(pred.shape)}, targets {tuple(y.shape)}")
    y = y.double()
    if not pred.isfinite().all():
        return {}
    off = pred - y
    spread = float((y - y.mean()).square().sum())
    levels = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64)
    low, high = float(off.min()), float(off.max())
    edges = torch.linspace(low, high if high > low else low + 1.0, bins + 1, dtype=torch.float64)
    counts = torch.bincount(torch.bucketize(off, edges[1:-1]), minlength=bins)
    ends = torch.linspace(float(y.min()), float(y.max()), bins + 1, dtype=torch.float64)
    place = torch.bucketize(y, ends[1:-1])
    number = torch.bincount(place, minlength=bins)
    means = [torch.bincount(place, weights=v, minlength=bins) / number for v in (y, pred)]
    return {
        "mean": float(off.mean()),
        "absolute": float(off.abs().mean()),
        "r2": 1 - float(off.square().sum()) / spread if spread else None,
        "quantiles": torch.quantile(off, levels).tolist(),
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
        "by_target": [
            {"target": float(t), "prediction": float(p), "count": int(n)}
            for t, p, n in zip(*means, number, strict=True)
            if n
        ],
    }


def thinned(points: list[tuple[float, float]], most: int = 100) -> list[list[float]]:
    """At most ``most`` points of a curve, evenly spaced along it, with the first and the last."""
    if len(points) <= most:
        return [list(point) for point in points]
    lengths = [0.0]
    for (x, y), (u, v) in pairwise(points):
        lengths.append(lengths[-1] + abs(u - x) + abs(v - y))
    wanted = [lengths[-1] * place / (most - 1) for place in range(most)]
    kept = {min(bisect_left(lengths, at), len(points) - 1) for at in wanted}
    return [list(points[place]) for place in sorted(kept)]


def _pair(values: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both on the CPU, floating-point values as float64, a single column as a vector."""
    values, y = (torch.as_tensor(part).detach().cpu() for part in (values, y))
    values = values.double()
    if values.dim() == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if y.dim() == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.is_floating_point():
        y = y.double()
    if values.dim() not in (1, 2) or y.dim() != 1 or len(values) != len(y):
        raise ValueError(
            f"{tuple(values.shape)} values do not fit {tuple(y.shape)} targets: "
            "one row per record is needed"
        )
    if not len(y):
        raise ValueError("a metric of no records is not defined")
    return values, y
