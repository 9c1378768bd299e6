"""A criterion tried on made-up outputs and targets, before it sees a record."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..errors import LossError, OwnerWarning
from ..randomness._forward import untouched
from ._dry_run import misreduced
from ._examples import called, dimensions, evaluating, select_rows
from ._loss_check import PAIRS, WEIGHTED, verdict
from ._loss_graph import classified
from ._rehearsal import COUNTS, MadeUp, attributes_kept, put_back


def check_criterion(
    module: nn.Module,
    criterion: Callable[[Any, Any], Tensor],
    row: Any,
    reduction: str,
    warn: Callable[..., None],
) -> None:
    """Tries ``criterion(outputs, targets)`` on made-up records.

    Raises ``LossError`` if it mixes records, or is reduced otherwise than declared.

    Args:
        module: gives the shape of outputs, in evaluation mode, on made-up inputs.
        criterion: the loss.
        row: one record of zeros, as ``sampling.zero_row`` makes it: (inputs, targets).
        reduction: the declared one.
        warn: is called with (message, category) where the criterion can't be computed on such rows.
    """
    if not callable(criterion):
        raise TypeError(
            f"criterion must be a function of (outputs, targets), not {type(criterion).__name__}"
        )
    if not isinstance(row, (list, tuple)) or len(row) != 2:
        raise TypeError(
            "criterion= needs a loader whose batches are (inputs, targets); for others use "
            "engine.validate"
        )
    device = next(module.parameters()).device
    with untouched():
        _check_criterion(module, criterion, row, reduction, device, warn)


def _check_criterion(
    module: nn.Module,
    criterion: Callable,
    row: Any,
    reduction: str,
    device: torch.device,
    warn: Callable[..., None],
) -> None:
    rows = next(count for count in COUNTS[2:] if count not in dimensions(module, row))
    problem: Exception | None = None
    for outputs, targets in _pairs(module, row, rows, device):
        try:
            whole, found, trails = _graded(criterion, outputs, targets)
            if _graded(criterion, outputs, targets)[0] != whole:
                raise ArithmeticError("it draws random numbers")
        except Exception as error:  # labels of another kind, or probabilities that must be some
            problem = error
            continue
        for trail in trails:
            wrong, _, _ = verdict(trail, reduction, True)
            if wrong and not trail.paired:  # those are compared below; a shape may be chance
                raise LossError(f"criterion: {wrong}")
        paired = next(
            (f"{PAIRS.format(trail.paired)}. {WEIGHTED}" for trail in trails if trail.paired), ""
        )
        try:
            each = [
                _graded(criterion, *select_rows((outputs, targets), torch.tensor([i])))
                for i in range(rows)
            ]
        except Exception as error:
            raise LossError(
                f"criterion can't be computed for one record alone ({type(error).__name__}), so "
                f"it mixes records. {WEIGHTED}"
            ) from error
        said = misreduced(whole, [loss for loss, _, _ in each], reduction)
        if said:
            raise LossError(f"criterion, on made-up rows: {paired or said}")
        wanted = torch.cat([gradient for _, gradient, _ in each])
        scaled = found * (rows if reduction == "mean" else 1)
        if not float((scaled - wanted).norm()) <= 1e-3 * max(float(wanted.norm()), 1e-12):
            raise LossError(
                "criterion: "
                + (paired or f"the gradient of a row depends on the other rows. {WEIGHTED}")
            )
        return
    words = "" if problem is None else f" ({type(problem).__name__}: {problem})"
    warn(
        f"criterion= could not be computed on made-up rows{words}, and was not checked. Use "
        "engine.validate with records of your own",
        OwnerWarning,
    )


def _pairs(
    module: nn.Module, row: Any, rows: int, device: torch.device
) -> Iterator[tuple[Tensor, Any]]:
    """Outputs and targets to try, the most telling ones first."""
    generator = torch.Generator().manual_seed(1)
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    for plain in (False, True):
        inputs, targets = tree_map(
            lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf,
            MadeUp(row, rows, plain=plain).batch,
        )
        outputs = None
        with (
            contextlib.suppress(Exception),
            torch.no_grad(),
            evaluating(module),
            attributes_kept(module),
        ):
            outputs = called(module, inputs)
        for buffer, before in buffers:
            put_back(buffer, before)
        if not isinstance(outputs, Tensor) or outputs.shape[:1] != (rows,):
            continue
        classes = outputs.shape[1] if outputs.dim() > 1 and outputs.shape[1] > 1 else 2
        noise = torch.randn(outputs.shape, generator=generator).to(outputs)
        spread = tree_map(lambda leaf, of=classes: _spread(leaf, of, generator), targets)
        for made in (outputs + noise, outputs):
            yield made, spread
            yield made, targets


def _spread(leaf: Any, classes: int, generator: torch.Generator) -> Any:
    """Targets of all classes, and floats between 0 and 1."""
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.is_floating_point():
        return torch.rand(leaf.shape, generator=generator).to(leaf)
    return (torch.arange(leaf.numel()).reshape(leaf.shape) % classes).to(leaf)


def _graded(criterion: Callable, outputs: Tensor, targets: Any) -> tuple[float, Tensor, set]:
    """The loss, its gradient for each row, and what its graph says."""
    given = outputs.detach().clone().requires_grad_()
    with torch.enable_grad():
        loss = criterion(given, targets)
        if not isinstance(loss, Tensor) or loss.dim():
            raise TypeError(
                "criterion(outputs, targets) must return the loss as a tensor with one value"
            )
        leaf = given.grad_fn or torch.autograd.graph.get_gradient_edge(given).node
        rows = given.shape[0]
        trails = (
            classified([(loss, None)], rows, frozenset(), lambda node: node is leaf)
            if rows > 1
            else set()
        )
        (gradient,) = torch.autograd.grad(loss, given)
    value = float(loss.detach())
    if not (math.isfinite(value) and bool(gradient.isfinite().all())):
        raise ArithmeticError("the loss is not finite")
    return value, gradient.detach().double(), trails
