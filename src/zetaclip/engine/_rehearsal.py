"""A run, or a loss, tried on made-up records before the first batch.

Shapes come from the data, values never do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from ..errors import LossError
from ..randomness._forward import untouched
from ._dry_run import reduction_problems, without_trace
from ._examples import LossFn, dimensions, evaluating, select_rows
from ._loader import PoissonLoader
from ._loop import PrivateLoop
from ._records import zero_row
from ._row_order import check_module

COUNTS = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
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
    return next(count for count in COUNTS if count not in taken)


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
        with untouched(), without_trace(module, layout, recorder), attributes_kept(module):
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
def attributes_kept(module: nn.Module) -> Iterator[None]:
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
                put_back(own[name], value)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def put_back(place: Any, value: Any) -> None:
    """Gives a tensor, a list or a table its earlier content; the object stays the same."""
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
    with untouched(), attributes_kept(module):
        check_module(module, examples.batch, examples.rows)


# -- make_private(criterion=...)
