"""The recurrences of LSTM, GRU and RNN, step by step for a whole batch, with a backward by hand.

All tensors have records first, then steps: (B, T, width).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .matmul import linear


class Cell(ABC):
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

    @abstractmethod
    def forward(self, gx: Tensor, h0: Tensor, c0: Tensor | None) -> tuple:
        """The states, the last cell state, and what ``backward`` needs."""

    @abstractmethod
    def backward(self, g: Tensor, dc: Tensor | None, *kept: Tensor) -> tuple:
        """Gradients of gates and initial states."""

    def _states(self, gx: Tensor, first: Tensor) -> Tensor:
        h = gx.new_empty(gx.shape[0], gx.shape[1] + 1, first.shape[1])
        h[:, 0] = first
        return h


class Tanh(Cell):
    """h = tanh(gates)."""

    gates = 1

    def forward(self, gx: Tensor, h0: Tensor, c0: Tensor | None) -> tuple:
        """As of ``Cell``."""
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
        """As of ``Cell``."""
        slope = self.slope(kept[0][:, 1:])
        dgates = torch.empty_like(slope)
        dh = torch.zeros_like(slope[:, 0])
        for t in reversed(range(g.shape[1])):
            torch.mul(dh.add_(g[:, t]), slope[:, t], out=dgates[:, t])
            dh = linear(dgates[:, t], self.back)
        return dgates, dgates, dh, None, None


class Relu(Tanh):
    """h = relu(gates)."""

    def activate(self, gates: Tensor, out: Tensor) -> None:
        """Writes the next state."""
        torch.clamp(gates, min=0, out=out)

    def slope(self, h: Tensor) -> Tensor:
        """The derivative of the nonlinearity, from its value."""
        return (h > 0).to(h.dtype)


class Gru(Cell):
    """r and z are sigmoids; n = tanh(gx_n + r * gh_n); h = n + z * (h - n)."""

    gates = 3

    def input_offset(self) -> Tensor | None:
        """The constant part of ``gx``; that of ``gh`` is multiplied by r."""
        return self.w["bias_ih"]

    def forward(self, gx: Tensor, h0: Tensor, c0: Tensor | None) -> tuple:
        """As of ``Cell``."""
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
        """As of ``Cell``."""
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


class Lstm(Cell):
    """c = f * c + i * g; h = o * tanh(c), times a matrix if the states are projected."""

    gates = 4

    def forward(self, gx: Tensor, h0: Tensor, c0: Tensor | None) -> tuple:
        """As of ``Cell``."""
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
        """As of ``Cell``."""
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


def cell_of(module: Any) -> type[Cell]:
    """The cell of an nn.LSTM, nn.GRU or nn.RNN."""
    if isinstance(module, nn.RNN):
        return Relu if module.nonlinearity == "relu" else Tanh
    return Lstm if isinstance(module, nn.LSTM) else Gru
