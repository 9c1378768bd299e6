"""What must not change behind the engine's back, and must not happen between two of its steps.

A private run is private for the module and the optimizer that ``make_private`` looked at. Anything that would
let a record reach the weights by another way is an error here, before the release that it would spoil.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from .gradients import Layout, Recorder, Shadow

# Some writes leave no trace in a tensor's version (``.data``, a few kernels). For so many steps contents are compared.
COMPARED_STEPS = 3


class OrderError(RuntimeError):
    """The loop, the module or the optimizer did something out of order; nothing was released."""


class Guard:
    """Watches one module and one optimizer.

    **Guarantee.** When ``before_release`` returns, no parameter in the optimizer holds a gradient that autograd wrote,
    the module is made of the parts that it was made private with, trained parameters are those that require a
    gradient, and no buffer or frozen parameter has changed since the batch was handed out.
    **Edge cases.** Changes that torch does not count, written through ``.data`` in forward, are found in the first
    few steps only; state outside of buffers and parameters is not seen at all.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, layout: Layout, recorder: Recorder, shadows: list[Shadow]
    ) -> None:
        self.module, self.optimizer = module, optimizer
        self.layout, self.recorder, self.shadows = layout, recorder, shadows
        trained = {id(p) for p in layout.parameters}
        self._parameters = list(module.named_parameters())
        # What is looked at in every step is kept in lists that are compared as a whole; names are looked up in an error.
        self._tensors = [p for _, p in self._parameters]
        self._trained = [id(p) in trained for p in self._tensors]
        self._kinds = [(p.dtype, p.device) for p in layout.parameters]
        self._names, self._parts = zip(*module.named_modules(), strict=True)
        self._structure = _held(self._parts)  # what hangs where in the tree of modules
        self._running = [
            (name, part)
            for name, part in module.named_modules()
            if isinstance(part, _NormBase) and part.track_running_stats
        ]
        self._buffers = [
            (f"{name}.{key}" if name else key, part._buffers, key)
            for name, part in module.named_modules()
            for key in part._buffers
        ]
        self._frozen = [(name, p) for name, p in self._parameters if id(p) not in trained]
        self._seen: list[tuple[Tensor | None, int]] = []
        self._contents: list[Tensor | None] = []
        self._steps = 0
        self._reported = False

    # -- between batches ------------------------------------------------------------------------------

    def before_batch(self) -> None:
        """The module is the one that was made private."""
        structure = _held(self._parts)
        if structure != self._structure:
            raise OrderError(self._rebuilt(structure))
        for shadow in self.shadows:
            if shadow.module.__dict__.get("forward") is not shadow:
                raise OrderError(
                    f"the forward of {shadow.name} was replaced after make_private, so its gradients would not be recorded. "
                    "Replace it before make_private, or call engine.detach() first"
                )
        kinds = [(p.dtype, p.device) for p in self.layout.parameters]
        if kinds != self._kinds:
            name, kind = next(
                (n, k) for n, k, old in zip(self.layout.names, kinds, self._kinds, strict=True) if k != old
            )
            raise OrderError(
                f"{name} was moved to {kind[0]} on {kind[1]} after make_private. Move the module before it, or call "
                "engine.detach() and make_private again"
            )
        self._check_trainable()

    def _rebuilt(self, structure: list[tuple]) -> str:
        changed = next(i for i, held in enumerate(structure) if held != self._structure[i])
        part = self._parts[changed]
        name = self._names[changed]
        return (
            f"a layer or parameter of {name or 'the module'} ({type(part).__name__}) was added, removed or replaced after "
            "make_private (by an assignment, or by load_state_dict(assign=True)). Change the module before make_private, or "
            "call engine.detach() and make_private again (the ledger of the first run still counts)"
        )

    def _check_trainable(self) -> None:
        trainable = [p.requires_grad for p in self._tensors]
        if trainable != self._trained:
            changed = next(i for i, (new, old) in enumerate(zip(trainable, self._trained, strict=True)) if new != old)
            raise OrderError(
                f"{self._parameters[changed][0]} {'was unfrozen' if trainable[changed] else 'was frozen'} after make_private. Give "
                "new parameters to optimizer.add_param_group, or freeze and unfreeze before make_private (engine.detach() allows "
                "another one; the ledger of the first still counts)"
            )

    def hand_out(self) -> None:
        """Clears what earlier backwards left, and notes what forward must not change."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        if self._buffers or self._frozen:
            self._seen = list(self._versions())
            if self._steps < COMPARED_STEPS:
                self._contents = [None if t is None else t.detach().clone() for t, _ in self._seen]

    def _versions(self) -> Iterator[tuple[Tensor | None, int]]:
        for _, held, key in self._buffers:
            buffer = held.get(key)
            yield buffer, -1 if buffer is None else buffer._version
        for _, parameter in self._frozen:
            yield parameter, parameter._version

    # -- before a release -----------------------------------------------------------------------------

    def before_release(self) -> None:
        """Nothing has reached the weights by another way."""
        self._check_trainable()
        self._check_gradients()
        self._check_untrained()
        self._report_unused()
        self._steps += 1

    def _check_gradients(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.recorder.clear()
                    raise OrderError(self._foreign(parameter))

    def _foreign(self, parameter: nn.Parameter) -> str:
        name = next((n for n, p in self._parameters if p is parameter), None)
        if name is None:
            return (
                "the optimizer holds a parameter that was not there at make_private and has a gradient that is neither clipped "
                "nor noised. Add parameters of the module with add_param_group of the private optimizer"
            )
        return (
            f"{name}.grad was written by autograd itself: the parameter is used outside its layer's forward (as in "
            "F.linear(x, layer.weight), or a penalty on weights in the loss), so that gradient is neither clipped nor "
            "noised. Call the layer instead; for a penalty use the optimizer's weight_decay"
        )

    def _check_untrained(self) -> None:
        if not self._seen:
            return
        names = [name for name, _, _ in self._buffers] + [name for name, _ in self._frozen]
        changed = []
        for name, (tensor, version), (before, old) in zip(names, self._versions(), self._seen, strict=True):
            if tensor is not before or version != old:
                changed.append(name)
        for name, (tensor, _), content in zip(names, self._seen, self._contents, strict=False):
            same = tensor is None or content is None or torch.equal(tensor.detach(), content)
            if not same and name not in changed:
                changed.append(name)
        self._contents = []
        # Kernels write running statistics without a trace in the version; their layers are known.
        changed += [f"{name}.running_mean" for name, part in self._running if part.training]
        if changed:
            raise OrderError(
                f"the training forward changed {', '.join(dict.fromkeys(changed))}: buffers and frozen parameters are neither "
                "clipped nor noised, so what they learn from records would leave without privacy. Use a layer without running "
                "state (GroupNorm for BatchNorm), or compute the value outside of forward"
            )

    def _report_unused(self) -> None:
        if self._reported:
            return
        self._reported = True
        forwards, received = self.recorder.forwards, self.recorder.received
        silent = [
            name
            for name, p in zip(self.layout.names, self.layout.parameters, strict=True)
            if len(received.get(id(p), ())) < max(1, forwards.get(id(p), 0))
        ]
        if silent:
            warnings.warn(
                f"{', '.join(silent)}: no gradient came back, or fewer than the layer was used. Such a parameter counts as "
                "having a gradient of zero there, and still gets noise; freeze it (requires_grad_(False)) if it is not meant "
                "to be trained",
                stacklevel=5,
            )


def _held(parts: Iterable[nn.Module]) -> list[tuple]:
    """Identities of what each part is made of, children before parameters."""
    return [(*map(id, p._modules.values()), None, *map(id, p._parameters.values())) for p in parts]
