"""A run, or a loss, tried on made-up records before the first batch.

Shapes come from the data, values never do.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from ..errors import LossError, OwnerWarning
from ..randomness._forward import untouched
from ._dry_run import misreduced, reduction_problems, without_trace
from ._examples import LossFn, called, dimensions, evaluating, select_rows
from ._loader import PoissonLoader
from ._loop import PrivateLoop
from ._loss_check import PAIRS, WEIGHTED, verdict
from ._loss_graph import classified
from ._records import zero_row
from ._row_order import check_module

_COUNTS = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
_ONES = ("mask",)  # in the name of a field: a mask of zeros would hide the record


class MadeUp:
    """A few records of the right shape.

    Floats are normal, whole numbers are 0 or 1 (just 0 with ``plain``).
    """

    padded = False

    def __init__(self, row: Any, rows: int, *, plain: bool = False) -> None:
        self.rows = rows
        generator = torch.Generator().manual_seed(0)

        def filled(leaf: Any, name: str = "") -> Any:
            if isinstance(leaf, Mapping):
                return {key: filled(value, str(key)) for key, value in leaf.items()}
            if isinstance(leaf, (list, tuple)) and not hasattr(leaf, "_fields"):
                return type(leaf)(filled(value, name) for value in leaf)
            if not isinstance(leaf, Tensor) or not leaf.dim():
                return leaf
            shape = (rows, *leaf.shape[1:])
            if any(word in name for word in _ONES):
                made = torch.ones(shape)
            elif leaf.is_floating_point():
                made = torch.randn(shape, generator=generator)
            else:
                made = (
                    torch.zeros(shape) if plain else torch.randint(0, 2, shape, generator=generator)
                )
            return made.to(leaf.device, leaf.dtype)

        self.batch = filled(row)

    def one(self, i: int) -> Any:
        return select_rows(self.batch, torch.tensor([i]))


def _fitting(module: nn.Module, row: Any) -> int:
    """A number of records that is no other dimension in sight."""
    taken = dimensions(module, row)
    return next(count for count in _COUNTS if count not in taken)


def rehearse(
    loop: PrivateLoop, source: PoissonLoader | MadeUp, loss_fn: LossFn, reduction: str | None = None
) -> None:
    """Compares loss and gradients of a few made-up records in a batch with those of each alone.

    Args:
        loop: the private loop, between two batches.
        source: the run's loader, for the shapes of its first record; or made-up records.
        loss_fn: ``loss_fn(module, batch)``, as in ``engine.validate``.
        reduction: what the loss should be; by default the ``loss_reduction`` of the run.

    Raises:
        LossError: the loss is reduced otherwise, or mixes records.

    **Guarantee.** No record is looked at. The streams of torch on the CPU, numpy and Python, and
    weights, buffers and attributes of the module, are as before afterwards.
    **Edge cases.** A loss that can't be computed on such records (it may need labels of its own
    kind), or that draws random numbers in evaluation mode, is not judged here; the first batch is,
    by its graph. A GPU's own generator is not set back.
    """
    module, layout, recorder = loop.model.module, loop.model.layout, loop.model.recorder
    device = layout.device
    reduction = reduction or loop.settings.loss_reduction

    def finite(module: nn.Module, batch: Any) -> Tensor:
        loss = loss_fn(
            module,
            tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch),
        )
        if not math.isfinite(float(loss.detach())):
            raise ArithmeticError
        return loss

    tries = [source] if isinstance(source, MadeUp) else _from(source, module, device)
    problems: list[str] = []
    for examples in tries:
        with untouched(), without_trace(module, layout, recorder), _attributes_kept(module):
            try:
                with torch.no_grad(), evaluating(module):
                    again = [float(finite(module, examples.batch)) for _ in range(2)]
                if (
                    again[0] != again[1]
                ):  # it draws noise of its own, other noise for each record alone
                    return
                problems = list(
                    reduction_problems(module, layout, recorder, examples, finite, reduction)
                )
                break
            except Exception:  # whatever is wrong with the model is told where it is trained
                continue
    if problems:
        raise LossError(f"on made-up records, {problems[0]}")


def _from(loader: PoissonLoader, module: nn.Module, device: torch.device) -> list[MadeUp]:
    try:
        row = loader.blank()
        rows = _fitting(module, row)
    except Exception:  # a record that can't be read alone
        return []
    # Where a label is out of range, a GPU stops for good; there whole numbers are all zero.
    return [
        MadeUp(row, rows, plain=plain)
        for plain in ((False, True) if device.type == "cpu" else (True,))
    ]


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Undoes what a forward leaves in plain attributes: running metrics, lists of outputs."""
    held = []
    for part in module.modules():
        own = {name: value for name, value in vars(part).items() if not name.startswith("_")}
        inside = {
            name: _copied(value)
            for name, value in own.items()
            if isinstance(value, (Tensor, list, dict, set))
        }
        held.append((part, own, inside))
    try:
        yield
    finally:
        for part, own, inside in held:
            for name in [
                name for name in vars(part) if not name.startswith("_") and name not in own
            ]:
                del vars(part)[name]
            vars(part).update(own)
            for name, value in inside.items():
                _put_back(own[name], value)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def _put_back(place: Any, value: Any) -> None:
    if isinstance(place, Tensor):
        if not torch.equal(place, value):
            place.detach().copy_(value)
    elif isinstance(place, list):
        place[:] = value
    else:
        place.clear()
        place.update(value)


def rehearse_order(module: nn.Module, loader: DataLoader) -> None:
    """Tries on made-up records whether the module keeps the order of rows; for units.

    Args:
        module: The user's.
        loader: The user's, for the shapes of its first record.

    Raises:
        ValueError: It does not.
    """
    device = next(module.parameters()).device
    try:
        row = zero_row(loader)
        examples = MadeUp(
            tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, row),
            _fitting(module, row),
        )
    except Exception:  # a record that can't be read alone
        return
    with untouched(), _attributes_kept(module):
        check_module(module, examples.batch, examples.rows)


# -- make_private(criterion=...)


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
    rows = next(count for count in _COUNTS[2:] if count not in dimensions(module, row))
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
            _attributes_kept(module),
        ):
            outputs = called(module, inputs)
        for buffer, before in buffers:
            _put_back(buffer, before)
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
