"""A step size that nobody has to choose: from the noise, the number of updates and the network.

The private gradient is a mean plus noise of known standard deviation ν in each coordinate. After t
of T updates the rate is η (1 - (t/T)²). Then noise alone moves each weight by η ν √(8T/15) by the
end, and an output by that times ``gain``, the length of the output's derivative by the weights. The
rate is the one at which that is ``reach``. Where there is hardly any noise, stability bounds it: a
step may move an output by at most ``bound``.

    1 / (η gain) = ν √(8T/15) / reach + 1 / bound

All of these numbers are public, so choosing the rate costs no privacy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# How far noise may move a logit of a network with n layers: this over n + 1, n being at most _DEEP;
# deeper networks bear less of it. And an output for a target that is scaled to [-1, 1]. Chosen,
# like what follows, by the regret on one half of the tasks of `zetaclip reproduce no-tuning`.
REACH, REACH_REGRESSION = 3.0, 0.28
_DEEP = 4
# Networks of three or more layers bear less noise the longer they train: beyond this many updates
# it is their number that counts, not its root.
_USUAL_STEPS = 300
# Linear models and networks of one hidden layer bear more noise with fewer inputs than the second
# of these: where there are few directions to go astray in, the records bring the outputs back.
# Fewer than the first were not tried.
_FEW_INPUTS = 3, 20
# How far one step may move an output of a linear model, and of a network.
BOUND_LINEAR, BOUND_NETWORK = 2048.0, 16.0
# C as a part of the gain: of a record's gradient per unit of the loss's slope.
CLIP_OF_GAIN = 0.18
CLIP_OF_GAIN_REGRESSION = 0.05
# Of a linear layer on inputs of length 1, with a bias.
UNIT_GAIN = math.sqrt(2.0)


def layers(parameters: Iterable[Tensor]) -> tuple[int, int | None]:
    """How many layers these are the trained parameters of, and how many inputs the first has.

    A depth of 1 is a linear model. The inputs are None unless it is one, or a perceptron with one
    hidden layer: a convolution or an embedding sees more inputs than its weight has columns.
    """
    shapes = [p.shape for p in parameters if p.ndim > 1]
    depth = max(1, len(shapes))
    if not shapes or depth > 2 or any(len(shape) > 2 for shape in shapes):
        return depth, None
    if depth == 2 and shapes[1][1] != shapes[0][0]:  # the second does not read the first's outputs
        return depth, None
    return depth, shapes[0][1]


def limits(
    depth: int, regression: bool, steps: int, inputs: int | None = None
) -> tuple[float, float]:
    """How far noise may move an output, and how far one step may.

    Args:
        depth: The number of layers.
        regression: Whether the outputs are for a target that is scaled to [-1, 1].
        steps: The number of updates.
        inputs: The number of inputs, as ``layers`` tells it.
    """
    reach = REACH_REGRESSION if regression else REACH / (1 + min(depth, _DEEP))
    if depth > 2:
        reach *= math.sqrt(_USUAL_STEPS / max(_USUAL_STEPS, steps))
    elif inputs is not None:
        fewest, many = _FEW_INPUTS
        reach *= math.sqrt(many / min(many, max(fewest, inputs)))
    return reach, BOUND_LINEAR if depth == 1 else BOUND_NETWORK


def law(noise_std: float, steps: int, gain: float, reach: float, bound: float) -> float:
    """The first rate, which then falls as ``left`` says.

    Args:
        noise_std: ν, the standard deviation of the noise in each coordinate of the gradient.
        steps: T, the number of updates.
        gain: See ``gain``.
        reach: How far noise alone may move an output by the end.
        bound: How far one step may move an output.
    """
    return 1.0 / (gain * (noise_std * math.sqrt(steps * 8 / 15) / reach + 1.0 / bound))


def left(done: float) -> float:
    """The part of the first rate that is left when so much of the training is done.

    A rate that falls late makes more of a weak signal than one that falls from the start: the sum
    of T equal gradients over that of their noise is 0.91 √T, where a linear decay has 0.87 √T.
    """
    return max(0.0, 1.0 - done**2)


def gain(module: nn.Module, inputs: Tensor) -> float:
    """How far an output moves with the weights: the length of its derivative by them.

    It is the root mean square over the rows and the outputs. The module and its gradients are left
    as they are.

    Args:
        module: The network; its first output is read if it has several.
        inputs: A batch of made-up inputs, with the shape and the scale of the real ones.

    Returns:
        The gain, at least 1e-6.

    Raises:
        ValueError: The outputs are no tensor of numbers, or nothing is trained.

    **Guarantee.** Costs no privacy if ``inputs`` are not taken from the private records.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("the module has no trained parameters")
    training = module.training
    module.eval()
    signs = torch.Generator().manual_seed(0)
    total = 0.0
    try:
        with torch.enable_grad():
            for row in range(len(inputs)):
                out = module(inputs[row : row + 1])
                out = out[0] if isinstance(out, (tuple, list)) else out
                if not isinstance(out, Tensor) or not out.is_floating_point():
                    raise ValueError(
                        "the module's outputs are no tensor of numbers: give gain= yourself"
                    )
                # With random signs, the squared derivative of the sum is that of all outputs.
                sign = torch.randint(0, 2, out.shape, generator=signs) * 2 - 1
                score = (out * sign.to(out)).sum()
                found = torch.autograd.grad(score, trained, allow_unused=True)
                total += sum(float(g.double().square().sum()) for g in found if g is not None) / (
                    out.numel()
                )
    finally:
        module.train(training)
    return max(1e-6, math.sqrt(total / max(1, len(inputs))))


