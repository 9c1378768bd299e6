"""Checks that row i of a batch stays the record that was drawn as number i, and that one alone."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from ..randomness._forward import drawing_from
from ._examples import called, evaluating, select_rows

_ROWS = 8
_TRIES = 8


def check_augment(augment: Callable[[Any], Any], blank: Any) -> None:
    """Tries ``augment`` on rows of zeros, one of which is not a number.

    Args:
        augment: What the user gave to ``make_private``.
        blank: One record of zeros, as a batch.

    Raises:
        ValueError: It changed other rows by that one, or moved it.

    **Edge cases.** Rows without floating-point numbers tell nothing, and neither does an
    ``augment`` that fails on made-up rows.
    """
    for attempt in range(_TRIES):
        row = attempt % _ROWS
        batch = tree_map(lambda leaf, row=row: _poisoned(leaf, row), blank)
        with drawing_from(os.urandom(32)):
            try:
                made = augment(batch)
            except Exception:  # what it does to real rows is told there
                return
        for leaf in _leaves(made, _ROWS):
            if leaf.is_floating_point():
                spoiled = leaf.reshape(_ROWS, -1).isnan().any(1)
                spoiled[row] = False
                if bool(spoiled.any()):
                    raise ValueError(
                        "augment= mixes rows, or moves them: on made-up rows, one that is not a "
                        "number reached others. One record would change the gradients of several "
                        "rows, and ε would not hold. It must change each row by itself (no mixup, "
                        "no cutmix, no statistics of the batch, no shuffling)"
                    )


def _poisoned(leaf: Any, row: int) -> Any:
    if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != 1:
        return leaf
    rows = leaf.repeat(_ROWS, *[1] * (leaf.dim() - 1))
    if rows.is_floating_point():
        rows[row] = torch.nan
    return rows


def _leaves(batch: Any, rows: int) -> list[Tensor]:
    """The tensors of a batch that have a row for each record."""
    found = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]
    return [leaf for leaf in found if leaf.dim() and leaf.shape[0] == rows]


def check_module(module: nn.Module, batch: Any, rows: int) -> None:
    """Tries whether a module keeps rows at their places on the way to its layers.

    Args:
        module: The user's.
        batch: Made-up records: (inputs, targets), or fields by name.
        rows: Their number, which is no other dimension in sight.

    Raises:
        ValueError: A layer gets the same rows in another order, as if they were sorted.

    **Edge cases.** A module that can't be called with the first element of a batch, or with all
    fields but the labels, is not judged, and neither is a layer whose input has no row for each
    record. Sorting that made-up records don't show is not found.
    """
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    try:
        made = [_layer_inputs(module, one, rows) for one in (batch, select_rows(batch, order))]
    except Exception:  # what it does to real rows is told there
        return
    for name in made[0].keys() & made[1].keys():
        if _moved(made[0][name][order], made[1][name]):
            raise ValueError(
                f"the module puts the rows of a batch into another order before {name!r}, but with "
                "units= the rows of a unit are known by their places: one unit would count as "
                "several, and ε would not hold. Keep the order (torch's recurrent layers sort by "
                "themselves: pack_padded_sequence(..., enforce_sorted=False))"
            )


def _layer_inputs(module: nn.Module, batch: Any, rows: int) -> dict[str, Tensor]:
    """The first input of every layer that is trained."""
    inputs: dict[str, Tensor] = {}
    hooks = [
        part.register_forward_pre_hook(lambda _, given, name=name: _note(inputs, name, given, rows))
        for name, part in module.named_modules()
        if name and any(p.requires_grad for p in part.parameters(recurse=False))
    ]
    try:
        with torch.no_grad(), evaluating(module):
            called(module, _inputs(batch))
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


def _inputs(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if "label" not in str(key)}
    return batch[0] if isinstance(batch, (list, tuple)) else batch


def _note(inputs: dict[str, Tensor], name: str, given: Any, rows: int) -> None:
    """The first input of a layer, with its rows in front."""
    if name in inputs or not given or not isinstance(given[0], Tensor):
        return
    places = [place for place, size in enumerate(given[0].shape) if size == rows]
    if len(places) == 1:
        inputs[name] = given[0].detach().movedim(places[0], 0).reshape(rows, -1).double()


def _moved(expected: Tensor, found: Tensor) -> bool:
    """Whether a row that is not at its place stands at another one."""
    if expected.shape != found.shape:
        return False
    away = torch.cdist(expected, found)
    same = 1e-4 * max(float(expected.norm(dim=1).max()), 1e-12)
    elsewhere = (away.diagonal() > 10 * same) & (away.min(1).values <= same)
    return bool(elsewhere.any())


class OrderedCollate:
    """A ``collate_fn`` whose batches are checked for the order of their rows.

    The rows of a unit are known by their places in the batch. A ``collate_fn`` that sorts, by
    length for example, would give them to other units, and one unit would count several times.
    The check is made at the batches 1, 2, 4, 8, ..., in the process that collates.

    Args:
        collate: The user's.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate
        self._batches = 0

    def __call__(self, records: list[Any]) -> Any:
        """What the user's function makes of the records.

        Raises:
            ValueError: It puts them into another order.
        """
        if len(records) > 1:
            self._batches += 1
            if not self._batches & (self._batches - 1) and self._moves(records):
                raise ValueError(
                    "the collate_fn puts records into another order, but with units= the rows of "
                    "a unit are known by their places: one unit would count as several, and ε "
                    "would not hold. Keep the order of the list"
                )
        return self._collate(records)

    def _moves(self, records: list[Any]) -> bool:
        """Whether shuffled records give the same rows, but not shuffled in the same way."""
        key, made = os.urandom(32), []
        order = torch.randperm(len(records), generator=torch.Generator().manual_seed(0)).tolist()
        for some in (records, [records[i] for i in order]):
            with drawing_from(key):
                try:
                    made.append(_leaves(self._collate(copy.deepcopy(some)), len(records)))
                except Exception:  # it is told where the batch itself is made
                    return False
        for one, other in zip(*made, strict=False):
            rows, shuffled = _bytes(one), _bytes(other)
            if shuffled != [rows[i] for i in order] and Counter(rows) == Counter(shuffled):
                return True
        return False


def _bytes(leaf: Tensor) -> list[bytes]:
    flat = leaf.detach().cpu().reshape(len(leaf), -1).contiguous()
    return [row.view(torch.uint8).numpy().tobytes() for row in flat]
