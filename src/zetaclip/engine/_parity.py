"""Checks that per-example gradients are correct, on any model."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..gradients import CaptureBuffer, Chunk, Layout, make_shadows
from ._examples import PADDED, Collate, Examples, LossFn, evaluating, run_backward
from ._validation import check_module, raise_refusals, structural_refusals

# Relative error, in L2 norm, below which two ways of computing one gradient are the same, by
# precision.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}


@dataclass(frozen=True)
class LayerParity:
    """One parameter: how far the fast per-example gradients are from the loop's."""

    parameter: str
    path: str
    error: float
    ok: bool


@dataclass(frozen=True)
class Parity:
    """The verdict, layer by layer; true in a boolean context when all agree. Prints as a table."""

    ok: bool
    layers: tuple[LayerParity, ...]
    clipped_sum_error: float
    note: str = ""

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        width = max(len(layer.parameter) for layer in self.layers)
        lines = [
            f"{'ok ' if layer.ok else 'OFF'}  {layer.parameter.ljust(width)}  {layer.error:.1e}  "
            f"{layer.path}"
            for layer in self.layers
        ]
        lines.append(f"clipped sum: relative error {self.clipped_sum_error:.1e}")
        return "\n".join([*lines, self.note] if self.note else lines)


def check_parity(
    module: nn.Module,
    batch: Any,
    loss_fn: LossFn,
    loss_reduction: str = "mean",
    *,
    collate_fn: Collate | None = None,
) -> Parity:
    """Checks that per-example gradients and their clipped sum are those of one example at a time.

    The reference is autograd. A loss that divides by something else than the rows of its batch
    (``ignore_index``, class weights) is found here: pass such a loss as a sum.

    Args:
        module: The module. It is copied, and the copy is put into evaluation mode, because dropout
            would hide differences.
        batch: A few records that differ as your data do: class weights do not show on records of
            one class. With ``collate_fn``, a list of a dozen records, short and long, as the data
            set gives them.
        loss_fn: ``loss_fn(module, batch)`` returns the loss of a batch.
        loss_reduction: What you will give to ``make_private``, "mean" or "sum".
        collate_fn: Makes a batch of records; it must do the same thing every time. Each record is
            compared with itself collated alone, which also shows whether padding to the longest
            record of a batch changes anything.

    Returns:
        The largest differences, of each layer and of the sum.

    Raises:
        ValueError: Nothing in the module is trained, or it can't be trained privately.
    """
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(f"loss_reduction must be 'mean' or 'sum', not {loss_reduction!r}")
    raise_refusals(list(structural_refusals(module)))  # hooks of parameters are not copied
    module = copy.deepcopy(module)
    check_module(module)
    module.zero_grad(set_to_none=True)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError("no parameter of the module requires a gradient")
    layout = Layout.of(named)
    examples = Examples(module, batch, collate_fn)
    with evaluating(module):
        return _checked(module, named, layout, examples, loss_fn, loss_reduction)


def _checked(
    module: nn.Module,
    named: dict[str, nn.Parameter],
    layout: Layout,
    examples: Examples,
    loss_fn: LossFn,
    loss_reduction: str,
) -> Parity:
    rows = examples.rows
    loop = torch.stack(
        [_one(module, examples.one(i), loss_fn, layout) for i in range(rows)]
    ).double()
    recorder = CaptureBuffer()
    shadows, refusals = make_shadows(module, set(named.values()), recorder)
    raise_refusals(refusals)
    for shadow in shadows:
        shadow.attach()
    recorder.open(rows)
    run_backward(module, examples.batch, loss_fn)
    outside = [name for name, p in named.items() if p.grad is not None]
    scale = float(rows) if loss_reduction == "mean" else 1.0
    with torch.no_grad():
        chunk = Chunk(recorder.take(), layout, rows, scale)
        fast = torch.cat(list(chunk.pieces())).double()
        norms = chunk.norms()
        clip = float(loop.norm(dim=1).median())
        factors = clip / norms.clamp_min(clip) if clip > 0 else torch.ones_like(norms)
        total = torch.zeros(layout.numel, dtype=torch.float64, device=layout.device)
        chunk.add_weighted_sum(total, factors)
    wanted = (
        loop * (clip / loop.norm(dim=1, keepdim=True).clamp_min(clip) if clip > 0 else 1.0)
    ).sum(0)
    error = _relative(total, wanted, wanted)
    return _compare(named, layout, shadows, loop, fast, error, outside, examples.padded)


def _one(module: nn.Module, example: Any, loss_fn: LossFn, layout: Layout) -> Tensor:
    """One example's gradient, by backward: reentrant checkpointing refuses torch.autograd.grad."""
    run_backward(module, example, loss_fn)
    found = [
        (torch.zeros_like(p) if p.grad is None else p.grad).flatten().to(layout.dtype)
        for p in layout.parameters
    ]
    for parameter in layout.parameters:
        parameter.grad = None
    return torch.cat(found)


def _relative(found: Tensor, wanted: Tensor, everything: Tensor) -> float:
    """Error relative to the size of the gradient.

    For a layer with a very small gradient it is relative to a share of the whole gradient.
    """
    size = max(float(wanted.norm()), 1e-3 * float(everything.norm()))
    error = float((found - wanted).norm())
    return error / size if size > 0 else error


def _compare(
    named: dict[str, nn.Parameter],
    layout: Layout,
    shadows: list,
    loop: Tensor,
    fast: Tensor,
    sum_error: float,
    outside: list[str],
    padded: bool,
) -> Parity:
    paths: dict[nn.Parameter, list[str]] = {}
    for shadow in shadows:
        for parameter in shadow.parameters.values():
            paths.setdefault(parameter, []).append(shadow.path)
    tolerance = max(_TOLERANCE.get(p.dtype, 1e-3) for p in named.values())
    layers = []
    for name, parameter, offset in zip(
        layout.names, layout.parameters, layout.offsets, strict=True
    ):
        part = slice(offset, offset + parameter.numel())
        error = _relative(fast[:, part], loop[:, part], loop)
        path = ", ".join(dict.fromkeys(paths.get(parameter, ["none"])))
        layers.append(LayerParity(name, path, error, error <= tolerance and name not in outside))
    note = ""
    if outside:
        note = (
            "used outside their layer's forward, so that autograd wrote .grad itself: "
            f"{', '.join(outside)}"
        )
    elif padded and not all(layer.ok for layer in layers):
        note = f"{PADDED}, unless the loss mixes records in another way"
    elif all(not layer.ok for layer in layers):
        note = (
            "every layer is off: the loss probably does not divide by the rows of its batch "
            "(ignore_index, class weights, a mean over tokens, or a sum). Return the sum over "
            "records and pass loss_reduction='sum'"
        )
    ok = all(layer.ok for layer in layers) and sum_error <= tolerance
    return Parity(ok, tuple(layers), sum_error, note)
