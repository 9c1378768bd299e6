"""The spectral controller on Opacus's own optimizer, for users of Opacus.

Nothing is imported from Opacus. The controller sets the optimizer's ``max_grad_norm`` and, in ghost
mode, the module's, after each update.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ..control.base import BoundProbe, Controller, bound_probe

# In the first, one max_grad_norm both clips and scales the noise; in the second, the module clips.
# Per-layer, adaptive and distributed optimizers keep C elsewhere or change it themselves.
_PLAIN = "DPOptimizer"
_GHOST = "DPOptimizerFastGradientClipping"


class AttachedSpectral:
    """What ``attach_spectral`` returns: the current C, its history, and ``detach``.

    Args:
        optimizer: Opacus's optimizer.
        module: The network.
        hooks: In ghost mode, the object that clips; else None.
        controller: Sets C.
        probe: The controller's probe, bound to the module.
    """

    def __init__(
        self, optimizer: Any, module: Any, hooks: Any, controller: Controller, probe: BoundProbe
    ) -> None:
        self.optimizer = optimizer
        self.controller = controller
        self.probe = probe
        self.steps = 0
        self.clip_history: list[tuple[Any, ...]] = []
        self.state = controller.init()
        self._module = module
        # In ghost mode the object that computes the clipping factors keeps a second C.
        self._homes = [optimizer] if hooks is None else [optimizer, hooks]
        self._set_clip()
        optimizer.zetaclip_controller = self
        # A hook on the user's own optimizer runs after real updates only, not after a physical
        # batch that Opacus skips, and does not replace the accountant's step hook.
        self._handle = optimizer.original_optimizer.register_step_post_hook(self._after_update)

    @property
    def clip(self) -> float:
        """C of the next logical batch."""
        return float(self.state.clip)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, to be saved with the optimizer's."""
        return {
            "steps": self.steps,
            "state": asdict(self.state),
            "clip_history": list(self.clip_history),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continues from saved values."""
        self.steps = int(saved["steps"])
        self.state = type(self.controller.init())(**saved["state"])
        self.clip_history = [tuple(row) for row in saved["clip_history"]]
        self._set_clip()

    def detach(self) -> None:
        """Ends the control. C keeps its value.

        Warns if no probe of the run was usable.
        """
        self._handle.remove()
        self.optimizer.zetaclip_controller = None
        self.controller.finish(self.state)

    def _after_update(self, *_: Any) -> None:
        self.steps += 1
        with torch.no_grad():
            reading = self.probe.read(self._module, self.steps)
        if reading is None:
            return
        self.state = self.controller.update(reading, self.state)
        row = self.controller.entry(self.state)
        if row is not None:
            self.clip_history.append(row)
        self._set_clip()

    def _set_clip(self) -> None:
        for home in self._homes:
            home.max_grad_norm = self.clip


def attach_spectral(optimizer: Any, module: Any, controller: Controller) -> AttachedSpectral:
    """Lets ``controller`` set the clipping norm of an Opacus optimizer after each update.

    Args:
        optimizer: As returned by Opacus's ``make_private``, with flat clipping, in the mode hooks,
            functorch or ghost.
        module: As returned with it. In ghost mode it must be that object, because it clips; with
            ``wrap_model=False`` it is the hooks object.
        controller: A ``Spectral``, ``Replay`` or ``Schedule``.

    Returns:
        A handle with the current C and its history.

    Raises:
        TypeError: The optimizer, the module or the controller is of another kind.
        RuntimeError: A controller is already attached.

    **Guarantee.** Only tensors that the optimizer updates are read, after the noisy update.
    Clipping and noise use the same C at every step, and C is constant inside a logical batch, also
    under ``BatchMemoryManager``. The accounting does not change, because the noise multiplier does
    not.

    **Edge cases.** The controller's initial value replaces the optimizer's ``max_grad_norm`` from
    the start, with a warning if they differ.
    """
    kind = type(optimizer).__name__
    if kind not in (_PLAIN, _GHOST) or not type(optimizer).__module__.startswith("opacus."):
        raise TypeError(
            f"attach_spectral works on Opacus's {_PLAIN} and {_GHOST} (flat clipping, one process),"
            f" not on {kind}: others keep the clipping norm in more places or change it themselves"
        )
    if controller.probe is None:
        raise TypeError(
            "this controller needs the mechanism's releases, which Opacus does not provide"
        )
    hooks = _ghost_hooks(module) if kind == _GHOST else None
    if getattr(optimizer, "zetaclip_controller", None) is not None:
        raise RuntimeError("a controller is already attached to this optimizer; detach it first")
    network = module._module if type(module).__module__.startswith("opacus.") else module
    if not isinstance(network, nn.Module):
        raise TypeError(f"module must be what make_private returned, not {type(module).__name__}")
    updated = {
        id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad
    }
    trained = {name: p for name, p in network.named_parameters() if id(p) in updated}
    probe = bound_probe(controller, network, trained)
    assert probe is not None
    clip = float(controller.init().clip)
    if optimizer.max_grad_norm != clip:
        warnings.warn(
            f"the controller starts at {clip:g} and replaces"
            f" max_grad_norm={optimizer.max_grad_norm:g}",
            stacklevel=2,
        )
    return AttachedSpectral(optimizer, network, hooks, controller, probe)


def _ghost_hooks(module: Any) -> Any:
    if hasattr(module, "max_grad_norm") and hasattr(module, "get_clipping_coef"):
        return module
    raise TypeError(
        "in ghost mode the clipping norm is also in the object that make_private returned first:"
        f" pass that one, not a {type(module).__name__}"
    )
