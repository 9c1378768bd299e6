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

import torch
from torch import Tensor


@dataclass(frozen=True)
class Setting:
    """One way to train.

    Args:
        rate: The first learning rate, of a decoupled step; it falls linearly to zero.
        clip: C; None normalises every gradient, as AUTO-S does.
        momentum: Of the average of the gradients.
        adam: Whether the update is Adam's.
    """

    rate: float
    clip: float | None
    momentum: float = 0.9
    adam: bool = False


@dataclass(frozen=True)
class Problem:
    """Training and test records; a regression's targets are in [-1, 1]."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    outputs: int
    regression: bool = False


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
    weights = [w[None].repeat(count, 1, 1) for w in start]
    first = [torch.zeros_like(w) for w in weights]
    second = [torch.zeros_like(w) for w in weights]
    rates = torch.tensor([s.rate for s in settings])
    momenta = torch.tensor([s.momentum for s in settings])[:, None, None]
    adam = torch.tensor([s.adam for s in settings])[:, None, None]
    for step in range(steps):
        x, y = problem.x, problem.y
        if batch < size:
            drawn = torch.rand(size, generator=generator) < batch / size
            x, y = x[drawn], y[drawn]
        outputs, inputs = _forward(x, weights)
        slopes = _backward(_slope(problem, outputs, y), weights, inputs)
        norms = sum(
            a.square().sum(2) * d.square().sum(2) for a, d in zip(inputs, slopes, strict=True)
        )
        assert isinstance(norms, Tensor)
        factors = _factors(norms.sqrt(), settings) / batch
        rate = (rates * (1 - step / steps))[:, None, None]
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
            weight.sub_(rate * move)
    return _forward(problem.test_x, weights)[0]


def _forward(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Outputs, and each layer's inputs with a one for the bias; the first are shared."""
    hidden, inputs = x[None], []
    for number, weight in enumerate(weights):
        if number:
            hidden = torch.relu(hidden)
        ones = torch.ones(*hidden.shape[:2], 1)
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


def _factors(norms: Tensor, settings: Sequence[Setting]) -> Tensor:
    """What each gradient is multiplied by, already divided by C."""
    found = [
        1 / (row + 0.01) if s.clip is None else 1 / row.clamp_min(s.clip)
        for row, s in zip(norms, settings, strict=True)
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
