"""A few records as one batch and each by itself, and a module run on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from ..gradients.fallback import untensored
from ._records import record_shapes, shapes_differ

LossFn = Callable[[nn.Module, Any], Tensor]
Collate = Callable[[list[Any]], Any]

PADDED = (
    "the records are padded to the longest one of their batch, and the padding reaches the "
    "gradients of the others: pad to one public length, or mask the padding in model and loss"
)


def rows_of(batch: Any) -> int:
    """The number of records of a batch: the first dimension of its first tensor."""
    for leaf in tree_flatten(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    raise ValueError("the batch has no tensor with a dimension for the records")


def select_rows(batch: Any, rows: Tensor) -> Any:
    """The same batch with these records only."""
    count = rows_of(batch)

    def one_each(leaf: Any) -> bool:
        """Numbers or texts, one for each record, as a ``collate_fn`` may give them."""
        return untensored(leaf) and len(leaf) == count

    def pick(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == count:
            return leaf[rows.to(leaf.device)]
        if one_each(leaf):
            return (
                leaf[rows.numpy()]
                if isinstance(leaf, np.ndarray)
                else type(leaf)(leaf[i] for i in rows.tolist())
            )
        return leaf

    return tree_map(pick, batch, is_leaf=one_each)


def called(module: nn.Module, inputs: Any) -> Any:
    """What the module says to inputs by name, several inputs, or one."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, (list, tuple)) else module(inputs)


def unmistakable(module: nn.Module, batch: Any) -> Tensor:
    """Indices of records, so many that no other dimension of the model has the same size.

    Records are repeated if there are too few.
    """
    taken = dimensions(module, batch)
    count = next(
        n for n in (11, 13, 17, 7, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61) if n not in taken
    )
    return _one_of_each(batch)[torch.arange(count) % rows_of(batch)]


def dimensions(module: nn.Module, batch: Any) -> set[int]:
    taken = {int(d) for p in module.parameters() for d in p.shape}
    for leaf in tree_flatten(batch)[0]:
        if isinstance(leaf, Tensor):
            taken |= {int(d) for d in leaf.shape[1:]}
    return taken


def _one_of_each(batch: Any) -> Tensor:
    """All records, beginning with one of each label.

    Class weights do not show in a loss over records of one class.
    """
    rows = rows_of(batch)
    first: list[int] = []
    for leaf in tree_flatten(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.shape == (rows,) and not leaf.is_floating_point():
            first += np.sort(np.unique(leaf.cpu().numpy(), return_index=True)[1]).tolist()
    return torch.tensor(list(dict.fromkeys([*first, *range(rows)])))


class Examples:
    """Some records as one batch, and each of them by itself."""

    def __init__(self, module: nn.Module, batch: Any, collate_fn: Collate | None) -> None:
        self._collate = collate_fn
        if collate_fn is None:
            self.batch = select_rows(batch, unmistakable(module, batch))
            self.rows = rows_of(self.batch)
            return
        records = list(batch)
        if not records:
            raise ValueError("with collate_fn=, batch is a list of records; there is none in it")
        taken = dimensions(module, collate_fn(records))
        # All of them: the one that makes the others longer may be the last.
        self.rows = next(n for n in itertools.count(max(7, len(records))) if n not in taken)
        self._records = [records[i % len(records)] for i in range(self.rows)]
        self.batch = collate_fn(self._records)

    def one(self, i: int) -> Any:
        if self._collate is None:
            return select_rows(self.batch, torch.tensor([i]))
        return self._collate([self._records[i]])

    @property
    def padded(self) -> bool:
        """Whether a record looks different by itself."""
        if self._collate is None:
            return False
        whole = record_shapes(self.batch, self.rows)
        return any(shapes_differ(record_shapes(self.one(i), 1), whole) for i in range(self.rows))


def run_backward(module: nn.Module, batch: Any, loss_fn: LossFn) -> None:
    loss = loss_fn(module, batch)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise ValueError("loss_fn(module, batch) must return the loss as a tensor with one value")
    loss.backward()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, with torch's own recurrent layers in place of cuDNN's.

    cuDNN's have no backward in evaluation mode.
    """
    modes = [(part, part.training) for part in module.modules()]
    cudnn = torch.backends.cudnn.enabled
    module.eval()
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = cudnn
        for part, mode in modes:
            part.training = mode
