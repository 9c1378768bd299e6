"""Losses that weigh classes and leave labels out without letting one record touch another.

torch's ``cross_entropy(weight=...)`` divides by the weights of the whole batch, and
``ignore_index`` by the labels that count in it. So each record's gradient, before it is clipped,
depends on the others, and ε does not hold. Here each record's own loss is weighed, and divided by
nothing but the rows::

    criterion = zetaclip.losses.CrossEntropy(weight={0: 0.05}, classes=2)  # class 1 counts 20 times as much
    engine.make_private(..., criterion=criterion)

**Guarantee.** The loss of a batch is the mean (or the sum) over its rows of losses that know one
row each. C bounds the weighted gradient. **Edge cases.** Weights are public constants: those of
classes must not be counted from private data ("balanced" weights tell how many records a class
has). A weight of a record must be a function of that record.
A gradient that is clipped anyway does not grow with its weight: take 1 as the largest weight, and
smaller ones for classes that should count less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def class_weights(weight: Any, classes: int | None = None) -> Tensor:
    """Weights by class as a tensor: from numbers in order, or from a mapping in which classes left
    out weigh 1.

    Raises:
        ValueError: a weight is negative or not finite, a class is not there, or the weights would
            come from the data.
    """
    if isinstance(weight, str):
        raise ValueError(
            f"class weights {weight!r} are counted from the data: how many records a class has is "
            "private, and ε does not cover it. "
            "Declare the weights from public knowledge, as {class: weight}"
        )
    if isinstance(weight, Mapping):
        if classes is None:
            raise ValueError("weights by class need classes=, the number of classes")
        unknown = [
            label for label in weight if not isinstance(label, int) or not 0 <= label < classes
        ]
        if unknown:
            raise ValueError(
                f"class weights for {unknown[0]!r}: classes are the numbers 0 to {classes - 1}"
            )
        weight = [float(weight.get(label, 1.0)) for label in range(classes)]
    found = torch.as_tensor(weight, dtype=torch.float32).detach().clone()
    if (
        found.dim() != 1
        or not bool((found.isfinite() & (found >= 0)).all())
        or not bool(found.any())
    ):
        raise ValueError(
            "class weights must be finite numbers of at least 0, one per class, not all of them 0"
        )
    return found


class _PerRecord(nn.Module):
    """The mean or the sum over rows of each row's own loss."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        if reduction not in ("mean", "sum"):
            raise ValueError(
                f"reduction must be 'mean' or 'sum', as loss_reduction of make_private, not {reduction!r}"
            )
        self.reduction = reduction

    def _reduced(self, each: Tensor, sample_weight: Tensor | None) -> Tensor:
        if sample_weight is not None:
            if sample_weight.shape != each.shape:
                raise ValueError(
                    f"sample_weight has shape {tuple(sample_weight.shape)}: give one weight per record"
                )
            each = each * sample_weight
        return each.mean() if self.reduction == "mean" else each.sum()


class CrossEntropy(_PerRecord):
    """Cross entropy with class weights and labels that do not count, record by record.

    Args:
        weight: a weight per class, as numbers in order or as {class: weight} with ``classes``.
            Public constants.
        ignore_index: a label that does not count. A record's positions are averaged over its own
            that do.
        label_smoothing: as in torch.
        reduction: "mean" over rows or "sum"; the same word goes into
            ``make_private(loss_reduction=...)``.
        classes: the number of classes, for weights by class.

    ``forward(outputs, targets, sample_weight=None)`` takes outputs (rows, classes, ...) and targets
    (rows, ...).

    **Edge cases.** A record without a label that counts has a loss of 0, and stays one of the rows.
    """

    def __init__(
        self,
        weight: Sequence[float] | Mapping[int, float] | Tensor | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        classes: int | None = None,
    ) -> None:
        super().__init__(reduction)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        found = None if weight is None else class_weights(weight, classes)
        self.weight: Tensor | None
        self.register_buffer("weight", found, persistent=False)

    def forward(
        self, outputs: Tensor, targets: Tensor, sample_weight: Tensor | None = None
    ) -> Tensor:
        weight = None if self.weight is None else self.weight.to(outputs)
        each = functional.cross_entropy(
            outputs,
            targets,
            weight=weight,
            ignore_index=self.ignore_index,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )
        if each.dim() > 1:
            counted = (targets != self.ignore_index).to(each.dtype).flatten(1)
            each = each.flatten(1).sum(1) / counted.sum(1).clamp_min(1)
        return self._reduced(each, sample_weight)


class BCEWithLogits(_PerRecord):
    """Binary cross entropy of logits with weights, record by record; several outputs of a record
    are averaged.

    Args:
        pos_weight: of the positive class, one number or one per output. A public constant.
        weight: of each output. A public constant.
        reduction: "mean" over rows or "sum"; the same word goes into
            ``make_private(loss_reduction=...)``.

    torch's own mean with ``pos_weight`` divides by the number of elements, and is a mean over rows
    as well.
    """

    def __init__(
        self, pos_weight: Any = None, *, weight: Any = None, reduction: str = "mean"
    ) -> None:
        super().__init__(reduction)
        self.pos_weight: Tensor | None
        self.weight: Tensor | None
        for name, given in (("pos_weight", pos_weight), ("weight", weight)):
            value = (
                None
                if given is None
                else torch.as_tensor(given, dtype=torch.float32).detach().clone()
            )
            if value is not None and not bool((value.isfinite() & (value >= 0)).all()):
                raise ValueError(f"{name} must be finite and at least 0")
            self.register_buffer(name, value, persistent=False)

    def forward(
        self, outputs: Tensor, targets: Tensor, sample_weight: Tensor | None = None
    ) -> Tensor:
        each = functional.binary_cross_entropy_with_logits(
            outputs,
            targets.to(outputs),
            weight=None if self.weight is None else self.weight.to(outputs),
            pos_weight=None if self.pos_weight is None else self.pos_weight.to(outputs),
            reduction="none",
        )
        return self._reduced(each.flatten(1).mean(1) if each.dim() > 1 else each, sample_weight)
