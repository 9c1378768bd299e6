"""Losses with class weights and ignored labels whose records stay independent of each other.

torch's ``cross_entropy(weight=...)`` divides by the sum of the weights of the whole batch, and
``ignore_index`` divides by the number of labels in the batch that count. So each record's gradient,
before it is clipped, depends on the other records, and ε does not hold. Here each record's own loss
is weighted, and the sum is divided only by the number of rows::

    # class 1 counts 20 times as much as class 0
    criterion = zetaclip.losses.CrossEntropy(weight={0: 0.05}, classes=2)
    engine.make_private(..., criterion=criterion)

**Guarantee.** The loss of a batch is the mean (or the sum) over its rows of losses that depend on
one row each. C bounds the weighted gradient.

**Edge cases.** Weights are public constants. Class weights must not be counted from private data:
"balanced" weights reveal how many records a class has. The weight of a record must be a function of
that record. Clipping also limits the effect of a large weight: use 1 as the largest weight, and
smaller weights for classes that should count less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def class_weights(weight: Any, classes: int | None = None) -> Tensor:
    """Class weights as a tensor.

    Args:
        weight: Numbers in the order of the classes, or {class: weight} in which missing classes
            have weight 1.
        classes: Number of classes; needed for {class: weight}.

    Returns:
        A float32 tensor with one weight per class.

    Raises:
        ValueError: A weight is negative or not finite, all weights are 0, a class does not exist,
            or the weights would be counted from the data ("balanced").
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
    """The mean or the sum over the rows of each row's own loss."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        if reduction not in ("mean", "sum"):
            raise ValueError(
                "reduction must be 'mean' or 'sum', as loss_reduction of make_private, "
                f"not {reduction!r}"
            )
        self.reduction = reduction

    def _reduced(self, each: Tensor, sample_weight: Tensor | None) -> Tensor:
        if sample_weight is not None:
            if sample_weight.shape != each.shape:
                raise ValueError(
                    f"sample_weight has shape {tuple(sample_weight.shape)}: "
                    "give one weight per record"
                )
            each = each * sample_weight
        return each.mean() if self.reduction == "mean" else each.sum()


class CrossEntropy(_PerRecord):
    """Cross entropy with class weights and ignored labels, record by record.

    Args:
        weight: One weight per class, as numbers in order or as {class: weight} with ``classes``.
            Public constants.
        ignore_index: Label that does not count. If a record has several positions, its loss is the
            mean over its positions that count.
        label_smoothing: As in torch.
        reduction: "mean" or "sum" over the rows; ``make_private(loss_reduction=...)`` must get the
            same value.
        classes: Number of classes, if ``weight`` is {class: weight}.

    **Edge cases.** A record without a label that counts has a loss of 0, and is still counted as
    a row.
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
        """The loss of a batch.

        Args:
            outputs: Logits of shape (rows, classes, ...).
            targets: Classes of shape (rows, ...).
            sample_weight: One weight per row.

        Returns:
            A scalar.
        """
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
    """Binary cross entropy of logits with weights, record by record.

    The loss of a record is the mean over its outputs. Unlike torch's ``cross_entropy``, torch's own
    ``BCEWithLogitsLoss`` with ``pos_weight`` divides only by the number of elements, so it is a
    mean over rows as well.

    Args:
        pos_weight: Weight of the positive class, one number or one per output. A public constant.
        weight: Weight of each output. A public constant.
        reduction: "mean" or "sum" over the rows; ``make_private(loss_reduction=...)`` must get the
            same value.
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
        """The loss of a batch.

        Args:
            outputs: Logits of shape (rows, ...).
            targets: 0 or 1, of the same shape.
            sample_weight: One weight per row.

        Returns:
            A scalar.
        """
        each = functional.binary_cross_entropy_with_logits(
            outputs,
            targets.to(outputs),
            weight=None if self.weight is None else self.weight.to(outputs),
            pos_weight=None if self.pos_weight is None else self.pos_weight.to(outputs),
            reduction="none",
        )
        return self._reduced(each.flatten(1).mean(1) if each.dim() > 1 else each, sample_weight)
