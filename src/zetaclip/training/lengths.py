"""Batch size and length of a run from public numbers: N, ε, the network, and the time there is.

About 300 updates are enough where there is much noise; a larger ε can use more. For a given number
of updates the largest batch is the best one, so the batch grows until every record is used in every
update, or until the records that may be processed are used up.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..methods._auto import gain, law, layers, limits
from .config import Config
from .fixed import rate_of_auto

if TYPE_CHECKING:
    from ..data import Dataset
    from ..methods import Method

# Updates at ε of 1 or less, and how they grow with ε, up to ε = 8.
_FEWEST, _GROWTH, _LARGEST = 300, 0.58, 8.0
# Records that are processed in all, and the least number of epochs.
_RECORDS = {True: (2_000_000, 10.0), False: (480_000, 8.0)}  # of a linear model, of a network
# A linear model of many inputs has noise in all of them and gains from larger batches. On held-out
# records of CIFAR-10 these had 0.7, 0.2 and 0.1 points more at ε of 8, 3 and 1 (two seeds), of
# EMNIST letters 0.3, 0.3 and 0.1, of MNIST 0.2, 0.0 and 0.0 (one seed); on Adult's bins nothing.
_MANY_INPUTS, _MORE_RECORDS = 1000, 5_000_000
_SMALLEST_BATCH = 16
# Of a head on fixed features: momentum, and the rate of one that is trained without privacy, where
# nothing bounds the step but stability.
_MOMENTUM, PLAIN_RATE = 0.9, 16.0
# Below this signal to noise a warning is due; docs/nothing-to-tune.md has the runs behind it.
WEAK = 4.0
EVALUATIONS = 20  # in a run whose length was chosen here
_MADE_UP = 16  # rows for the gain
_TIMED = 256  # rows for the speed
_PRIVATE = 2.0  # time of a private step over that of an ordinary one


def updates_for(epsilon: float | None) -> int:
    """How many updates a budget can use; None stands for ε = 3."""
    bounded = min(_LARGEST, max(1.0, 3.0 if epsilon is None else epsilon))
    return round(_FEWEST * bounded**_GROWTH)


def length(
    size: int,
    epsilon: float | None,
    linear: bool,
    *,
    inputs: int | None = None,
    batch: int | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    records: float | None = None,
) -> tuple[int, float | None]:
    """The expected batch size, and the epochs (None if ``steps`` are given).

    Args:
        size: The public number of training records.
        epsilon: The target ε, if there is one.
        linear: Whether the model is linear.
        inputs: Inputs of the model; None if they are not known.
        batch: The expected batch size, if it is given.
        epochs: The epochs, if they are given.
        steps: The updates, if they are given.
        records: How many records there is time for, if that is known.
    """
    usual, least = _RECORDS[linear]
    if linear and (inputs or 0) >= _MANY_INPUTS:
        usual = _MORE_RECORDS
    total = max(usual, least * size) if records is None else records
    wanted = steps or updates_for(epsilon)
    if batch is None:
        passed = epochs * size if epochs is not None else total
        batch = round(passed / wanted)
        batch = max(1, min(size, max(_SMALLEST_BATCH, batch)))
    if steps is not None:
        return batch, None
    if epochs is None:
        wanted = max(wanted, math.ceil(3 * size / batch))  # no record is left unused
        epochs = wanted / max(1, -(-size // batch))
    return batch, epochs


def head_defaults(
    config: Config,
    method: Method,
    size: int,
    network: tuple[int, int | None, float],
    regression: bool,
) -> dict[str, Any]:
    """Batch, length and rate of a network on fixed features, for private methods but "auto".

    They are what "auto" would have: ``length``, and for updates of SGD its law of the rate.

    Args:
        config: The settings.
        method: The method.
        size: The public number of training records.
        network: What ``measure`` gives of it.
        regression: Whether the target is a number.
    """
    depth, inputs, own_gain = network
    batch, epochs = length(
        size, config.epsilon, depth == 1, inputs=inputs,
        batch=config.batch_size, epochs=config.epochs, steps=config.steps,
    )  # fmt: skip
    found: dict[str, Any] = {"batch_size": batch}
    if epochs is not None:
        found |= {"epochs": epochs, "eval_every": max(1, round(epochs / EVALUATIONS))}
    if method.family != "sgd":
        return found
    found["momentum"] = _MOMENTUM
    if config.lr is None:
        from ..accounting import noise_multiplier_for

        steps = config.steps or math.ceil((epochs or 0.0) * -(-size // batch) - 1e-9)
        delta = config.delta or min(1e-5, size**-1.1)
        sigma = config.sigma
        if sigma is None:
            target = (config.epsilon or 3.0, delta, min(1.0, batch / size), steps)
            sigma = noise_multiplier_for(*target, config.accountant)
        momentum = _MOMENTUM if config.momentum is None else config.momentum
        rate = law(sigma / batch, steps, own_gain, *limits(depth, regression, steps, inputs))
        rate *= rate_of_auto(config, size)
        # torch's momentum multiplies the rest.
        found |= {"lr": (1 - momentum) * rate, "schedule": "late"}
    return found


def signal_to_noise(sigma: float, batch: float, steps: int, inputs: int) -> float:
    """How far a run could move an output, over how far noise moves it.

    If all gradients agreed, a rate that falls from η by the law would move an output by η 2T/3, and
    noise moves it by η (σ/L) √(8T/15). Of a direction that is one of many, a share of 1/√inputs is
    left.

    Args:
        sigma: σ.
        batch: Expected batch size L.
        steps: Updates T.
        inputs: Inputs of the network.
    """
    if sigma == 0:
        return math.inf
    return (2 * steps / 3) / (sigma / batch * math.sqrt(8 * steps / 15)) / math.sqrt(inputs)


def warning(sigma: float, batch: float, steps: int, size: int, inputs: int) -> str | None:
    """What to say before a training in which noise will dominate; None if it won't.

    Args:
        sigma: σ.
        batch: Expected batch size L.
        steps: Updates T.
        size: Records N.
        inputs: Inputs of the network.
    """
    ratio = signal_to_noise(sigma, batch, steps, inputs)
    if ratio >= WEAK:
        return None
    larger = "a larger batch, " if batch < size else ""
    return (
        f"noise will dominate this training: its signal to noise is about {ratio:.2g} by the public"
        f" numbers, and below {WEAK:g} most models lost half or more of what they learn at ε = 8."
        f" What helps: more records, a larger ε, {larger}fewer inputs or features"
    )


def made_up(dataset: Dataset, columns: int | None = None, long: float = 1.0) -> Tensor:
    """Inputs with the shape and the declared scale of the data set's, the same in every run.

    Args:
        dataset: Its numbers are taken to be between -1 and 1, the scale of every prepared input.
        columns: The number of fixed features; None if there are none.
        long: The length of a row of fixed features.
    """
    x = dataset.train.x
    shape = (_MADE_UP, *dataset.input_shape) if columns is None else (_MADE_UP, columns)
    if columns is None and not x.is_floating_point():
        return torch.zeros(shape, dtype=x.dtype)
    numbers = 2 * torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 1
    if columns is not None:
        numbers *= long / numbers.norm(dim=1, keepdim=True)
    return numbers.to(x.dtype) if x.is_floating_point() else numbers


def measure(model: nn.Module, inputs: Tensor) -> tuple[int, int | None, float]:
    """What ``layers`` tells of a model's trained layers, and its gain on made-up inputs."""
    device = next(model.parameters()).device
    trained = (p for p in model.parameters() if p.requires_grad)
    return *layers(trained), float(f"{gain(model, inputs.to(device)):.4g}")


def records_in(minutes: float, model: nn.Module, inputs: Tensor) -> float:
    """About how many records a private training processes in this time, on this machine.

    Args:
        minutes: The time.
        model: The network.
        inputs: A few records.
    """
    device = next(model.parameters()).device
    batch = inputs.repeat(_TIMED // len(inputs), *[1] * (inputs.ndim - 1)).to(device)
    best = math.inf
    for _ in range(3):
        begun = time.perf_counter()
        model(batch).sum().backward()
        best = min(best, time.perf_counter() - begun)
        model.zero_grad()
    return minutes * 60 * len(batch) / (_PRIVATE * best)
