"""A toy of every kind of method part, so that the engine's interfaces are used before the real
methods exist."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from zetaclip import Affine, ClipRule, Extra, Method, Pass, Plan
from zetaclip.control import ClipState, Controller


@dataclass(frozen=True)
class Slack(ClipRule):
    """Writes each record's unused norm into one more coordinate of the same Gaussian."""

    name: str = "slack"

    def factors(self, norms, clip, coins):
        return torch.full_like(norms, clip).div_(norms.clamp_min(clip))

    def sensitivity(self, clip):
        return clip

    def extras(self, norms, clip):
        kept = norms.clamp_max(clip)
        return {"slack": Extra((clip * clip - kept * kept).clamp_min(0).sqrt().unsqueeze(1))}


@dataclass(frozen=True)
class Counting(ClipRule):
    """Releases the centred count of unclipped records as a query of its own."""

    multiplier: float = 20.0
    name: str = "counting"

    def factors(self, norms, clip, coins):
        return torch.full_like(norms, clip).div_(norms.clamp_min(clip))

    def sensitivity(self, clip):
        return clip

    def extras(self, norms, clip):
        bits = (norms <= clip).double() - 0.5
        return {
            "count": Extra(bits.unsqueeze(1), sensitivity=0.5, noise_multiplier=self.multiplier)
        }


@dataclass(frozen=True)
class FromCount(Controller):
    """Moves C by the released count: reads a release, not the weights."""

    start: float = 1.0

    @property
    def probe(self):
        return None

    def init(self):
        return ClipState(self.start)

    def update(self, released, state):
        share = 0.5 + float(released.extras["count"][0])
        return ClipState(state.clip * math.exp(-0.2 * (min(1.0, max(0.0, share)) - 0.5)))

    def entry(self, state):
        return (state.clip,)


@dataclass(frozen=True)
class Coins(ClipRule):
    """Accepts a record with probability min(1, norm / C) and then adds its direction."""

    name: str = "coins"

    def factors(self, norms, clip, coins):
        drawn = coins(len(norms))
        accepted = drawn < norms.clamp_max(clip) / clip
        return torch.where(
            accepted & (norms > 0), clip / norms.clamp_min(1e-300), torch.zeros_like(norms)
        )

    def sensitivity(self, clip):
        return clip


@dataclass(frozen=True)
class Whitened(ClipRule):
    """Shifts by the last released gradient, scales and masks every third coordinate away."""

    name: str = "whitened"

    def init(self, numel):
        mask = torch.arange(numel) % 3 != 0
        return {"shift": torch.zeros(numel), "scale": torch.linspace(0.5, 2.0, numel), "mask": mask}

    def update(self, released, state):
        return {**state, "shift": 0.5 * released.gradient}

    def transform(self, state):
        return Affine(**state)

    def factors(self, norms, clip, coins):
        return torch.full_like(norms, clip).div_(norms.clamp_min(clip))

    def sensitivity(self, clip):
        return clip


class WeightProbe:
    """Reads the largest weight every second step."""

    def bind(self, module, trained):
        return self

    def read(self, module, step):
        return None if step % 2 else max(float(p.detach().abs().max()) for p in module.parameters())


@dataclass(frozen=True)
class FromWeights(Controller):
    probe: WeightProbe

    def init(self):
        return ClipState(0.7)

    def update(self, reading, state):
        return ClipState(0.5 + 0.1 * math.tanh(reading))

    def entry(self, state):
        return ("read", state.clip)


def ascent_direction(releases, memory):
    gradient = releases[-1].gradient
    return gradient, 0.05


def last_direction(releases, memory):
    gradient = memory.get("gradient")
    return None if gradient is None else (gradient, 0.05)


def two_pass(batch):
    """Sharpness-aware: an ascent pass, then a descent pass at the perturbed weights."""
    return Method(
        name=f"toy-sam-{batch}",
        passes=(Pass("ascent"), Pass("descent", batch=batch, perturb=ascent_direction)),
        plan=lambda budget: Plan((1.5, 2.0)),
    )


METHODS = {
    "plain": lambda: Method(),
    "slack": lambda: Method("toy-slack", rule=Slack()),
    "count": lambda: Method("toy-count", rule=Counting(), controller=FromCount()),
    "coins": lambda: Method("toy-coins", rule=Coins()),
    "whitened": lambda: Method("toy-whitened", rule=Whitened()),
    "weights": lambda: Method("toy-weights", controller=FromWeights(WeightProbe())),
    "sam-fresh": lambda: two_pass("fresh"),
    "sam-same": lambda: two_pass("same"),
    "sat": lambda: Method(
        "toy-sat",
        passes=(Pass(perturb=last_direction),),
        remember=lambda released: {"gradient": released.gradient},
    ),
    "schedule": lambda: Method(
        "toy-schedule", plan=lambda budget: Plan((lambda step: 2.0 - 0.1 * step,))
    ),
}


def network():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
