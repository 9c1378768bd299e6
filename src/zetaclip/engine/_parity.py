"""Whether the fast per-example gradients are those of one example at a time, on anybody's model."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from ..gradients import CaptureBuffer, CaptureError, Chunk, Layout, make_shadows
from ..gradients.capture import exact
from ..gradients.fallback import untensored
from ..randomness._forward import untouched
from ._power import PowerIterations
from ._records import record_shapes, shapes_differ
from ._validation import check_module, raise_refusals, structural_refusals

LossFn = Callable[[nn.Module, Any], Tensor]
Collate = Callable[[list[Any]], Any]

# Relative error, in L2 norm, below which two ways of computing one gradient are the same, by
# precision.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}

_PADDED = (
    "the records are padded to the longest one of their batch, and the padding reaches the "
    "gradients of the others: pad to one public length, or mask the padding in model and loss"
)


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


def unmistakable(module: nn.Module, batch: Any) -> Tensor:
    """Indices of so many records that their number equals no other dimension in sight.

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
    """All records, first one of each label.

    On records of one class, a loss that weighs classes looks like any other.
    """
    rows = rows_of(batch)
    first: list[int] = []
    for leaf in tree_flatten(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.shape == (rows,) and not leaf.is_floating_point():
            first += np.sort(np.unique(leaf.cpu().numpy(), return_index=True)[1]).tolist()
    return torch.tensor(list(dict.fromkeys([*first, *range(rows)])))


class _Examples:
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


def _backward(module: nn.Module, batch: Any, loss_fn: LossFn) -> None:
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


def check_parity(
    module: nn.Module,
    batch: Any,
    loss_fn: LossFn,
    loss_reduction: str = "mean",
    *,
    collate_fn: Collate | None = None,
) -> Parity:
    """Compares one-pass per-example gradients and their clipped sum with autograd.

    Autograd takes one example at a time.

    ``loss_fn(module, batch)`` returns the loss of a batch; ``loss_reduction`` is what will be given
    to ``make_private``. Works on a copy in evaluation mode, so that dropout does not blur the
    comparison; the module is left alone. A loss that divides by something else than the rows of its
    batch (``ignore_index``, class weights) shows up here: pass such a loss as a sum. Give records
    that differ as your data do: on records of one class, class weights can't be seen.

    With ``collate_fn``, ``batch`` is a list of records as the data set gives them (a dozen, short
    and long), and each one is compared with itself collated alone, so that padding to the longest
    record of a batch shows up, too. A batch that is collated already has lost what would tell. All
    records are used, and ``collate_fn`` must do the same thing every time.
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
    examples = _Examples(module, batch, collate_fn)
    with evaluating(module):
        return _checked(module, named, layout, examples, loss_fn, loss_reduction)


def _checked(
    module: nn.Module,
    named: dict[str, nn.Parameter],
    layout: Layout,
    examples: _Examples,
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
    _backward(module, examples.batch, loss_fn)
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
    _backward(module, example, loss_fn)
    found = [
        (torch.zeros_like(p) if p.grad is None else p.grad).flatten().to(layout.dtype)
        for p in layout.parameters
    ]
    for parameter in layout.parameters:
        parameter.grad = None
    return torch.cat(found)


def _relative(found: Tensor, wanted: Tensor, everything: Tensor) -> float:
    """Error relative to the size of the gradient.

    A layer that hardly matters is measured against a share of the whole.
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
        note = f"{_PADDED}, unless the loss mixes records in another way"
    elif all(not layer.ok for layer in layers):
        note = (
            "every layer is off: the loss probably does not divide by the rows of its batch "
            "(ignore_index, class weights, a mean over tokens, or a sum). Return the sum over "
            "records and pass loss_reduction='sum'"
        )
    ok = all(layer.ok for layer in layers) and sum_error <= tolerance
    return Parity(ok, tuple(layers), sum_error, note)


def reduction_problems(
    module: nn.Module,
    layout: Layout,
    recorder: CaptureBuffer,
    examples: Any,
    loss_fn: LossFn,
    reduction: str,
) -> Iterator[str]:
    """Whether loss and gradients of a batch are the mean (or sum) of those of its records.

    In evaluation mode.

    Both are looked at: a model that still says the same about every record has one loss for all of
    them, however they are weighed. Of the gradients the norms are compared, which need no memory to
    speak of.
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
    cause = _PADDED if examples.padded else ""
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
    """What is wrong with the loss of a batch, given those of its records alone.

    Empty if nothing is.
    """
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
    """One forward and backward of a private module on a few records; what went wrong, by name.

    Leaves no trace.
    """
    problems: list[str] = []
    examples = _Examples(module, batch, collate_fn)
    with untouched(), without_trace(module, layout, recorder) as buffers:
        try:
            recorder.open(examples.rows)
            _backward(module, examples.batch, loss_fn)
            problems += _training_problems(module, layout, recorder, buffers)
            problems += reduction_problems(module, layout, recorder, examples, loss_fn, reduction)
        except CaptureError as problem:
            problems.append(str(problem))
    return problems


def _training_problems(
    module: nn.Module, layout: Layout, recorder: CaptureBuffer, buffers: dict[str, Tensor]
) -> Iterator[str]:
    """Gradients that are missing and buffers that moved after a step in training mode.

    The step is one forward and one backward.
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
    """Lets a private module be run on any records.

    Afterwards buffers and gradients are as before.

    Gives copies of the buffers by name.
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
