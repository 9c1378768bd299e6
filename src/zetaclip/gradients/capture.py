"""Remembers what the layers of a module saw, so that one backward pass tells every example's gradient.

A layer's ``forward`` is shadowed on the instance, never on the class, and only acts while a private batch is
out and gradients are enabled; at any other time the module runs as if we were not there. The shadow runs the
layer's own forward with its parameters detached, so autograd computes no summed weight gradient, and passes
the output through ``_Record``, an identity that notes the layer's input and, in backward, its output
gradient. Copies and pickles of the module carry the plain forward.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .contributions import Contribution, widen


class CaptureError(RuntimeError):
    """The module was used in a way whose per-example gradients can't be told."""


# What a layer's backward hands over: the name of a parameter of that layer, and the contribution.
Contributions = dict[str, Contribution]
# What a chunk left, for each parameter by its id().
Received = dict[int, list[Contribution]]


class CaptureBuffer:
    """Where the layers of one module leave their contributions while a batch is out.

    **Guarantee.** Per-example quantities are held here and in the graph only; ``take`` hands them to the
    mechanism and forgets them. ``torch.autograd.grad`` and ``backward(inputs=...)`` leave nothing here, just as
    they would leave nothing in ``.grad``.
    """

    def __init__(self) -> None:
        self.rows = 0  # records handed out; 0 when no batch is out
        self.turn = (
            0  # counts what was handed out, so that a graph of an earlier chunk is known as such
        )
        self.uses: list[LayerCapture] = []  # in forward
        # Keyed by id(parameter): a tensor's own hash goes through Python, which shows on a small network.
        self.received: Received = {}
        # A leaf that requires grad: joined to every recorded output, it makes autograd visit layers whose
        # input needs no gradient, and it tells a whole backward from one that asks for a few inputs only.
        self.anchor = torch.zeros((), requires_grad=True)
        self.short = False  # whether a gradient ever came back in half precision
        self._anchor_node = torch.autograd.graph.get_gradient_edge(self.anchor).node

    def open(self, rows: int) -> None:
        self.rows = rows
        self.turn += 1
        self.clear()

    def close(self) -> None:
        self.rows = 0
        self.clear()

    def clear(self) -> None:
        self.uses = []
        self.received = {}

    def take(self) -> Received:
        received = self.received
        self.clear()
        return received

    @property
    def forwards(self) -> Counter[int]:
        """Uses of each parameter in forward, by its id()."""
        return Counter(key for shadow in self.uses for key in shadow.keys.values())

    def wants(self, turn: int) -> bool:
        """Whether the backward that is running now would fill ``.grad`` fields, for a graph recorded in ``turn``."""
        if torch.is_grad_enabled():
            raise CaptureError(
                "backward(create_graph=True) while a private batch is out: gradients of gradients have no "
                "per-example form here; drop create_graph, or compute the penalty without the private module"
            )
        if not torch._C._will_engine_execute_node(self._anchor_node):
            return False
        if turn != self.turn or self.rows == 0:
            raise CaptureError(
                "backward ran through the graph of a batch that is not out any more: its records would be taken for "
                "those of another batch. Call backward once per batch, on the loss of that batch alone"
            )
        return True

    def widened(self, g: Tensor) -> Tensor:
        """A gradient that came back, in float32 at least."""
        wide = widen(g)
        if wide is not g:
            self.short = True
        return wide

    def check_rows(self, tensor: Tensor, where: str, dims: int = 1) -> None:
        """Refuses a tensor whose first dimension is not the records that were handed out, or that has too few."""
        if tensor.dim() < dims or tensor.shape[0] != self.rows:
            raise CaptureError(
                f"{where} got a tensor of shape {tuple(tensor.shape)}, but {self.rows} records are out and one record "
                "must be one row of the first dimension. If rows were merged (as in view(batch * time, ...)), keep the "
                "batch dimension in front; if one row is shared by all records (a position table, say), expand it to "
                "one row per record before the layer. To evaluate on other data while a batch is out, use torch.no_grad()."
            )


class Node(torch.autograd.Function):
    """A custom node of the graph, applied without the detour that torch makes for its function transforms.

    On a small network that detour is a good part of what privacy costs.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class _Record(Node):
    """Identity on a layer's output that keeps the layer's input until backward brings the output gradient.

    The output is marked as modified in place rather than returned as a view, because a view made in a custom
    function could not be followed by an in-place activation.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        anchor: Tensor,
        shadow: LayerCapture,
        backward: Callable,
        *saved: Tensor,
    ) -> Tensor:
        ctx.mark_dirty(y)
        ctx.save_for_backward(*saved)
        ctx.shadow, ctx.handler, ctx.turn = shadow, backward, shadow.recorder.turn
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        shadow = ctx.shadow
        if shadow.recorder.wants(ctx.turn):
            with exact(g.device):
                saved = (widen(t.detach()) for t in ctx.saved_tensors)
                shadow.hand_over(ctx.handler(shadow, shadow.recorder.widened(g), *saved))
        return g, None, None, None, *(None for _ in ctx.saved_tensors)


