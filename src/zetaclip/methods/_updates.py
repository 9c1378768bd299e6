"""What happens to a private gradient: the optimizers of the methods.

These are torch's SGD, Adam and AdamW, and Adam with the noise taken out of its scale. They work on
released values, so they are post-processing and cost no privacy.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..control import Released
from ._auto import Auto


@runtime_checkable
class NoiseAware(Protocol):
    """An optimizer that is told, before each step, how noisy the next gradient is."""

    def set_noise_std(self, std: float) -> None:
        """``std`` is that of each coordinate."""


class AdamBC(Optimizer):
    """Adam whose second moment has the variance of the privacy noise subtracted (Tang et al. 2024).

        θ <- (1 - lr * weight_decay) θ - lr * m̂ / sqrt(max(v̂ - Φ̂, floor))

    Φ̂ is the moving average of the noise variance, with the β₂ and bias correction of v̂, so it
    is right if C or σ changes. The engine tells the noise before each step (``set_noise_std``).

    Args:
        params: What it trains.
        lr: The learning rate.
        betas: Decay of the first and of the second moment.
        floor: Smallest second moment. It is tied to ``lr``: a coordinate at the floor moves by lr /
            sqrt(floor) times m̂.
        weight_decay: Decoupled weight decay.

    Raises:
        ValueError: A number is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if not lr >= 0.0:
            raise ValueError(f"lr must be at least 0, not {lr}")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be at least 0 and below 1, not {betas}")
        if not floor >= 0.0:
            raise ValueError(f"floor must be at least 0, not {floor}")
        if not weight_decay >= 0.0:
            raise ValueError(f"weight_decay must be at least 0, not {weight_decay}")
        self._noise_std: float | None = None
        super().__init__(
            params, {"lr": lr, "betas": tuple(betas), "floor": floor, "weight_decay": weight_decay}
        )

    def set_noise_std(self, std: float) -> None:
        """Sets the standard deviation of the noise in each coordinate of the next gradient."""
        self._noise_std = std

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self._noise_std is None:
            raise RuntimeError(
                "AdamBC must be told the noise: use it through make_private, or call "
                "set_noise_std(std)"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group, self._noise_std**2)
        return loss

    def _step_group(self, group: dict[str, Any], noise_variance: float) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for p in params:
            if not self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        grads = [p.grad for p in params]
        first = [self.state[p]["exp_avg"] for p in params]
        second = [self.state[p]["exp_avg_sq"] for p in params]
        beta1, beta2 = group["betas"]
        step = group["step"] = group.get("step", 0) + 1
        group["noise_sq"] = beta2 * group.get("noise_sq", 0.0) + (1 - beta2) * noise_variance
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        scale = torch._foreach_sub(second, group["noise_sq"])
        torch._foreach_div_(scale, 1 - beta2**step)  # corrected first, floored after
        torch._foreach_clamp_min_(scale, group["floor"])
        torch._foreach_sqrt_(scale)
        lr = float(group["lr"])
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(params, first, scale, -lr / (1 - beta1**step))


@dataclass(frozen=True)
class Family:
    """An update by name: its class, and the options that may be set."""

    kind: type[Optimizer]
    options: tuple[str, ...]
    private_name: str

    def matches(self, optimizer: Optimizer) -> bool:
        # torch's AdamW is a subclass of its Adam, and is another update.
        return isinstance(optimizer, self.kind) and (
            self.kind is not Adam or not isinstance(optimizer, AdamW)
        )


FAMILIES = {
    "sgd": Family(SGD, ("momentum", "dampening", "nesterov", "weight_decay"), "dp-sgd"),
    "adam": Family(Adam, ("betas", "eps", "weight_decay", "amsgrad"), "dp-adam"),
    "adamw": Family(AdamW, ("betas", "eps", "weight_decay", "amsgrad"), "dp-adamw"),
    "adam-bc": Family(AdamBC, ("betas", "floor", "weight_decay"), "dp-adam-bc"),
    "auto": Family(
        Auto, ("momentum", "weight_decay", "gain", "steps", "regression", "decay"), "auto"
    ),
}


def defaults(family: str) -> dict[str, Any]:
    """The options of a family and their defaults."""
    known = inspect.signature(FAMILIES[family].kind.__init__).parameters
    return {name: known[name].default for name in FAMILIES[family].options}


