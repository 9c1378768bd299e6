"""Exact DP-SGD for linear models and perceptrons, many settings at a time, for `no-tuning`.

The norms of per-example gradients follow from inputs and output gradients, so nothing is
approximated. All settings of one call share batches and noise, which makes their differences much
less random than their values. Training on public data only: the noise is numpy's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..clipping._rules import slots
from ..control import Released
from ..methods._auto import left


@dataclass(frozen=True)
class Setting:
    """One way to train.

    Args:
        rate: The first learning rate, of a decoupled step.
        clip: C; None normalises every gradient, as AUTO-S does.
        momentum: Of the average of the gradients.
        late: Whether the rate falls as that of ``Auto`` does; otherwise it falls linearly to zero.
        adam: Whether the update is Adam's.
        control: "slaclip" or "spectral" moves C from where it starts.
        average: If above 0, the rate stays constant, and what is tested is an average of the
            weights; those after update t count as t to the power of this.
        pace: What corrects the rate on the way, see ``_paced``.
    """

    rate: float
    clip: float | None
    momentum: float = 0.9
    late: bool = True
    adam: bool = False
    control: str = ""
    average: float = 0.0
    pace: str = ""


@dataclass(frozen=True)
class Problem:
    """Training and test records; a regression's targets are in [-1, 1].

    ``bias`` is False if the records have a constant column of their own.
    """

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    outputs: int
    regression: bool = False
    bias: bool = True


@torch.no_grad()
def train(
    problem: Problem,
    start: Sequence[Tensor],
    settings: Sequence[Setting],
    *,
    sigma: float,
    batch: int,
    steps: int,
    seed: int,
) -> Tensor:
    """Outputs for the test records, (settings, records, outputs).

    Args:
        problem: The records.
        start: The first weights of each layer, (outputs, inputs + 1), the bias in the last column.
        settings: What is trained side by side.
        sigma: The noise multiplier.
        batch: The expected batch size.
        steps: The number of updates.
        seed: Of batches and noise.
    """
    count, size = len(settings), len(problem.y)
    generator = torch.Generator().manual_seed(seed)
    aside = torch.Generator().manual_seed(seed)  # what controllers draw changes no other setting
    weights = [w[None].repeat(count, 1, 1) for w in start]
    first = [torch.zeros_like(w) for w in weights]
    second = [torch.zeros_like(w) for w in weights]
    rates = torch.tensor([s.rate for s in settings])
    momenta = torch.tensor([s.momentum for s in settings])[:, None, None]
    adam = torch.tensor([s.adam for s in settings])[:, None, None]
    late = torch.tensor([s.late for s in settings])
    constant = torch.tensor([s.average > 0 for s in settings])
    powers = torch.tensor([s.average for s in settings])[:, None, None]
    mean = [w.clone() for w in weights]
    clips = [s.clip for s in settings]
    moved = {k: Moved(s.control, start) for k, s in enumerate(settings) if s.control}
    paced = [k for k, s in enumerate(settings) if s.pace]
    paces = torch.ones(count, len(weights))
    walk = torch.zeros(count, len(weights))  # the noise's variance in each weight
    in_average = torch.zeros(count)
    for step in range(steps):
        x, y = problem.x, problem.y
        if batch < size:
            drawn = torch.rand(size, generator=generator) < batch / size
            x, y = x[drawn], y[drawn]
        outputs, inputs = _forward(x, weights, problem.bias)
        slopes = _backward(_slope(problem, outputs, y), weights, inputs)
        norms = sum(
            a.square().sum(2) * d.square().sum(2) for a, d in zip(inputs, slopes, strict=True)
        )
        assert isinstance(norms, Tensor)
        norms = norms.sqrt()
        factors = _factors(norms, clips) / batch
        shares = torch.where(late, left(step / steps), 1 - step / steps)
        rate = (rates * torch.where(constant, 1.0, shares))[:, None, None]
        for layer, weight in enumerate(weights):
            gradient = torch.bmm((slopes[layer] * factors[:, :, None]).transpose(1, 2),
                                 inputs[layer].expand(count, -1, -1))  # fmt: skip
            gradient += sigma / batch * torch.randn(start[layer].shape, generator=generator)
            average = first[layer]
            average.mul_(momenta).add_((1 - momenta) * gradient)
            move = average
            if adam.any():
                second[layer].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                spread = (second[layer] / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
                move = torch.where(adam, average / (1 - momenta ** (step + 1)) / spread, average)
            weight.sub_(rate * paces[:, layer, None, None] * move)
            if constant.any():
                # Without an average this is the last one: 1 of 1.
                share = torch.where(powers > 0, (powers + 1) / (step + powers + 1), 1.0)
                mean[layer].add_(share * (weight - mean[layer]))
        steps_now = rate[:, 0] * paces
        walk += (steps_now * sigma / batch).square()
        in_average = momenta[:, 0, 0] ** 2 * in_average + (1 - momenta[:, 0, 0]) ** 2
        if paced and (step + 1) % max(1, steps // 20) == 0:
            for k in paced:
                paces[k] = _paced(
                    settings[k].pace,
                    [weight[k] - before for weight, before in zip(weights, start, strict=True)],
                    walk[k],
                    [average[k] for average in first],
                    float(in_average[k]) * (sigma / batch) ** 2,
                )
        for k, one in moved.items():
            now = [weight[k] for weight in weights]
            clips[k] = one.move(step + 1, now, norms[k], sigma, batch, aside)
    return _forward(problem.test_x, mean if constant.any() else weights, problem.bias)[0]


def _paced(
    kind: str, moved: list[Tensor], walk: Tensor, averages: list[Tensor], noise: float
) -> Tensor:
    """A factor on the rate of each layer, from released values.

    Args:
        kind: "distance": smaller where the weights moved farther than noise alone would have moved
            them. "energy": larger where the averaged gradients are longer than their noise.
            "outliers": half of it in layers that have directions beyond the edge of their noise.
        moved: How far each layer is from its start.
        walk: The variance of the noise in the weights of each layer.
        averages: The averaged gradient of each layer.
        noise: The variance of the noise in each of its coordinates.
    """
    counts = torch.tensor([float(m.numel()) for m in moved])
    if kind == "outliers":
        edges = [
            1.05 * float(v.sqrt()) * (math.sqrt(m.shape[0]) + math.sqrt(m.shape[1]))
            for v, m in zip(walk, moved, strict=True)
        ]
        found = [
            bool((torch.linalg.svdvals(torch.nan_to_num(m)) > edge).any())
            for m, edge in zip(moved, edges, strict=True)
        ]
        return torch.tensor([0.5 if one else 1.0 for one in found])
    if kind == "distance":
        length = sum(float(m.square().sum()) for m in moved)
        factor = math.sqrt(2 * float((counts * walk).sum()) / max(length, 1e-30))
        return torch.full_like(walk, min(1.0, max(0.25, factor)))
    energy = sum(float(a.square().sum()) for a in averages)
    signal = max(0.0, energy / max(1e-30, float(counts.sum()) * noise) - 1.0)
    return torch.full_like(walk, min(2.0, max(0.5, 2 * signal / (signal + 0.1))))


class Moved:
    """The C of one setting, as a controller of the library moves it."""

    def __init__(self, control: str, start: Sequence[Tensor]) -> None:
        from ..control import Spectral
        from ..control.released import SlackControl
        from ..models import Linear, Perceptron

        widths = (*(w.shape[1] - 1 for w in start), start[-1].shape[0])
        self.slots = 10 if control == "slaclip" else 0
        self.controller: Any = SlackControl() if self.slots else Spectral()
        self.state: Any = self.controller.init()
        self.network: nn.Module = (
            Perceptron(widths[:1], widths[-1], widths[1:-1])
            if len(start) > 1
            else Linear(widths[:1], widths[-1])
        )
        self.probe: Any = None
        if not self.slots:
            trained = dict(self.network.named_parameters())
            chosen = self.controller.probe
            assert chosen is not None
            self.probe = chosen.bind(self.network, trained)

    @torch.no_grad()
    def move(
        self,
        step: int,
        weights: Sequence[Tensor],
        norms: Tensor,
        sigma: float,
        batch: int,
        generator: torch.Generator,
    ) -> float:
        """The next C after ``step`` updates, from these norms or these weights."""
        if self.slots:
            clip = self.state.clip
            filled = slots(norms, clip, self.slots).sum(0)
            filled += sigma * clip * torch.randn(self.slots, generator=generator)
            nothing = torch.zeros(0)
            seen = {"slack": filled / batch}
            released = Released(step - 1, 0, clip, clip, sigma * clip / batch, nothing, seen)
            self.state = self.controller.update(released, self.state)
        elif step % self.controller.period == 0:
            layers = [m for m in self.network.modules() if isinstance(m, nn.Linear)]
            for layer, weight in zip(layers, weights, strict=True):
                layer.weight.copy_(weight[:, :-1])
                layer.bias.copy_(weight[:, -1])
            reading = self.probe.read(self.network, step)
            if reading is not None:
                self.state = self.controller.update(reading, self.state)
        return float(self.state.clip)


def _forward(
    x: Tensor, weights: Sequence[Tensor], bias: bool = True
) -> tuple[Tensor, list[Tensor]]:
    """Outputs, and each layer's inputs with a one for the bias; the first are shared."""
    hidden, inputs = x[None], []
    for number, weight in enumerate(weights):
        if number:
            hidden = torch.relu(hidden)
        ones = torch.full((*hidden.shape[:2], 1), float(bias))
        inputs.append(torch.cat((hidden, ones), 2))
        if number:
            hidden = torch.bmm(inputs[-1], weight.transpose(1, 2))
        else:  # one product for all settings
            flat = inputs[0][0] @ weight.reshape(-1, weight.shape[2]).T
            hidden = flat.view(len(x), len(weight), -1).transpose(0, 1)
    return hidden, inputs


