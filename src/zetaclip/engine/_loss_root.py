"""Backward from a mean in half precision, so that no record is rounded by the number of the others.

The gradient of a mean over B rows is divided by B before the layers round it to half precision. So
what a record adds would depend on B. Here backward starts with B instead of 1: the division gives
back the very number that a record alone would get, if nothing but exact operations lie between the
loss and the mean. ``start`` reads that off the graph, and tries the division itself with the
numbers of this batch; whatever it can't be sure of is refused.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import LossError
from ._loss_graph import dims_of, shape_of
from ._loss_nodes import names

CURE = (
    'Use reduction="sum" in the loss and loss_reduction="sum" in make_private, or compute the loss '
    "in float32 (out.float()) as one mean over the rows"
)
# What these give back to their input is what they get, or its negative.
_SAME = names(
    "View UnsafeView Reshape ReshapeAlias Squeeze Unsqueeze Alias Clone Add Sub Neg ToCopy"
)
_END = "torch::autograd::AccumulateGrad"


def start(
    roots: Sequence[Any],
    given: Sequence[Tensor | None],
    rows: int,
    ours: Callable[[Any], bool],
    anchor: Any,
) -> list[Tensor | None]:
    """The gradients to start backward with, in place of those that were given.

    Args:
        roots: Tensors that are run backward.
        given: The gradient that each starts with; None for 1.
        rows: Records of the chunk, B.
        ours: Tells the nodes of private layers.
        anchor: The node that gets a gradient from all private layers and means nothing.

    Returns:
        B times those given, for roots that lead to private layers.

    Raises:
        LossError: The division by B may not be undone exactly.

    **Guarantee.** What then reaches a private layer for a record is what it would be with this
    record alone: a number, 1/k for k values per record, times functions of the record.
    """
    scaled: list[Tensor | None] = []
    for root, gradient in zip(roots, given, strict=True):
        node = root.grad_fn if isinstance(root, Tensor) else root.node
        graph = _Ways(rows, ours, anchor)
        if node is None or not graph.leads(node):
            scaled.append(gradient)
            continue
        if not isinstance(root, Tensor) or root.numel() != 1:
            raise LossError(_refused("backward does not start at one number"))
        if gradient is not None and not _power_of_two(float(gradient)):
            raise LossError(_refused("backward starts with another number than 1"))
        if graph.beside:
            raise LossError(
                _refused("a tensor that is not a weight of the private module gets a gradient, too")
            )
        graph.check(node, 1.0 if gradient is None else float(gradient))
        scaled.append(torch.full_like(root, rows) * (1 if gradient is None else gradient))
    return scaled


def _refused(why: str) -> str:
    return (
        "gradients in half precision, of a loss that is a mean over the batch: each would be "
        f"rounded by the number of records, and {why}, so that this can't be undone exactly. {CURE}"
    )


class _Ways:
    """The ways from a loss to the layers of a run."""

    def __init__(self, rows: int, ours: Callable[[Any], bool], anchor: Any) -> None:
        self.rows, self.ours, self.anchor = rows, ours, anchor
        self.beside = False  # whether something else than the anchor gets a gradient
        self._leads: dict[Any, bool] = {}

    def leads(self, root: Any) -> bool:
        """Whether a way from here comes to a layer of this run."""
        todo = [(root, False)]
        while todo:
            node, done = todo.pop()
            if node in self._leads and not done:
                continue
            below = [one for one, _ in node.next_functions if one is not None]
            if done:
                self._leads[node] = any(self._leads[one] for one in below)
            else:
                self._leads[node] = self.ours(node)
                if not self._leads[node]:
                    todo.append((node, True))
                # Layers are passed, too: below them, gradients of inputs would be scaled.
                todo += [(one, False) for one in below]
            self.beside |= node.name() == _END and node is not self.anchor
        return self._leads[root]

    def check(self, root: Any, given: float) -> None:
        """Raises unless every way is exact down to a mean over the records."""
        todo, met = [(root, self.rows * given)], set()
        while todo:
            node, gradient = todo.pop()
            if not self._leads.get(node):
                continue
            dtype, device = node._input_metadata[0].dtype, node._input_metadata[0].device
            if node in met:  # it gets a sum of several gradients, for which nothing was tried
                raise LossError(_refused(f"{node.name()} is used several times in the loss"))
            met.add(node)
            if float(torch.tensor(gradient, dtype=dtype)) != gradient:
                raise LossError(_refused(f"{gradient:.17g} has no exact value in {dtype}"))
            kind = re.sub(r"Backward.*$", "", node.name())
            values = self._values(node, kind)
            if values is not None:
                if values % self.rows or not _undone(kind, self.rows, values, dtype, device):
                    raise LossError(_refused(f"{values} values are divided by in {dtype}"))
                self._alone([one for one, _ in node.next_functions if one is not None])
                continue
            factor = 1.0 if kind in _SAME else self._exact_factor(node, kind)
            if self.ours(node) or factor is None:
                raise LossError(_refused(f"{node.name()} comes between the loss and the mean"))
            if getattr(node, "_saved_alpha", 1) != 1:
                raise LossError(_refused("a factor (alpha=) comes between the loss and the mean"))
            below = [one for one, _ in node.next_functions if one is not None]
            todo += [(one, gradient * factor) for one in below]

    def _alone(self, todo: list[Any]) -> None:
        """Raises if there is another mean over the records below the one that was found."""
        met: set[Any] = set()
        while todo:
            node = todo.pop()
            if node in met or self.ours(node):
                continue
            met.add(node)
            sizes = tuple(getattr(node, "_saved_self_sym_sizes", None) or ())
            mean = node.name().startswith("Mean") and sizes and 0 in dims_of(node, sizes)
            if mean and sizes[0] % self.rows == 0:
                raise LossError(_refused("there may be two means over the rows"))
            todo += [one for one, _ in node.next_functions if one is not None]

    def _values(self, node: Any, kind: str) -> int | None:
        """How many values a mean over the records is of; None if the node is none."""
        below = node.next_functions[0]
        if kind == "Mean":
            sizes = tuple(getattr(node, "_saved_self_sym_sizes", None) or shape_of(*below))
            return math.prod(sizes[dim] for dim in dims_of(node, sizes)) if sizes else 1
        if kind.startswith("NllLoss") and node._saved_reduction == 1:
            # Without a label that is ignored this is the number of positions, if it has the digits.
            total = float(node._saved_total_weight)
            sizes = shape_of(*below)
            whole = math.prod(size for dim, size in enumerate(sizes) if dim != 1)
            return whole if total == whole and node._saved_weight is None else None
        if kind == "Div":
            number = _number(getattr(node, "_saved_other", None))
            return self.rows if number == self.rows else None
        return None

    @staticmethod
    def _exact_factor(node: Any, kind: str) -> float | None:
        if kind not in ("Mul", "Div"):
            return None
        for name in ("_saved_other", "_saved_self"):
            number = _number(getattr(node, name, None))
            if number is not None and _power_of_two(number):
                return 1 / number if kind == "Div" else number
        return None


def _number(value: Any) -> float | None:
    """A plain number, or a tensor with one that no gradient comes to."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.requires_grad else None
    return float(value) if isinstance(value, (int, float)) else None


def _power_of_two(value: float) -> bool:
    return math.isfinite(value) and abs(math.frexp(value)[0]) == 0.5


@functools.lru_cache(maxsize=4096)
def _undone(kind: str, rows: int, values: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether B, divided by the number of values, is what 1 is, divided by those of one record."""

    def divided(gradient: int, values: int) -> Tensor:
        g = torch.full((), gradient, dtype=dtype, device=device)
        if kind != "NllLoss" and kind != "NllLoss2D":
            return (g.expand(values) / values)[:1]
        total = torch.full((), values, dtype=dtype, device=device)
        target = torch.zeros(values, dtype=torch.long, device=device)
        out = torch.zeros(values, 1, dtype=dtype, device=device)
        found: Tensor = torch.ops.aten.nll_loss_backward(g, out, target, None, 1, -100, total)
        return found[0]

    return bool(torch.equal(divided(rows, values), divided(1, values // rows)))
