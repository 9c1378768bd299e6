"""The optimizer that the user gets back: their own, behind a private step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from ._loop import PrivateLoop

REFUSED = {
    "LBFGS": "it evaluates the loss several times per step, each of which would be a further "
    "release",
    "ZeroRedundancyOptimizer": "its state is sharded over the ranks; every rank takes the whole "
    "update here, so use the optimizer inside it",
    "SparseAdam": "private gradients are dense, because the noise is; use Adam",
}


def check_optimizer(optimizer: Any) -> None:
    """Refuses what can't take a private step."""
    if isinstance(optimizer, PrivateOptimizer):
        raise ValueError(
            "this optimizer is private already; make_private takes the optimizer that you built "
            "yourself"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    for kind in type(optimizer).__mro__:
        if kind.__name__ in REFUSED and kind.__module__.startswith(
            ("torch.optim", "torch.distributed")
        ):
            raise ValueError(f"{kind.__name__} can't be used privately: {REFUSED[kind.__name__]}")


class PrivateOptimizer(Optimizer):
    """Takes one noisy step per logical batch.

    ``param_groups``, ``state`` and ``defaults`` are the user's optimizer's own, so schedulers made
    before or after see and move the same rates. ``step()`` is called after every backward; it takes
    the update once the logical batch is complete, and ``stepped`` says whether it did.
    """

    # No super().__init__: groups and state live in the inner optimizer and nowhere else.
    def __init__(self, inner: Optimizer, loop: PrivateLoop) -> None:
        self._inner = inner
        self._loop = loop
        # Hooks that are registered here are called where the work is done: once per update, by the
        # inner optimizer.
        for kind in ("step", "state_dict", "load_state_dict"):
            for when in ("pre", "post"):
                name = f"_optimizer_{kind}_{when}_hooks"
                setattr(self, name, getattr(inner, name))

    @property
    def inner(self) -> Optimizer:
        """The user's own optimizer."""
        return self._inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._inner.defaults

    @property
    def clip(self) -> float:
        """The clipping norm that the next logical batch will use, or the present one is using."""
        return self._loop.clip

    @property
    def clip_history(self) -> list[tuple]:
        """What the controller noted at each of its updates."""
        return self._loop.state.clip_history

    @property
    def stepped(self) -> bool:
        """Whether the last ``step()`` moved the weights (False inside a logical batch)."""
        return self._loop.stepped

    @property
    def noise_multiplier(self) -> float:
        """The multiplier of the next sum."""
        return self._loop.noise_multiplier

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._loop.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets what the present chunk left; the logical batch's sum so far stays.

        Gradients always become None.
        """
        self._loop.model.recorder.clear()
        if type(self._inner).zero_grad is not Optimizer.zero_grad:
            self._inner.zero_grad(set_to_none=True)
            return
        # torch's own does the same after a detour by its profiler, which shows on a small network.
        for group in self._inner.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters of the module, between two batches.

        They are private from the next batch on.
        """
        self._loop.check_may_grow()
        self._inner.add_param_group(param_group)
        try:
            self._loop.model.refresh()
        except BaseException:
            self._inner.param_groups.pop()
            raise

    # torch.amp.GradScaler asks this before it steps; a scaled loss would be clipped at the wrong
    # norm, and the scaler skips steps by what the data did.
    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise RuntimeError(
            "GradScaler (fp16) can't be used with a private optimizer: it scales the loss, which "
            "moves the clipping norm, and skips steps by what the data did, which is not private. "
            "Use bfloat16 autocast without a scaler"
        )

    def __repr__(self) -> str:
        return f"PrivateOptimizer(clip={self.clip:g}, {self._inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a private optimizer can't be pickled or copied; save the engine instead: "
            "engine.save(path)"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise TypeError("a private optimizer can't be unpickled; use engine.load(path)")