def _slope(problem: Problem, outputs: Tensor, y: Tensor) -> Tensor:
    """The loss's derivative by the outputs."""
    if problem.regression:
        return 2 * (outputs - y[None, :, None])
    if problem.outputs == 1:
        return torch.sigmoid(outputs) - y.float()[None, :, None]
    slope = torch.softmax(outputs, 2)
    slope[:, torch.arange(len(y)), y.long()] -= 1
    return slope


def _backward(slope: Tensor, weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    slopes = [slope]
    for layer in range(len(weights) - 1, 0, -1):
        active = inputs[layer][:, :, :-1] > 0
        slopes.insert(0, torch.bmm(slopes[0], weights[layer][:, :, :-1]) * active)
    return slopes


def _factors(norms: Tensor, clips: Sequence[float | None]) -> Tensor:
    """What each gradient is multiplied by, already divided by C."""
    found = [
        1 / (row + 0.01) if clip is None else 1 / row.clamp_min(clip)
        for row, clip in zip(norms, clips, strict=True)
    ]
    return torch.nan_to_num(torch.stack(found))


def start_of(widths: Sequence[int], seed: int) -> list[Tensor]:
    """torch's usual first weights of a perceptron; zeros for a linear model."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for inputs, outputs in itertools.pairwise(widths):
        draw = 2 * torch.rand(outputs, inputs + 1, generator=generator) - 1
        layers.append(draw / math.sqrt(inputs) * (len(widths) > 2))
    return layers
