"""Checks that nothing has changed behind the engine's back.

A run is private for the module and the optimizer that ``make_private`` has checked. Anything that
would let a record reach the weights in another way is an error, before the next release.
"""

from __future__ import annotations

import ctypes
import hashlib
import warnings
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.modules.module as _hooks
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from ..gradients import CaptureBuffer, LayerCapture, Layout
from ..gradients.capture import OLD_HOOK, old_hook
from . import _order as order
from ._order import OrderError
from ._sharding import Sharding, local

# Some writes leave no trace in a tensor's version (``.data``, a few kernels). On the CPU, contents
# up to so many bytes are compared at every step; all others, which would take longer than that is
# worth, for so many steps.
COMPARED_BYTES = 1 << 14
COMPARED_STEPS = 3
# In these steps, tensors up to so many bytes are compared with a copy. Larger ones are compared by
# a digest, which is slower, because a copy of them would be a good part of a step's memory.
COPIED_BYTES = 1 << 20


class Guard:
    """Watches one module and one optimizer.

    **Guarantee.** When ``before_release`` returns, no parameter in the optimizer holds a gradient
    that autograd wrote, the module is made of the parts that it was made private with, trained
    parameters are those that require a gradient, no buffer is new, and no buffer or parameter,
    trained or frozen, has changed since the batch was handed out. What a forward was found to have
    written stays an error until it is written over.
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
        sharding: Sharding | None = None,
    ) -> None:
        self._sharding = sharding
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
        self._memory: list[_Memory | None] = [None] * len(self._watched)
        self._contents: list[bytes | Tensor | None] = []
        self._steps = 0
        self._reported = False

    # -- between batches

    def before_batch(self) -> None:
        """The module is the one that was made private."""
        if self._sharding is not None:
            self._sharding.rest()
        self._check_structure()
        self._check_rewritten()
        for shadow in self.shadows:
            if shadow.module.__dict__.get("forward") is not shadow:
                raise OrderError(order.REPLACED.format(shadow.name))
        kinds = [(p.dtype, p.device) for p in self.layout.parameters]
        if kinds != self._kinds:
            name, kind = next(
                (n, k)
                for n, k, old in zip(self.layout.names, kinds, self._kinds, strict=True)
                if k != old
            )
            raise OrderError(order.MOVED.format(name, *kind))
        self._check_trainable()

    def _look(self) -> tuple[list[int], list[int], list[str]]:
        """The structure as flat lists, because these are compared quickly.

        They hold how many children and parameters each part has, which ones, and the names of
        buffers.
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
        return order.REBUILT.format(f"{name or 'the module'} ({type(part).__name__})")

    def _check_trainable(self) -> None:
        trainable = [p.requires_grad for p in self._tensors]
        if trainable != self._trained:
            changed = next(
                i
                for i, (new, old) in enumerate(zip(trainable, self._trained, strict=True))
                if new != old
            )
            how = "unfrozen" if trainable[changed] else "frozen"
            raise OrderError(order.FROZEN.format(self._parameters[changed][0], how))

    def hand_out(self) -> None:
        """Clears what earlier backwards left, and notes what forward must not change."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        if self._sharding is not None:
            self._sharding.clear()
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
            memory = self._memory[place] = _Memory.find(tensor)
        if memory.values is not None:
            return memory.values.raw
        if self._steps >= COMPARED_STEPS:
            return None
        if tensor.nbytes > COPIED_BYTES and _in_one_place(tensor):
            return _digest(tensor)
        return tensor.detach().clone()

    def _still_holds(self, place: int, tensor: Tensor | None) -> bool:
        content, memory = self._contents[place], self._memory[place]
        if tensor is None or memory is None:
            return True
        if not memory.of(tensor):
            return False
        if content is None:
            return True
        if isinstance(content, Tensor):
            return _equal(tensor.detach(), content)
        return content == (_digest(tensor) if memory.values is None else memory.values.raw)

    def _versions(self) -> Iterator[tuple[Tensor | None, int]]:
        for _, held, key in self._buffers:
            buffer = held.get(key)
            yield buffer, -1 if buffer is None else buffer._version
        sharding = self._sharding
        for parameter in chain((p for _, p in self._frozen), self.layout.parameters):
            if sharding is None:
                yield parameter, parameter._version
            else:
                yield local(parameter), sharding.version(parameter)

    # -- before a release

    def before_release(self) -> None:
        """Nothing has reached the weights by another way."""
        if self._sharding is not None:
            self._sharding.rest()
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
                left = self._sharding is not None and self._sharding.has_gradient(parameter)
                if left or parameter.grad is not None:
                    self.recorder.clear()
                    raise OrderError(self._foreign(parameter))

    def _foreign(self, parameter: nn.Parameter) -> str:
        name = next((n for n, p in self._parameters if p is parameter), None)
        if name is None:
            return order.UNKNOWN
        return order.FOREIGN.format(name)

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
            return order.BUFFERS_WRITTEN.format(", ".join(dict.fromkeys(untrained)))
        return order.WEIGHTS_WRITTEN.format(", ".join(self._watched[place] for place in places))

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
    """Identities of the children and parameters of each part, and the names of its buffers.

    Buffers themselves may be replaced between batches.
    """
    return [
        (*map(id, p._modules.values()), None, *map(id, p._parameters.values()), None, *p._buffers)
        for p in parts
    ]


class _Memory(NamedTuple):
    """Where a tensor keeps its numbers.

    And the numbers themselves, where they are few enough to be compared at every step.
    """

    tensor: Tensor
    address: int | None  # None where a tensor has no one place in memory
    values: (
        Any  # the bytes themselves, as ctypes sees them; None if they are too many, or elsewhere
    )
    storage: Any  # keeps the address valid, whatever becomes of the tensor

    @staticmethod
    def find(tensor: Tensor) -> _Memory:
        if not _plain(tensor):
            return _Memory(tensor, None, None, None)
        address = tensor.data_ptr()
        if not _in_one_place(tensor) or tensor.nbytes > COMPARED_BYTES:
            return _Memory(tensor, address, None, None)
        # A tensor as ctypes: read in a tenth of a microsecond, and unlike numpy's view it doesn't
        # stop anybody from resizing.
        return _Memory(
            tensor,
            address,
            (ctypes.c_char * tensor.nbytes).from_address(address),
            tensor.untyped_storage(),
        )

    def of(self, tensor: Tensor) -> bool:
        return self.tensor is tensor and (self.address is None or tensor.data_ptr() == self.address)


def _plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter)


def _in_one_place(tensor: Tensor) -> bool:
    """Whether its bytes can be read one after the other."""
    return _plain(tensor) and tensor.is_cpu and tensor.is_contiguous()


def _digest(tensor: Tensor) -> bytes:
    """Of the bytes of a tensor."""
    values = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return hashlib.blake2b(values, digest_size=16).digest()


def _equal(one: Tensor, other: Tensor) -> bool:
    """A NaN equals a NaN here: weights that were NaN before count as unchanged."""
    if torch.equal(one, other) or one.shape != other.shape:
        return one.shape == other.shape
    return bool(((one == other) | ((one != one) & (other != other))).all())