_NOTHING = nullcontext()
_is_compiling = torch.compiler.is_compiling
# Callable under torch.compile, also where that has fallen back to ordinary Python.
_frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback


def exact(device: torch.device) -> Any:
    """Norms and sums are never taken in less than float32, whatever the user's context: no autocast inside, no TF32, no bfloat16 in kernels.

    A norm and the sum that it bounds come from different kernels. If these round their inputs to fewer digits, and not in the same
    way, a clipped gradient is longer than C.
    """
    kind = device.type
    autocast = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING
    backend = "cuda" if kind == "cuda" else "mkldnn"
    return (
        _WholeFloat32(backend, autocast) if _WholeFloat32.inside or _rounds(backend) else autocast
    )


# How torch says which kernels may round float32: one switch for matmul and one for cudnn, and from 2.9 on also a setting for each kind
# of kernel, which inherits. The settings are private names behind torch.backends.*.fp32_precision, read here several times in every step.
_precision = getattr(torch._C, "_get_fp32_precision_getter", None)
_set_precision = getattr(torch._C, "_set_fp32_precision_setter", None)
_ROUNDED = ("tf32", "bf16")


def _rounds(backend: str) -> bool:
    """Whether kernels that are used inside ``exact`` may take float32 numbers for shorter ones there."""
    if _precision is not None:
        return _precision(backend, "matmul") in _ROUNDED or _precision(backend, "conv") in _ROUNDED
    return torch.get_float32_matmul_precision() != "highest" or (
        backend == "cuda" and torch.backends.cudnn.allow_tf32
    )


class _WholeFloat32:
    """Kernels take float32 as it is inside; afterwards they do what the user had set. Tested on the CPU alone: we have no GPU to see TF32 on.

    The switches are the process's. Of several threads the last one to leave puts them back: the first would take them from the others.
    """

    inside: ClassVar[int] = 0
    _entered: ClassVar[list[_WholeFloat32]] = []
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, backend: str, autocast: Any) -> None:
        self.backend, self.autocast = backend, autocast

    def __enter__(self) -> None:
        with self._lock:
            self._look()
            _WholeFloat32.inside += 1
            self._entered.append(self)
        try:
            with self._lock:
                self._whole()
            self.autocast.__enter__()
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self.autocast.__exit__(*error)
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            while self.inside == 1 and self._entered:
                self._entered.pop()._put_back()
            _WholeFloat32.inside -= (
                1  # last: who finds 0 here, without the lock, must find the user's settings, too
            )

    def _look(self) -> None:
        self.matmul = _matmul_switch()
        self.cudnn = _precision is None and torch.backends.cudnn.allow_tf32
        # The switch for matmul turns the settings of both backends.
        self.settings = [] if _precision is None else [
            (backend, kind, _precision(backend, kind))
            for backend, kind in (("cuda", "matmul"), ("mkldnn", "matmul"), (self.backend, "conv"))
        ]  # fmt: skip

    def _whole(self) -> None:
        if self.matmul is not None:
            torch.set_float32_matmul_precision("highest")
        if self.cudnn:
            torch.backends.cudnn.allow_tf32 = False
        for backend, kind, _ in self.settings:
            if backend == self.backend and _precision(backend, kind) in _ROUNDED:  # type: ignore[misc]
                _set_precision(backend, kind, "ieee")  # type: ignore[misc]

    def _put_back(self) -> None:
        if self.matmul is not None:
            torch.set_float32_matmul_precision(self.matmul)
        if self.cudnn:
            torch.backends.cudnn.allow_tf32 = True
        for backend, kind, before in self.settings:
            if _precision(backend, kind) != before:  # type: ignore[misc]
                inherited = before == _precision(backend, "all")  # type: ignore[misc]
                _set_precision(backend, kind, "none" if inherited else before)  # type: ignore[misc]


