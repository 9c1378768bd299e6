"""The rule of nn.LSTM, nn.GRU and nn.RNN: at every step a recurrence is two linear maps.

torch's fused kernels keep the gradients of the gates to themselves. So the recurrence is run here,
step by step for the whole batch, with a backward by hand that leaves the gate gradients of all
steps. Given these, the weights are those of linear layers over a sequence.

All tensors have records first, then steps: (B, T, width).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .capture import HALF, CaptureError, Contributions, LayerCapture, Node, exact
from .cells import cell_of
from .matmul import linear
from .rules import layer_rule, linear_contributions

_WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
_NAMES = frozenset(
    f"{kind}_l{layer}{end}" for kind in _WEIGHTS for layer in range(100) for end in ("", "_reverse")
)


class _Recurrence(Node):
    """One direction of one layer in one node of the graph, computed in at least float32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, h0: Tensor, c0: Tensor, anchor: Tensor, shadow: LayerCapture, end: str
    ) -> tuple[Tensor, Tensor | None]:
        module = shadow.module
        own = {kind: module._parameters.get(f"{kind}_{end}") for kind in _WEIGHTS}
        weight = own["weight_ih"]
        assert weight is not None
        with exact(x.device):
            wide = torch.promote_types(weight.dtype, torch.float32)
            w = {kind: None if p is None else p.to(wide) for kind, p in own.items()}
            cell = cell_of(module)(w)
            inputs = x.to(wide)
            gx = linear(inputs, weight.to(wide), cell.input_offset())
            h, last, kept = cell.forward(gx, h0.to(wide), None if c0 is None else c0.to(wide))
        held = [p for p in w.values() if p is not None]
        ctx.save_for_backward(inputs, *held, *kept)
        ctx.kinds = [kind for kind, p in w.items() if p is not None]
        ctx.shadow, ctx.turn, ctx.end = shadow, shadow.recorder.turn, end
        ctx.dtypes = x.dtype, h0.dtype, None if c0 is None else c0.dtype
        ctx.set_materialize_grads(False)
        if x.dtype in HALF:
            shadow.recorder.half = True
        # A copy: an in-place operation on the output must not change the states.
        return h[:, 1:].to(x.dtype, copy=True), None if last is None else last.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, dc: Tensor | None) -> tuple:
        shadow, recorder = ctx.shadow, ctx.shadow.recorder
        wanted = recorder.wants(ctx.turn)
        x, *rest = ctx.saved_tensors
        w: dict[str, Tensor | None] = dict.fromkeys(_WEIGHTS)
        w |= dict(zip(ctx.kinds, rest, strict=False))
        kept = rest[len(ctx.kinds) :]
        states = kept[0]
        with exact(x.device):
            g = torch.zeros_like(states[:, 1:]) if g is None else recorder.widened(g)
            dc = None if dc is None else recorder.widened(dc)
            cell = cell_of(shadow.module)(w)
            dinputs, dstates, dh0, dc0, projected = cell.backward(g, dc, *kept)
            weight = w["weight_ih"]
            assert weight is not None
            dx = linear(dinputs, weight.t()) if ctx.needs_input_grad[0] else None
            if wanted:
                found = _of(shadow, ctx.end, "ih", dinputs, x)
                found |= _of(shadow, ctx.end, "hh", dstates, states[:, :-1].contiguous())
                both = [f"bias_{kind}_{ctx.end}" for kind in ("ih", "hh")]
                if dinputs is dstates and all(name in found for name in both):
                    found[both[1]] = found[both[0]]
                if projected is not None:
                    found |= _of(shadow, ctx.end, "hr", projected[1], projected[0])
                shadow.hand_over(found)
        found_gradients = (dx, dh0, dc0)
        return (
            *(
                None if d is None else d.to(dtype)
                for d, dtype in zip(found_gradients, ctx.dtypes, strict=True)
            ),
            None,
            None,
            None,
        )


def _of(shadow: LayerCapture, end: str, kind: str, g: Tensor, x: Tensor) -> Contributions:
    return linear_contributions(shadow, g, x, f"weight_{kind}_{end}", f"bias_{kind}_{end}")


def packed(name: str, kind: str) -> CaptureError:
    """The error for an input in which the steps of all records are mixed."""
    return CaptureError(
        f"{name} ({kind}) was given a PackedSequence, in which the steps of all records are mixed, "
        "so the gradient cannot be separated by record. Give it the padded tensor (records, time, "
        "features), and select each record's output at its own last step: "
        "out[torch.arange(len(out)), lengths - 1]"
    )


def _check_layout(shadow: LayerCapture, input: Tensor) -> None:
    """Raises if it is not sure that the second dimension of an input has the records.

    A user who forgets batch_first=True gives (records, time, features) to a layer that reads (time,
    records, features): its states go from record to record. If there are as many records as steps,
    the shapes do not tell. They do as soon as the two numbers differ once.
    """
    steps, rows = input.shape[0], shadow.recorder.rows
    if steps != rows:
        shadow.__dict__["time_first"] = True
    elif rows > 1 and not shadow.__dict__.get("time_first"):
        raise CaptureError(
            f"{shadow.name} has batch_first=False and got as many steps as there are records "
            f"({rows}), so it can't be told whether its input is (time, records, features). Build "
            "it with batch_first=True and feed (records, time, features), or let the first "
            "physical batch have another number of records (physical_batch_size)"
        )


def _forward(shadow: LayerCapture, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
    module: Any = shadow.module
    recorder, lstm = shadow.recorder, isinstance(module, nn.LSTM)
    if isinstance(input, PackedSequence):
        raise packed(shadow.name, type(module).__name__)
    if input.dim() != 3 or module.batch_first:
        recorder.check_rows(input, shadow.name, 3)
    else:
        recorder.check_rows(input.transpose(0, 1), shadow.name)
        _check_layout(shadow, input)
    given = () if hx is None else (hx,) if isinstance(hx, Tensor) else tuple(hx)
    for state in given:
        recorder.check_rows(state.movedim(min(1, state.dim() - 1), 0), f"{shadow.name} (state)")
    if not torch.is_autocast_enabled(input.device.type):
        module.check_input(input, None)
    if given:
        module.check_forward_args(input, hx, None)
    x = input if module.batch_first else input.transpose(0, 1)
    lasts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for layer in range(module.num_layers):
        if layer and module.dropout > 0 and module.training:
            x = F.dropout(x, module.dropout)
        outputs = []
        for direction in range(2 if module.bidirectional else 1):
            place = len(lasts[0])
            width = module.proj_size if lstm and module.proj_size else module.hidden_size
            h0 = given[0][place] if given else x.new_zeros(len(x), width)
            c0 = given[1][place] if given and lstm else None
            if lstm and c0 is None:
                c0 = x.new_zeros(len(x), module.hidden_size)
            end = f"l{layer}{'_reverse' if direction else ''}"
            out, last = _Recurrence.apply(
                x.flip(1) if direction else x, h0, c0, recorder.anchor, shadow, end
            )
            lasts[0].append(out[:, -1])
            if lstm:
                lasts[1].append(last)
            outputs.append(out.flip(1) if direction else out)
        x = torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
    output = x if module.batch_first else x.transpose(0, 1)
    states = torch.stack(lasts[0])
    return output, (states, torch.stack(lasts[1])) if lstm else states


@layer_rule(nn.LSTM, nn.GRU, nn.RNN, path="recurrent", forward=_forward, names=_NAMES)
def _recurrent(shadow: LayerCapture, g: Tensor, x: Tensor) -> Contributions:
    raise AssertionError("a recurrent layer records its steps one layer at a time")
