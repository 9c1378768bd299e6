"""The rule of nn.LSTM, nn.GRU and nn.RNN: at every step a recurrence is two linear maps.

torch's fused kernels keep the gradients of the gates to themselves. So the recurrence is run here,
step by step for the whole batch, with a backward by hand that leaves the gate gradients of all
steps. Given these, the weights are those of linear layers over a sequence.

All tensors have records first, then steps: (B, T, width).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .capture import HALF, CaptureError, Contributions, LayerCapture, Node, exact
from .matmul import linear
from .rules import layer_rule, linear_contributions

_WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
_NAMES = frozenset(
    f"{kind}_l{layer}{end}" for kind in _WEIGHTS for layer in range(100) for end in ("", "_reverse")
)


class _Cell:
    """One direction of one layer.

    Attributes:
        gates: Number of gates.
        w: Weights and biases by kind; a bias may be None.

    ``forward(gx, h0, c0)`` gets what the input adds to the gates, and the initial states. It
    returns the states (B, T + 1, width), the last state of the cell (LSTM only) and what
    ``backward`` needs. ``backward(g, dc, *kept)`` gets the gradients of the states and of the last
    cell state. It returns gradients before the gates' nonlinearities, as the input's weights and
    as the states' weights see them, gradients of the initial states, and those before and after a
    projection of the states (LSTM only).
    """

    gates: ClassVar[int]

    def __init__(self, w: dict[str, Tensor | None]) -> None:
        self.w = w
        matrix = w["weight_hh"]
        assert matrix is not None
        self.matrix, self.back = matrix, matrix.t()
        self.width = len(matrix) // self.gates

    def input_offset(self) -> Tensor | None:
        """The constant part of ``gx``."""
        ours, other = self.w["bias_ih"], self.w["bias_hh"]
        return ours if ours is None or other is None else ours + other

    def forward(self, gx: Tensor, h0: Tensor, c0: Tensor | None) -> tuple:
        raise NotImplementedError

    def backward(self, g: Tensor, dc: Tensor | None, *kept: Tensor) -> tuple:
        raise NotImplementedError

    def _states(self, gx: Tensor, first: Tensor) -> Tensor:
        h = gx.new_empty(gx.shape[0], gx.shape[1] + 1, first.shape[1])
        h[:, 0] = first
        return h


class _Tanh(_Cell):
    """h = tanh(gates)."""

    gates = 1

    def forward(self, gx: Tensor, h0: Tensor, c0: Tensor | None) -> tuple:
        h = self._states(gx, h0)
        for t in range(gx.shape[1]):
            self.activate(linear(h[:, t], self.matrix).add_(gx[:, t]), h[:, t + 1])
        return h, None, (h,)

    def activate(self, gates: Tensor, out: Tensor) -> None:
        """Writes the next state."""
        torch.tanh(gates, out=out)

    def slope(self, h: Tensor) -> Tensor:
        """The derivative of the nonlinearity, from its value."""
        return 1 - h * h

    def backward(self, g: Tensor, dc: Tensor | None, *kept: Tensor) -> tuple:
        slope = self.slope(kept[0][:, 1:])
        dgates = torch.empty_like(slope)
        dh = torch.zeros_like(slope[:, 0])
        for t in reversed(range(g.shape[1])):
            torch.mul(dh.add_(g[:, t]), slope[:, t], out=dgates[:, t])
            dh = linear(dgates[:, t], self.back)
        return dgates, dgates, dh, None, None


class _Relu(_Tanh):
    """h = relu(gates)."""

    def activate(self, gates: Tensor, out: Tensor) -> None:
        """Writes the next state."""
        torch.clamp(gates, min=0, out=out)

    def slope(self, h: Tensor) -> Tensor:
        """The derivative of the nonlinearity, from its value."""
        return (h > 0).to(h.dtype)


class _Gru(_Cell):
    """r and z are sigmoids; n = tanh(gx_n + r * gh_n); h = n + z * (h - n)."""

    gates = 3

    def input_offset(self) -> Tensor | None:
        """The constant part of ``gx``; that of ``gh`` is multiplied by r."""
        return self.w["bias_ih"]

    def forward(self, gx: Tensor, h0: Tensor, c0: Tensor | None) -> tuple:
        width, h = self.width, self._states(gx, h0)
        inner = torch.empty_like(h[:, 1:])
        for t in range(gx.shape[1]):
            gh = linear(h[:, t], self.matrix, self.w["bias_hh"])
            inner[:, t] = gh[:, 2 * width :]
            now = gx[:, t]
            rz, n = now[:, : 2 * width], now[:, 2 * width :]
            rz.add_(gh[:, : 2 * width]).sigmoid_()
            n.addcmul_(rz[:, :width], inner[:, t]).tanh_()
            torch.lerp(n, h[:, t], rz[:, width:], out=h[:, t + 1])
        return h, None, (h, gx, inner)

    def backward(self, g: Tensor, dc: Tensor | None, *kept: Tensor) -> tuple:
        h, gates, inner = kept
        width, one = self.width, gates.new_ones(())
        dinputs, dstates = torch.empty_like(gates), torch.empty_like(gates)
        dh = torch.zeros_like(inner[:, 0])
        for t in reversed(range(g.shape[1])):
            dh.add_(g[:, t])
            r, z, n = gates[:, t].split(width, dim=1)
            of_r, of_z, of_n = dinputs[:, t].split(width, dim=1)
            torch.mul(dh, torch.addcmul(one, n, n, value=-1), out=of_n).mul_(1 - z)
            slope = torch.addcmul(gates[:, t], gates[:, t], gates[:, t], value=-1)
            torch.mul(of_n, inner[:, t], out=of_r).mul_(slope[:, :width])
            torch.mul(dh, h[:, t] - n, out=of_z).mul_(slope[:, width : 2 * width])
            now = dstates[:, t].copy_(dinputs[:, t])
            now[:, 2 * width :].mul_(r)
            dh = linear(now, self.back).addcmul_(dh, z)
        return dinputs, dstates, dh, None, None


class _Lstm(_Cell):
    """c = f * c + i * g; h = o * tanh(c), times a matrix if the states are projected."""

    gates = 4

    def forward(self, gx: Tensor, h0: Tensor, c0: Tensor | None) -> tuple:
        width, project = self.width, self.w["weight_hr"]
        assert c0 is not None
        h, c = self._states(gx, h0), self._states(gx, c0)
        squashed = torch.empty_like(c[:, 1:])
        long = None if project is None else torch.empty_like(squashed)
        state, last = h0, c0
        for t in range(gx.shape[1]):
            now = linear(state, self.matrix).add_(gx[:, t])
            i, f, n, o = now.split(width, dim=1)
            now[:, : 2 * width].sigmoid_()
            n.tanh_()
            o.sigmoid_()
            c[:, t + 1] = last = torch.mul(f, last).addcmul_(i, n)
            squashed[:, t] = squash = last.tanh()
            gx[:, t] = now
            state = squash.mul_(o)
            if long is not None:
                assert project is not None
                long[:, t] = state
                state = linear(state, project)
            h[:, t + 1] = state
        return h, last, (h, gx, c, squashed, *(() if long is None else (long,)))

    def backward(self, g: Tensor, dc: Tensor | None, *kept: Tensor) -> tuple:
        h, gates, c, squashed, *long = kept
        width, project = self.width, self.w["weight_hr"]
        one = gates.new_ones(())
        dgates = torch.empty_like(gates)
        dc = torch.zeros_like(c[:, 0]) if dc is None else dc
        dh = torch.zeros_like(h[:, 0])
        dshort = torch.empty_like(h[:, 1:]) if long else None
        # One step at a time, so that what is computed stays in the cache.
        product = torch.empty_like(gates[:, 0])
        by_i, by_f, by_n, by_o = product.split(width, dim=1)
        for t in reversed(range(g.shape[1])):
            dh.add_(g[:, t])
            if dshort is not None:
                assert project is not None
                dshort[:, t] = dh
                dh = linear(dh, project.t())
            now, squash = gates[:, t], squashed[:, t]
            i, f, n, o = now.split(width, dim=1)
            dc = torch.addcmul(dc, dh, torch.addcmul(one, squash, squash, value=-1).mul_(o))
            slope = torch.addcmul(now, now, now, value=-1)  # of a sigmoid
            torch.addcmul(one, n, n, value=-1, out=slope[:, 2 * width : 3 * width])
            torch.mul(dc, n, out=by_i)
            torch.mul(dc, c[:, t], out=by_f)
            torch.mul(dc, i, out=by_n)
            torch.mul(dh, squash, out=by_o)
            dgates[:, t] = slope.mul_(product)
            dc.mul_(f)
            dh = linear(slope, self.back)
        return dgates, dgates, dh, dc, (long[0], dshort) if long else None


def _cell(module: Any) -> type[_Cell]:
    if isinstance(module, nn.RNN):
        return _Relu if module.nonlinearity == "relu" else _Tanh
    return _Lstm if isinstance(module, nn.LSTM) else _Gru


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
            cell = _cell(module)(w)
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
            cell = _cell(shadow.module)(w)
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
