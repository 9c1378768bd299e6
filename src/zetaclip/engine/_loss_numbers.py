"""The numbers that a loss is multiplied or divided by: the rows of its batch, or a constant?

Weights of records have no graph, so only their values can tell whether they were made from the
whole batch: 1 / count of the own class, or weights that were divided by their sum or mean. Both can
be chance in one batch, hardly in several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._loss_nodes import FEW, MEAN, SUM, Trail

_NORMALISED = 0.05  # how often other weights of few values have a mean of exactly 1


@dataclass(frozen=True)
class Numbers:
    """Reads the numbers in the graph of one loss.

    Attributes:
        rows: Records of the chunk.
        constants: Public numbers that a loss may well be divided by.
        factors: Plain numbers that losses were scaled by, with the rows they had; grows.
    """

    rows: int
    constants: frozenset[float]
    factors: dict[float, int]

    def through(self, node: Any, kind: str, trail: Trail) -> Trail:
        """A product or a quotient with one number."""
        if kind not in ("Mul", "Div"):
            return trail
        operands = [getattr(node, name, None) for name in ("_saved_other", "_saved_self")]
        for value in operands:
            if isinstance(value, Tensor) and value.numel() == 1:
                if not float(value):
                    return Trail(frozenset({SUM, MEAN}))  # no gradient comes through
                divides, is_tensor = kind == "Div", not _is_number(value)
                found = self.times(trail, float(value), divides, is_tensor)
                if divides and is_tensor and not value.requires_grad and found.shift == trail.shift:
                    return found._replace(divided=True)
                return found
        scalar = operands[0]
        if isinstance(scalar, Tensor) and scalar.numel() == self.rows and not scalar.requires_grad:
            return trail._replace(weighed=_by_chance(scalar, kind == "Div"))
        if kind == "Div" and isinstance(scalar, (int, float)):
            return self.times(
                trail, float(scalar), True, True
            )  # in torch's own losses: no constant of the user's
        return trail

    def times(self, trail: Trail, value: float, divides: bool, is_tensor: bool) -> Trail:
        """After a product with a number, or a quotient."""
        if not is_tensor and self.factors.setdefault(value, self.rows) != self.rows:
            self.factors[value] = 0  # the same with other rows
        for number, sign in (
            (value, -1 if divides else 1),
            (1 / value if value else 0.0, 1 if divides else -1),
        ):
            whole = round(number)
            if whole < self.rows or whole % self.rows or abs(number - whole) > 1e-6 * whole:
                continue
            counted = whole == self.rows or (sign < 0 and whole in trail.counts)
            if not counted and sign > 0:
                continue
            if not is_tensor and self.factors[value] != self.rows:
                return trail._replace(unclear=True)  # a constant, or the rows this time
            loose = whole != self.rows or (not is_tensor and whole in self.constants and value >= 1)
            return trail._replace(
                shift=trail.shift + sign,
                loose=trail.loose or loose,
                common=trail.common or (not is_tensor and _is_common(value)),
                far=trail.far or not counted,
            )
        return trail._replace(numbers=trail.numbers | {value}) if divides else trail


def _is_common(value: float) -> bool:
    """Whether losses are often scaled by this number: 0.5, 0.01, a small whole number, 100."""
    if value < 1:
        return float(f"{value:.1e}") == value
    return value <= FEW or value in (25.0, 100.0, 1000.0)


def _is_number(value: Tensor) -> bool:
    """Whether this was a plain number of Python's.

    Torch remembers it: such a number does not decide on the type of a result.
    """
    small = torch.float16 if value.is_floating_point() else torch.int8
    zero = torch.zeros((), dtype=small, device=value.device)
    return value.dtype != small and torch.result_type(zero, value) == small


def _by_chance(weights: Tensor, divides: bool) -> float:
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
