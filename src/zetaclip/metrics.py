"""Accuracy, AUC, RMSE and calibration, exact where there are ties.

Logits have shape (n, classes). For two classes they may have shape (n,) or (n, 1): the logit of the
second class. Every function raises ``ValueError`` for empty input or shapes that do not fit. A NaN
in a network's output is never ignored: ``accuracy`` counts its row as wrong, every other metric is
NaN. scikit-learn's functions raise on NaN and infinite scores, so they are not used here.
"""

from __future__ import annotations

import math

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
