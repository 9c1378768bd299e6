"""engine.validate: a private module tried on a few records, without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..gradients import CaptureBuffer, CaptureError, Chunk, Layout
from ..gradients.capture import exact
from ..randomness._forward import untouched
from ._examples import PADDED, Collate, Examples, LossFn, evaluating, run_backward
from ._power import PowerIterations


def reduction_problems(
    module: nn.Module,
    layout: Layout,
    recorder: CaptureBuffer,
    examples: Any,
    loss_fn: LossFn,
    reduction: str,
) -> Iterator[str]:
    """Whether loss and gradients of a batch are the mean (or sum) of those of its records.

    The module is in evaluation mode. Both loss and gradients are compared: an untrained model may
    have the same loss for every record, and then wrong weights do not show in the loss. Of the
    gradients only the norms are compared, which takes little memory.
    """
    dtype = torch.float32

    def looked_at(batch: Any, rows: int, scale: float) -> tuple[float, Tensor]:
        nonlocal dtype
        recorder.open(rows)
        loss = loss_fn(module, batch)
        dtype = loss.dtype
        loss.backward()
        with torch.no_grad(), exact(layout.device):
            return float(loss.detach()), Chunk(
                recorder.take(), layout, rows, scale
            ).norms().double().cpu()

    count = examples.rows
    try:
        with evaluating(module):
            whole, found = looked_at(
                examples.batch, count, float(count) if reduction == "mean" else 1.0
            )
            each = [looked_at(examples.one(i), 1, 1.0) for i in range(count)]
    finally:
        recorder.close()
    wanted = torch.cat([norm for _, norm in each])
    cause = PADDED if examples.padded else ""
    # Half precision has fewer digits, and so may kernels of a GPU.
    coarse = (
        50
        if recorder.short or dtype in (torch.bfloat16, torch.float16)
        else 1
        if layout.device.type == "cpu"
        else 10
    )
    least = max(1e-3 * float(wanted.max()), 1e-12)  # norms hold an allowance for underflow
    if problem := misreduced(whole, [loss for loss, _ in each], reduction, cause, 1e-3 * coarse):
        yield problem
    elif off := int(
        (~((found - wanted).abs() <= min(1e-2 * coarse, 0.2) * wanted.clamp_min(least))).sum()
    ):
        yield (
            f"the gradients of {off} of {count} records are others in a batch than by themselves, "
            f"with loss_reduction={reduction!r}: "
            + (
                cause
                or "the loss weighs records by what else is in the batch (class weights), or "
                "mixes them"
            )
        )


def misreduced(
    whole: float, own: list[float], reduction: str, cause: str = "", tolerance: float = 1e-3
) -> str:
    """What is wrong with the loss of a batch, given the losses of its records; "" if nothing is."""
    forms = {"mean": sum(own) / len(own), "sum": sum(own)}

    def near(form: str) -> bool:
        return abs(whole - forms[form]) <= tolerance * max(abs(whole), abs(forms[form]), 1e-6)

    if near(reduction):
        return ""
    other = "sum" if reduction == "mean" else "mean"
    if near(other):
        cause = (
            f'it is their {other}: give make_private loss_reduction="{other}", or the loss '
            f'reduction="{reduction}"'
        )
    return (
        f"the loss of {len(own)} records is {whole:.4g}, but loss_reduction={reduction!r} of their "
        f"own losses is {forms[reduction]:.4g}: "
        + (
            cause
            or "it divides by something else (ignore_index, class weights, a mean over tokens) "
            "or mixes records. Use zetaclip.losses, or "
            'reduction="sum" with loss_reduction="sum"'
        )
    )


def dry_run(
    module: nn.Module,
    layout: Layout,
    recorder: CaptureBuffer,
    batch: Any,
    loss_fn: LossFn,
    reduction: str,
    collate_fn: Collate | None = None,
) -> list[str]:
    """Runs a private module forward and backward on a few records, and names what went wrong.

    The module is left as it was.
    """
    problems: list[str] = []
    examples = Examples(module, batch, collate_fn)
    with untouched(), without_trace(module, layout, recorder) as buffers:
        try:
            recorder.open(examples.rows)
            run_backward(module, examples.batch, loss_fn)
            problems += _training_problems(module, layout, recorder, buffers)
            problems += reduction_problems(module, layout, recorder, examples, loss_fn, reduction)
        except CaptureError as problem:
            problems.append(str(problem))
    return problems


def _training_problems(
    module: nn.Module, layout: Layout, recorder: CaptureBuffer, buffers: dict[str, Tensor]
) -> Iterator[str]:
    """Runs one forward and backward in training mode.

    It names the parameters without a gradient and the buffers that have changed.
    """
    for name, parameter in zip(layout.names, layout.parameters, strict=True):
        used, came = (
            recorder.forwards.get(id(parameter), 0),
            len(recorder.received.get(id(parameter), ())),
        )
        if parameter.grad is not None:
            yield f"{name}: used outside its layer's forward, so its gradient would not be private"
        elif came == 0:
            yield (
                f"{name}: no gradient came back; it is not used, or its output does not reach "
                "the loss"
            )
        elif came < used:
            yield f"{name}: used {used} times, but its gradient came back {came} times"
    for name, buffer in module.named_buffers():
        if name not in buffers:
            yield (
                f"{name}: the training forward builds this buffer on first use; run it once "
                "before make_private, on made-up records"
            )
        elif not torch.equal(buffer, buffers[name]):
            yield (
                f"{name}: the training forward changes this buffer, which is neither clipped "
                "nor noised"
            )


@contextmanager
def without_trace(
    module: nn.Module, layout: Layout, recorder: CaptureBuffer
) -> Iterator[dict[str, Tensor]]:
    """A context in which a private module can be run on any records.

    It gives copies of the buffers by name. At its end, buffers and gradients are as before.
    """
    held = [(part, dict(part._buffers)) for part in module.modules()]
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    grads, short = [p.grad for p in layout.parameters], recorder.short
    power = PowerIterations(module)
    power.hold()
    try:
        for parameter in layout.parameters:
            parameter.grad = None
        with untouched():
            yield buffers
    finally:
        recorder.close()
        power.let_go()
        recorder.short = short
        with torch.no_grad():
            for part, own in held:
                part._buffers.clear()
                part._buffers.update(own)
            for name, buffer in module.named_buffers():
                if not torch.equal(buffer, buffers[name]):
                    buffer.copy_(buffers[name])
        for parameter, grad in zip(layout.parameters, grads, strict=True):
            parameter.grad = grad