def _unit_gain(groups: list[dict[str, Any]]) -> float:
    """The gain of a linear layer on inputs of length 1; a bias is one more input."""
    biased = any(p.ndim == 1 for group in groups for p in group["params"])
    return UNIT_GAIN if biased else 1.0


def _walk(group: dict[str, Any], std: float) -> tuple[float, float, float]:
    """The noise's variance in each weight, in the average, and their covariance, one update on."""
    weight, average, both = group.get("noise", (0.0, 0.0, 0.0))
    rate, momentum = group["rate"], group["momentum"]
    kept = 1.0 - rate * group["weight_decay"]
    average = momentum**2 * average + ((1 - momentum) * std) ** 2
    both = kept * momentum * both
    return kept**2 * weight - 2 * rate * both + rate**2 * average, average, both - rate * average


class Auto(Optimizer):
    """SGD with momentum whose rate follows from public numbers; see this module.

    Args:
        params: The trained parameters.
        lr: A factor on the rate that the law gives; 1 is the law. Schedulers move this factor.
        gain: What ``gain(model, made_up_inputs)`` gives. None stands for one linear layer, with or
            without a bias, on inputs of length 1; for any other network it is an error.
        steps: The planned number of updates; None takes it from ``make_private(epochs=...)``.
        momentum: Of the average of the private gradients, which has weight 1 in total.
        weight_decay: Decoupled from the gradient, as in AdamW.
        regression: Whether the outputs are for a target that is scaled to [-1, 1]; otherwise they
            are logits.
        decay: Whether the rate falls to zero over ``steps``; False if a scheduler does that.

    **Guarantee.** It reads public numbers and released gradients only.
    **Edge cases.** After ``steps`` updates the rate is zero: more of them change nothing.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        gain: float | None = None,
        steps: int | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        regression: bool = False,
        decay: bool = True,
    ) -> None:
        for name, value in (("lr", lr), ("gain", gain), ("steps", steps)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive, not {value}")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must be at least 0 and below 1, not {momentum}")
        if not weight_decay >= 0.0:
            raise ValueError(f"weight_decay must be at least 0, not {weight_decay}")
        self._noise_std: float | None = None
        self._given = self._planned = steps
        self._decay = decay
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        depth, inputs = layers(p for group in self.param_groups for p in group["params"])
        if gain is None and depth > 1:
            raise ValueError(
                "Auto must know how strongly the weights move the outputs: give "
                "gain=zetaclip.optim.gain(model, inputs), with made-up inputs that have the shape "
                "and the scale of yours, such as 2 * torch.rand(16, 20) - 1"
            )
        self.gain = _unit_gain(self.param_groups) if gain is None else float(gain)
        self._depth, self._inputs, self._regression = depth, inputs, regression
        self.clip_norm = self.gain * (CLIP_OF_GAIN_REGRESSION if regression else CLIP_OF_GAIN)

    @property
    def rate(self) -> float:
        """The learning rate of the last update; 0 before the first."""
        return float(self.param_groups[0].get("rate", 0.0))

    def set_noise_std(self, std: float) -> None:
        """The standard deviation of the noise in each coordinate of the next gradient."""
        self._noise_std = std

    def plan(self, steps: int | None) -> None:
        """Takes the planned number of updates, unless ``steps`` was given before.

        Raises:
            ValueError: Neither is known.
        """
        self._planned = self._given if self._given is not None else steps
        if self._planned is None:
            raise ValueError(
                "Auto must know how many updates are planned: give epochs= to make_private, or "
                "steps= to Auto"
            )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self._noise_std is None or self._planned is None:
            raise RuntimeError(
                "Auto must be told the noise and the number of updates: use it through "
                "make_private, or call plan(steps) once and set_noise_std(std) before each step"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        own = limits(self._depth, self._regression, self._planned, self._inputs)
        full = law(self._noise_std, self._planned, self.gain, *own)
        for group in self.param_groups:
            done = group["updates"] = group.get("updates", 0) + 1
            share = left((done - 1) / self._planned) if self._decay else 1.0
            group["rate"] = full * share * float(group["lr"])
            group["noise"] = _walk(group, self._noise_std)
            self._step_group(group, group["rate"])
        return loss

    def moved(self, parameter: Tensor) -> tuple[Tensor, float]:
        """How far a parameter is from its start, and the standard deviation of the noise in that.

        The noise is what the updates drew, without what later gradients took back of it; so it is
        an upper bound.

        Raises:
            KeyError: The parameter has not been updated.
        """
        group = next(g for g in self.param_groups if any(p is parameter for p in g["params"]))
        start = self.state[parameter]["start"]
        return parameter.detach() - start, math.sqrt(max(0.0, group["noise"][0]))

    def _step_group(self, group: dict[str, Any], rate: float) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for p in params:
            if not self.state[p]:
                self.state[p] = {"average": torch.zeros_like(p), "start": p.detach().clone()}
        averages = [self.state[p]["average"] for p in params]
        torch._foreach_lerp_(averages, [p.grad for p in params], 1 - group["momentum"])
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
        torch._foreach_add_(params, averages, alpha=-rate)