def _matmul_switch() -> str | None:
    """Where the switch for matmul stands, if it has to be turned; torch refuses to say so where only a setting was changed."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
    return None if before == "highest" else before


class LayerCapture:
    """Stands in for one module's ``forward``.

    ``run(shadow, *args, **kwargs)`` is the private forward; ``parameters`` are the trained ones it answers for, by
    the names that its contributions use.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        path: str,
        run: Callable[..., Any],
        parameters: dict[str, nn.Parameter],
        recorder: CaptureBuffer,
    ) -> None:
        self.module = module
        self.name = name or "the module"
        self.path = path
        self.run = run
        self.parameters = parameters
        self.keys = {key: id(parameter) for key, parameter in parameters.items()}
        self.recorder = recorder
        # Where every parameter of the module lies, and whether it is one of ours.
        ours = set(self.keys.values())
        self.places = [
            (part, key, parameter, id(parameter) in ours)
            for part in module.modules()
            for key, parameter in part._parameters.items()
            if parameter is not None
        ]
        self.narrower: dict[frozenset[str], LayerCapture] = {}
        self.shadowed = module.__dict__.get("forward")
        self.inner: Callable[..., Any] = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        if not (recorder.rows and torch.is_grad_enabled()):
            return self.inner(*args, **kwargs)
        if _is_compiling() or callable(_frame_callback()):
            # A compiler would trace the records away, or leave out half of them.
            raise CaptureError(
                "torch.compile of a private module is not supported: per-example gradients are recorded in Python. "
                "Train the module as it is and compile a copy for inference (copy.deepcopy(module))"
            )
        shadow = self
        for part, key, own, trained in self.places:
            if part._parameters.get(key) is not own or (trained and not own.requires_grad):
                shadow = self._narrowed()
                break
        if not shadow.parameters:  # nothing of it is trained in this forward: plain torch
            return self.inner(*args, **kwargs)
        if (
            torch._C._current_graph_task_id() == -1
        ):  # a forward run again by gradient checkpointing is no further use
            recorder.uses.append(shadow)
        return self.run(shadow, *args, **kwargs)

    def _narrowed(self) -> LayerCapture:
        """Answers only for those parameters that are in their places now and require a gradient.

        The others were frozen around this forward, or ``functional_call`` lends the module other
        weights in their place.
        """
        held, gone = set(), set()
        for part, key, parameter, trained in self.places:
            found = part._parameters.get(key)
            if found is parameter and (parameter.requires_grad or not trained):
                held.add(id(parameter))
                continue
            gone.add(id(parameter))
            if found is not None and found.requires_grad:
                raise CaptureError(
                    f"{self.name} was called with another tensor in place of its parameter {key} "
                    "(by torch.func.functional_call?) that requires a gradient: one that is "
                    "computed from trained weights, say. That gradient would be neither clipped "
                    "nor noised. Call the layer with its own parameters, or lend it weights that "
                    "are detached (weight.detach())"
                )
        if held & gone:
            raise CaptureError(
                f"{self.name} was called with another tensor in one place of a parameter that it "
                "uses in several. Replace it in all of them (functional_call does so unless "
                "tie_weights=False), or in none"
            )
        left = {name: p for name, p in self.parameters.items() if id(p) in held}
        shadow = self.narrower.get(frozenset(left))
        if shadow is None:
            shadow = self.narrower[frozenset(left)] = LayerCapture.__new__(LayerCapture)
            keys = {name: self.keys[name] for name in left}
            shadow.__dict__.update(self.__dict__, parameters=left, keys=keys)
        return shadow

    def hand_over(self, contributions: Contributions) -> None:
        """As autograd would leave a gradient: none for a parameter that was frozen meanwhile."""
        received = self.recorder.received
        for name, contribution in contributions.items():
            parameter = self.parameters[name]
            reason = hooked(parameter)
            if reason is not None:
                raise CaptureError(f"parameter {name} of {self.name}: {reason}")
            if parameter.requires_grad:
                received.setdefault(self.keys[name], []).append(contribution)

    def detached_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward, with its own parameters detached."""
        own = self.module.__dict__["_parameters"]
        self.module.__dict__["_parameters"] = {
            k: None if p is None else p.detach() for k, p in own.items()
        }
        try:
            return self.inner(*args, **kwargs)
        finally:
            self.module.__dict__["_parameters"] = own

    def record(self, y: Tensor, backward: Callable[..., Contributions], *saved: Tensor) -> Tensor:
        """``y``, noted: backward calls ``backward(shadow, g, *saved)`` and hands its contributions over."""
        if y._is_view():
            y = y.clone()
        anchor = self.recorder.anchor
        recorded: Tensor = _Record.apply(y, anchor, self, backward, *saved)
        return recorded

    def attach(self) -> None:
        self.module.forward = self

    def detach(self) -> None:
        if self.shadowed is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.forward = self.shadowed

    # A copy or a pickle of the module is the plain module: it must not report to this engine, and must load
    # where zetaclip is not installed.
    def __deepcopy__(self, memo: dict) -> Any:
        return copy.deepcopy(self.inner, memo)

    def __reduce__(self) -> tuple:
        return getattr, (self.module, "forward")


def hooked(parameter: Tensor) -> str | None:
    """Why hooks on this parameter's gradient can't be kept, or None if there are none."""
    if not (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
        return None
    return (
        "it has a hook on its gradient (register_hook or register_post_accumulate_grad_hook), "
        "which would never be called: there is no gradient of the batch before clipping and "
        "noise. Remove the hook (handle.remove()). To change the private gradient, change p.grad "
        "in a hook of the optimizer (register_step_pre_hook)"
    )


OLD_HOOK = (
    "it has a hook by register_backward_hook (torch calls it deprecated), which is given the "
    "gradients of the last operation alone, and that is another one here. Use "
    "register_full_backward_hook"
)


def old_hook(module: nn.Module) -> bool:
    """Whether the module has a backward hook that is not a full one."""
    return module._is_full_backward_hook is False and bool(module._backward_hooks)


def is_private(module: nn.Module) -> bool:
    """Whether a layer of ``module`` reports to an engine already."""
    return any(isinstance(part.__dict__.get("forward"), LayerCapture) for part in module.modules())
