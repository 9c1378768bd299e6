"""Whether the weights of records look as if they were made from the whole batch.

Weights have no graph, so only their values can tell: 1 / count of the own class, or weights that
were divided by their sum or mean. Both can be chance in one batch, hardly in several.
"""

from __future__ import annotations

from torch import Tensor

_NORMALISED = 0.05  # how often other weights of few values have a mean of exactly 1


def by_chance(weights: Tensor, divides: bool) -> float:
    """How likely weights of records of their own would look like these.

    Args:
        weights: one per record.
        divides: whether losses are divided by them.

    Returns:
        A probability; 1 if nothing about them is remarkable.
    """
    values = weights.detach().double().flatten()
    if not bool((values > 0).all()) or bool((values == values[0]).all()):
        return 1.0
    total = float(values.sum())
    if not divides and min(abs(total - 1), abs(total / len(values) - 1)) < 1e-6:
        return _NORMALISED
    counts = values if divides else 1 / values
    if float((counts - counts.round()).abs().max()) > 1e-4:
        return 1.0
    odds = 1.0
    for count, times in zip(*counts.round().unique(return_counts=True), strict=True):
        if int(times) % int(count):  # each class with so many records has so many records
            return 1.0
        odds /= int(count)
    return odds
