"""What must not change behind the engine's back, and must not happen between two of its steps.

A private run is private for the module and the optimizer that ``make_private`` looked at. Anything
that would let a record reach the weights by another way is an error here, before the release that
it would spoil.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from itertools import chain

import torch.nn.modules.module as _hooks
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from ..gradients import CaptureBuffer, LayerCapture, Layout
from ..gradients.capture import OLD_HOOK, old_hook
from ._memory import COMPARED_STEPS, Memory, equal
from ._order import FORKED, OrderError


class Guard:
    """Watches one module and one optimizer.

    **Guarantee.** When ``before_release`` returns, no parameter in the optimizer holds a gradient
    that autograd wrote, the module is made of the parts that it was made private with, trained
    parameters are those that require a gradient, no buffer is new, no buffer or parameter, trained
    or frozen, has changed since the batch was handed out, and the process is the one that opened
    the batch. What a forward was found to have written stays an error until it is written over.
    **Edge cases.** Changes that torch does not count, written through ``.data`` in forward, are
    found in the first few steps only where the tensor is large or not on the CPU; state outside of
    buffers and parameters is not seen at all, nor what the forward of a batch does that never comes
    to its ``step()``.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        layout: Layout,
        recorder: CaptureBuffer,
        shadows: list[LayerCapture],
    ) -> None:
        self.module, self.optimizer = module, optimizer
        self.layout, self.recorder, self.shadows = layout, recorder, shadows
        trained = {id(p) for p in layout.parameters}
        self._parameters = list(module.named_parameters())
        # What is looked at in every step is kept in lists that are compared as a whole; names are
        # looked up in an error.
        self._tensors = [p for _, p in self._parameters]
        self._trained = [id(p) in trained for p in self._tensors]
        self._kinds = [(p.dtype, p.device) for p in layout.parameters]
        self._names, self._parts = zip(*module.named_modules(), strict=True)
        self._structure = _held(self._parts)  # what hangs where in the tree of modules
        self._outline = self._look()
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
        untrained = [name for name, _, _ in self._buffers] + [name for name, _ in self._frozen]
        # A trained parameter is noised as far as its gradient goes: what forward writes into it is
        # as raw as in a buffer.
        self._watched = [*untrained, *layout.names]
        self._untrained = len(untrained)
        self._seen: list[tuple[Tensor | None, int]] = []
        self._learned: list[
            tuple[int, Tensor | None, int]
        ] = []  # what forward wrote: its place, and how it was found
        self._memory: list[Memory | None] = [None] * len(self._watched)
        self._contents: list[bytes | Tensor | None] = []
        self._process = os.getpid()
        self._steps = 0
        self._reported = False

    # -- between batches

    def before_batch(self) -> None:
        """The module is the one that was made private."""
        self._process = os.getpid()
        self._check_structure()
        self._check_rewritten()
        for shadow in self.shadows:
            if shadow.module.__dict__.get("forward") is not shadow:
                raise OrderError(
                    f"the forward of {shadow.name} was replaced after make_private, so its "
                    "gradients would not be recorded. Replace it before make_private, or call "
                    "engine.detach() first"
                )
        kinds = [(p.dtype, p.device) for p in self.layout.parameters]
        if kinds != self._kinds:
            name, kind = next(
                (n, k)
                for n, k, old in zip(self.layout.names, kinds, self._kinds, strict=True)
                if k != old
            )
            raise OrderError(
                f"{name} was moved to {kind[0]} on {kind[1]} after make_private. Move the module "
                "before it, or call engine.detach() and make_private again"
            )
        self._check_trainable()

    def _look(self) -> tuple[list[int], list[int], list[str]]:
        """The structure as flat lists, which are compared in a fraction of the time.

        How much each part holds, what that is, and the names of buffers.
        """
        held: list[dict] = [
            some for part in self._parts for some in (part._modules, part._parameters)
        ]
        buffers = [part._buffers for part in self._parts]
        return (
            [*map(len, held), *map(len, buffers)],
            [*map(id, chain(*map(dict.values, held)))],
            [*chain(*buffers)],
        )

    def _check_structure(self) -> None:
        if self._look() != self._outline:
            raise OrderError(self._rebuilt(_held(self._parts)))

    def _rebuilt(self, structure: list[tuple]) -> str:
        changed = next(i for i, held in enumerate(structure) if held != self._structure[i])
        part = self._parts[changed]
        name = self._names[changed]
        return (
            f"a layer, parameter or buffer of {name or 'the module'} ({type(part).__name__}) was "
            "added, removed or replaced after make_private (by an assignment, by "
            "load_state_dict(assign=True), or by a forward that builds it on first use). Change "
            "the module before make_private (run such a forward once before it, on made-up "
            "records), or call engine.detach() and make_private again (the ledger of the first "
            "run still counts)"
        )

    def _check_trainable(self) -> None:
        trainable = [p.requires_grad for p in self._tensors]
        if trainable != self._trained:
            changed = next(
                i
                for i, (new, old) in enumerate(zip(trainable, self._trained, strict=True))
                if new != old
            )
            raise OrderError(
                f"{self._parameters[changed][0]} "
                f"{'was unfrozen' if trainable[changed] else 'was frozen'} after make_private. "
                "Give new parameters to optimizer.add_param_group, or freeze and unfreeze before "
                "make_private (engine.detach() allows another one; the ledger of the first still "
                "counts)"
            )

    def hand_out(self) -> None:
        """Clears what earlier backwards left, and notes what forward must not change."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self._seen = list(self._versions())
        self._contents = [
            self._content(place, tensor) for place, (tensor, _) in enumerate(self._seen)
        ]

    def _content(self, place: int, tensor: Tensor | None) -> bytes | Tensor | None:
        """What a tensor holds now; None where that is not going to be compared."""
        if tensor is None:
            return None
        memory = self._memory[place]
        if memory is None or not memory.of(tensor):
            memory = self._memory[place] = Memory.find(tensor)
        if memory.values is not None:
            return memory.values.raw
        return tensor.detach().clone() if self._steps < COMPARED_STEPS else None

    def _still_holds(self, place: int, tensor: Tensor | None) -> bool:
        content, memory = self._contents[place], self._memory[place]
        if tensor is None or memory is None:
            return True
        if not memory.of(tensor):
            return False
        if content is None:
            return True
        return (
            memory.values.raw == content
            if isinstance(content, bytes)
            else equal(tensor.detach(), content)
        )

    def _versions(self) -> Iterator[tuple[Tensor | None, int]]:
        for _, held, key in self._buffers:
            buffer = held.get(key)
            yield buffer, -1 if buffer is None else buffer._version
        for _, frozen in self._frozen:
            yield frozen, frozen._version
        for trained in self.layout.parameters:
            yield trained, trained._version

    # -- before a release

    def before_release(self) -> None:
        """Nothing has reached the weights by another way."""
        if os.getpid() != self._process:
            raise OrderError(FORKED)
        # Also what this batch's forward did: the next batch would be too late, and may never come.
        self._check_structure()
        self._check_trainable()
        self._check_hooks()
        self._check_gradients()
        self._check_unwritten()
        self._report_unused()
        self._steps += 1

    def _check_hooks(self) -> None:
        """Hooks of parameters are seen in backward; all other kinds but this run as in torch."""
        for name, part in zip(self._names, self._parts, strict=True):
            if part._backward_hooks and old_hook(part):
                raise OrderError(f"{name or 'the module'} ({type(part).__name__}): {OLD_HOOK}")
        if _hooks._global_is_full_backward_hook is False and _hooks._global_backward_hooks:
            raise OrderError(f"torch itself: {OLD_HOOK.replace('register_', 'register_module_')}")

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
                "the optimizer holds a parameter that was not there at make_private and has a "
                "gradient that is neither clipped nor noised. Add parameters of the module with "
                "add_param_group of the private optimizer"
            )
        return (
            f"{name}.grad was written by autograd itself: the parameter is used outside its "
            "layer's forward (as in F.linear(x, layer.weight), or a penalty on weights in the "
            "loss), so that gradient is neither clipped nor noised. Call the layer instead; for a "
            "penalty use the optimizer's weight_decay"
        )

    def _check_unwritten(self) -> None:
        if not self._seen:
            return
        found = enumerate(zip(self._versions(), self._seen, strict=True))
        changed = [
            (place, tensor, version)
            for place, ((tensor, version), (before, old)) in found
            if tensor is not before or version != old or not self._still_holds(place, tensor)
        ]
        # Kernels write running statistics without a trace in the version; their layers are known.
        running = [f"{name}.running_mean" for name, part in self._running if part.training]
        if changed or running:
            self._learned = changed
            raise OrderError(self._written([place for place, _, _ in changed], running))

    def _check_rewritten(self) -> None:
        """Raises unless what an earlier forward wrote is gone.

        A new iteration over the loader must not silence the error.
        """
        if not self._learned:
            return
        now = list(self._versions())
        left = [
            place
            for place, tensor, version in self._learned
            if now[place][0] is tensor and now[place][1] == version
        ]
        if left:
            raise OrderError(
                f"{self._written(left, [])}. What it wrote is still there: load weights and "
                "buffers from before it (engine.load, or load_state_dict), or call make_private "
                "with a module that has seen no records"
            )
        self._learned = []

    def _written(self, places: list[int], running: list[str]) -> str:
        untrained = [self._watched[place] for place in places if place < self._untrained] + running
        if untrained:
            return (
                f"the training forward changed {', '.join(dict.fromkeys(untrained))}: buffers and "
                "frozen parameters are neither clipped nor noised, so what they learn from "
                "records would leave without privacy. Use a layer without running state "
                "(GroupNorm for BatchNorm), or compute the value outside of forward"
            )
        return (
            f"{', '.join(self._watched[place] for place in places)} was written while a batch was "
            "out, by the training forward or the loop around it: only gradients are clipped and "
            "noised, so what a trained parameter gets in another way (a codebook that follows the "
            "records, an initial value taken from the first batch) would leave without privacy. "
            "Let the loss train it, or set it on made-up records before make_private; a "
            "constraint on weights, or other weights for an evaluation, belong between step() and "
            "the next batch"
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
                f"{', '.join(silent)}: no gradient came back, or fewer than the layer was used. "
                "Such a parameter counts as having a gradient of zero there, and still gets "
                "noise; freeze it (requires_grad_(False)) if it is not meant to be trained",
                stacklevel=7,
            )


def _held(parts: Iterable[nn.Module]) -> list[tuple]:
    """Identities of what each part is made of, children before parameters.

    Buffers may be replaced between batches, so of them only the names.
    """
    return [
        (*map(id, p._modules.values()), None, *map(id, p._parameters.values()), None, *p._buffers)
        for p in parts
    ]