def build(family: str, params: Iterable[Any], lr: float, options: dict[str, Any]) -> Optimizer:
    """The family's optimizer.

    Args:
        family: A name of ``FAMILIES``.
        params: What it trains.
        lr: The learning rate.
        options: Further arguments of the optimizer, by name.

    Raises:
        ValueError: The family has no such option; the message names similar ones.
    """
    entry = FAMILIES[family]
    for name in options:
        if name not in entry.options:
            near = difflib.get_close_matches(name, entry.options, 1)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(entry.options)}"
            )
            raise ValueError(f"{entry.kind.__name__} has no option {name!r} here; {hint}")
    if "betas" in options:  # a list where it comes from a file
        options = {**options, "betas": tuple(options["betas"])}
    params = list(params)
    if entry.kind in (Adam, AdamW) and all(map(_fusible, params)):
        # One pass over the weights instead of a dozen: a third of the time for small networks.
        options = {**options, "fused": True}
    return entry.kind(params, lr=lr, **options)  # type: ignore[call-arg]


def _fusible(given: Any) -> bool:
    """Plain tensors that torch's fused kernels take.

    Groups and named parameters go the ordinary way.
    """
    if not isinstance(given, Tensor):
        return False
    return given.dtype in (torch.float32, torch.float64) and given.device.type in ("cpu", "cuda")


def check_family(method: str, family: str, optimizer: Optimizer) -> None:
    """Refuses an optimizer of another family than the method's."""
    if FAMILIES[family].matches(optimizer):
        return
    other = next(
        (entry.private_name for entry in FAMILIES.values() if entry.matches(optimizer)), None
    )
    instead = f", or use method {other!r}" if other else ""
    raise ValueError(
        f"method {method!r} updates with {FAMILIES[family].kind.__name__}, not "
        f"{type(optimizer).__name__}: build the optimizer with method.optimizer(params){instead}"
    )


@contextmanager
def scaled_rates(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Learning rates times ``factor`` inside; schedulers never see it."""
    kept = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, kept, strict=True):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, kept, strict=True):
            group["lr"] = rate


@dataclass(frozen=True)
class Ascend:
    """ρ along this update's last release: the ascent of sharpness-aware training."""

    rho: float

    def __call__(
        self, releases: Sequence[Released], memory: dict[str, Tensor]
    ) -> tuple[Tensor, float]:
        return releases[-1].gradient, self.rho


@dataclass(frozen=True)
class AlongLast:
    """ρ along what the update before released; nothing at the first update."""

    rho: float

    def __call__(
        self, releases: Sequence[Released], memory: dict[str, Tensor]
    ) -> tuple[Tensor, float] | None:
        return (memory["gradient"], self.rho) if memory else None

    def remember(self, released: Released) -> dict[str, Tensor]:
        return {"gradient": released.gradient}


class WeightAverage:
    """A moving average of the weights that forgets where training began.

    It starts at zero and divides the missing weight out; one that starts at the initial weights
    still holds 15 % of them after 1880 steps of decay 0.999.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay must be at least 0 and below 1, not {decay}")
        self.parameters = list(parameters)
        self.decay = decay
        self.steps = 0
        self._sums = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Adds the present weights to the average; call it after each update."""
        torch._foreach_lerp_(self._sums, [p.detach() for p in self.parameters], 1 - self.decay)
        self.steps += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the parameters hold the average.

        Before the first update they keep their values.
        """
        if not self.steps:
            yield
            return
        kept = [p.detach().clone() for p in self.parameters]
        self.fix()
        try:
            yield
        finally:
            self._put(kept)

    def fix(self) -> None:
        """Puts the average into the parameters for good, if there was an update."""
        if self.steps:
            self._put([total / (1 - self.decay**self.steps) for total in self._sums])

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "decay": self.decay,
            "sums": [total.clone() for total in self._sums],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if [t.shape for t in state["sums"]] != [t.shape for t in self._sums]:
            raise ValueError("an average of other weights")
        self.steps, self.decay = int(state["steps"]), float(state["decay"])
        self._sums = [t.clone() for t in state["sums"]]
