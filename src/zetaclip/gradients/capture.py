"""Records inputs and output gradients of layers, so that one backward pass gives every gradient.

A layer's ``forward`` is replaced on the instance, never on the class, by a shadow. It acts only
while a private batch is out and gradients are enabled; at any other time the module runs as usual.
The shadow runs the layer's own forward with detached parameters, so that autograd computes no
summed weight gradient. It passes the output through ``_Record``, an identity that records the
layer's input and, in backward, its output gradient. Copies and pickles of the module have the
original forward.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .contributions import Contribution
from .matmul import WORTH_IT, linear
from .precision import ROUNDED, WholeFloat32, precision


class CaptureError(RuntimeError):
    """The module was used in a way for which per-example gradients cannot be computed."""


# The result of a layer's backward: contributions by the name of the layer's parameter.
Contributions = dict[str, Contribution]
# The contributions of a chunk, by id() of the parameter.
Received = dict[int, list[Contribution]]


HALF = (torch.float16, torch.bfloat16)
_TURNS = itertools.count(1)


def widen(tensor: Tensor) -> Tensor:
    """Half precision as float32; other tensors unchanged."""
    return tensor.float() if tensor.dtype in HALF else tensor


class CaptureBuffer:
    """Collects the contributions of one module's layers while a batch is out.

    Attributes:
        rows: Number of records in the chunk that is out; 0 if none is.
        turn: Number of the chunk, to recognize the graph of an earlier one. All modules of the
            process count together.
        uses: Shadows whose forward has run.
        received: Contributions by id() of their parameter.
        anchor: A leaf that requires a gradient and is an input of every recorded output. Because of
            it autograd visits layers whose input needs no gradient, and a full backward can be
            distinguished from one for a few inputs only.
        short: Whether a gradient was ever in half precision.
        half: Whether a layer's output was in half precision in this chunk.
        undivided: Whether the backward of this chunk started with the number of its rows, which
            undoes the division of a mean.

    **Guarantee.** Per-example quantities are stored only here and in the graph. ``take`` passes
    them to the mechanism and deletes them here. ``torch.autograd.grad`` and
    ``backward(inputs=...)`` add nothing here, just as they would add nothing to ``.grad``.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.turn = 0
        self.uses: list[LayerCapture] = []
        # Not keyed by the parameter: a tensor's hash runs in Python, which is slow.
        self.received: Received = {}
        self.anchor = torch.zeros((), dtype=torch.float32, requires_grad=True)
        self.short = False
        self.half = False
        self.undivided = False
        # Whether a layer ran without gradients in this chunk, as inside reentrant checkpointing.
        self.unrecorded = False
        self.anchor_node = torch.autograd.graph.get_gradient_edge(self.anchor).node

    def open(self, rows: int) -> None:
        """Starts a chunk of ``rows`` records."""
        self.rows = rows
        self.turn = next(_TURNS)
        self.unrecorded = self.half = self.undivided = False
        self.clear()

    def close(self) -> None:
        """Ends the chunk."""
        self.rows = 0
        self.clear()

    def clear(self) -> None:
        """Deletes what was recorded."""
        self.uses = []
        self.received = {}

    def take(self) -> Received:
        """Ends the chunk; returns its contributions, which are deleted here."""
        received = self.received
        self.close()
        return received

    @property
    def forwards(self) -> Counter[int]:
        """How often each parameter was used in forward, by its id()."""
        return Counter(key for shadow in self.uses for key in shadow.keys.values())

    def wants(self, turn: int) -> bool:
        """Whether the running backward, through the graph of ``turn``, would fill ``.grad`` fields.

        Raises:
            CaptureError: The graph is of an earlier chunk, or ``create_graph`` is set.
        """
        if torch.is_grad_enabled():
            raise CaptureError(
                "backward(create_graph=True) while a private batch is out: gradients of gradients "
                "have no per-example form here; drop create_graph, or compute the penalty without "
                "the private module"
            )
        if not torch._C._will_engine_execute_node(self.anchor_node):
            return False
        if turn != self.turn or self.rows == 0:
            raise CaptureError(
                "backward ran through the graph of a batch that is not out any more: its records "
                "would be mistaken for those of another batch. Call backward once per batch, on "
                "the loss of that batch alone"
            )
        return True

    def widened(self, g: Tensor) -> Tensor:
        """A gradient in at least float32; ``short`` remembers whether it was in less."""
        if g.dtype in HALF:
            self.short = True
        return widen(g)

    def check_rows(self, tensor: Tensor, where: str, dims: int = 1) -> None:
        """Checks that a tensor has one row per record.

        Args:
            tensor: Input of a layer.
            where: Name of the layer, for the message.
            dims: The least number of dimensions.

        Raises:
            CaptureError: The first dimension is not the records, or there are too few dimensions.
        """
        if tensor.dim() < dims or tensor.shape[0] != self.rows:
            raise CaptureError(
                f"{where} got a tensor of shape {tuple(tensor.shape)}, but {self.rows} records are "
                "out and one record must be one row of the first dimension. If rows were merged "
                "(as in view(batch * time, ...)), keep the batch dimension in front; if one row is "
                "shared by all records (for example a position table), expand it to one row per "
                "record before the layer. To evaluate on other data while a batch is out, use "
                "torch.no_grad()."
            )


# A custom autograd function without torch's handling of function transforms, which is a large part
# of the cost of privacy on a small network; ``LayerCapture`` refuses such transforms.
Node: Any = torch.autograd.function._SingleLevelFunction


class _Record(Node):
    """Identity on a layer's output that stores the layer's input until backward.

    The output is marked as modified in place instead of returned as a view, because torch does not
    allow an in-place activation on a view made by a custom function.
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
        saved = ctx.saved_tensors  # once: checkpointing computes them again for one reading
        ctx.shadow.receive(ctx.turn, ctx.handler, g, *saved)
        return g, None, None, None, *(None for _ in saved)


_NOTHING = nullcontext()
_is_compiling = torch.compiler.is_compiling
# Returns a callable under torch.compile, also if that has fallen back to ordinary Python.
_frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback


def exact(device: torch.device) -> Any:
    """A context in which norms and sums are computed in at least float32.

    It turns off autocast, and TF32 and bfloat16 in kernels, whatever the user's settings. A norm
    and the sum that it bounds come from different kernels. If these round their inputs to lower
    precision, and not in the same way, a clipped gradient can be longer than C.
    """
    kind = device.type
    autocast = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING
    backend = "cuda" if kind == "cuda" else "mkldnn"
    return WholeFloat32(backend, autocast) if WholeFloat32.inside or _rounds(backend) else autocast


def _rounds(backend: str) -> bool:
    """Whether kernels that are used inside ``exact`` may round float32 to lower precision."""
    if precision is not None:
        return precision(backend, "matmul") in ROUNDED or precision(backend, "conv") in ROUNDED
    return torch.get_float32_matmul_precision() != "highest" or (
        backend == "cuda" and torch.backends.cudnn.allow_tf32
    )


class LayerCapture:
    """Replaces one module's ``forward``.

    Args:
        module: The module.
        name: Its name in the model.
        path: How its gradients are computed, for reports.
        run: The private forward, called as ``run(shadow, *args, **kwargs)``.
        parameters: The trained parameters whose gradients it provides, by the names that its
            contributions use.
        recorder: Where to put the contributions.
        backward: Gives the contributions of a layer with a rule, called as
            ``backward(shadow, g, x)``.
        dims: The least number of dimensions of a batch of its inputs.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        path: str,
        run: Callable[..., Any],
        parameters: dict[str, nn.Parameter],
        recorder: CaptureBuffer,
        backward: Callable[..., Contributions] | None = None,
        dims: int = 1,
    ) -> None:
        self.module = module
        self.name = name or "the module"
        self.path = path
        self.run = run
        self.parameters = parameters
        self.keys = {key: id(parameter) for key, parameter in parameters.items()}
        self.recorder = recorder
        self.backward, self.dims = backward, dims
        # The place of every parameter of the module, and whether it is in ``parameters``.
        ours = set(self.keys.values())
        self.places = [
            (part, key, parameter, id(parameter) in ours)
            for part in module.modules()
            for key, parameter in part._parameters.items()
            if parameter is not None
        ]
        self.narrower: dict[frozenset[str], LayerCapture] = {}
        self.spread = False  # whether its parameters are gathered for each forward
        self.shadowed = module.__dict__.get("forward")
        self.inner: Callable[..., Any] = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The private forward while a batch is out, otherwise the module's own."""
        recorder = self.recorder
        if not (recorder.rows and torch.is_grad_enabled()):
            recorder.unrecorded = True
            return self.inner(*args, **kwargs)
        if _is_compiling() or callable(_frame_callback()):
            # A compiled graph would skip the recording, or a part of it.
            raise CaptureError(
                "torch.compile of a private module is not supported: per-example gradients are "
                "recorded in Python. Train the module as it is and compile a copy for inference "
                "(copy.deepcopy(module))"
            )
        if torch._C._are_functorch_transforms_active():
            raise CaptureError(
                "a private module was called inside a transform of torch.func (vmap, grad, jvp, "
                "...): what it does to the records can't be recorded. Call the module itself on "
                "the batch; for evaluation use torch.no_grad()"
            )
        shadow = self
        for part, key, own, trained in self.places:
            if part._parameters.get(key) is not own or (trained and not own.requires_grad):
                shadow = self._narrowed()
                break
        if not shadow.parameters:  # no parameter is trained in this forward
            return self.inner(*args, **kwargs)
        # A forward that gradient checkpointing runs again is not a second use.
        if torch._C._current_graph_task_id() == -1:
            recorder.uses.append(shadow)
        return self.run(shadow, *args, **kwargs)

    def _narrowed(self) -> LayerCapture:
        """A shadow of only the parameters that are in their places now and require a gradient.

        The others were frozen for this forward, or ``functional_call`` put other weights in their
        place.
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
                    "(by torch.func.functional_call?) that requires a gradient, for example one "
                    "that is computed from trained weights. That gradient would be neither clipped "
                    "nor noised. Call the layer with its own parameters, or with detached weights "
                    "(weight.detach())"
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

    def receive(self, turn: int, backward: Callable, g: Tensor, *saved: Tensor) -> None:
        """Called in the backward pass: hands over the contributions if they are wanted.

        Args:
            turn: Of the chunk whose graph this is.
            backward: Gives the contributions, called as ``backward(shadow, g, *saved)``.
            g: The output gradient.
            *saved: Tensors that ``backward`` needs.
        """
        recorder = self.recorder
        if recorder.wants(turn):
            with exact(g.device):
                wide = [widen(tensor.detach()) for tensor in saved]
                self.hand_over(backward(self, recorder.widened(g), *wide))

    def hand_over(self, contributions: Contributions) -> None:
        """Gives contributions to the recorder, except for parameters that were frozen meanwhile.

        Raises:
            CaptureError: A parameter has a hook on its gradient.
        """
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

    def record(self, y: Tensor, backward: Callable[..., Any] | None, *saved: Tensor) -> Tensor:
        """Records a layer's output.

        Args:
            y: The output.
            backward: Called in the backward pass as ``backward(shadow, g, *saved)``, with the
                output gradient ``g``; its contributions go to the recorder.
            *saved: Tensors that it needs.

        Returns:
            ``y``, with a node in the graph.
        """
        if y._is_view():
            y = y.clone()
        if y.dtype in HALF:
            self.recorder.half = True
        anchor = self.recorder.anchor
        recorded: Tensor = _Record.apply(y, anchor, self, backward, *saved)
        return recorded

    def gathered(self, whole: dict[int, nn.Parameter]) -> None:
        """The layer is going to run with these in place of parameters that ranks hold parts of.

        Args:
            whole: What stands in a parameter's place during forward, by id() of the parameter.
        """
        self.spread = True
        self.parameters = {name: whole.get(id(p), p) for name, p in self.parameters.items()}
        self.places = [(part, key, whole.get(id(p), p), ours) for part, key, p, ours in self.places]

    def attach(self) -> None:
        """Replaces the module's forward."""
        self.module.forward = self

    def detach(self) -> None:
        """Restores the module's forward."""
        if self.shadowed is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.forward = self.shadowed

    # A copy or a pickle of the module is the original module: it must not record for this engine,
    # and must load where zetaclip is not installed.
    def __deepcopy__(self, memo: dict) -> Any:
        return copy.deepcopy(self.inner, memo)

    def __reduce__(self) -> tuple:
        return getattr, (self.module, "forward")


def any_layer(shadow: LayerCapture, *args: Any, **kwargs: Any) -> Tensor:
    """The private forward of most layers: their own, whose only input is recorded."""
    (x,) = (*args, *kwargs.values())
    shadow.recorder.check_rows(x, shadow.name, shadow.dims)
    return shadow.record(shadow.detached_forward(x), shadow.backward, x)


class _Linear(Node):
    """A linear layer in one node of the graph: on a small network, nodes are most of the overhead.

    The parameters are not inputs of the node, so autograd computes no gradient of them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, shadow: LayerCapture) -> Tensor:
        own = shadow.module._parameters
        weight = own["weight"]
        assert weight is not None
        ctx.save_for_backward(x, weight)
        ctx.shadow, ctx.turn = shadow, shadow.recorder.turn
        product = linear if x.numel() * len(weight) >= WORTH_IT else F.linear
        return product(x, weight, own["bias"])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        ctx.shadow.receive(ctx.turn, ctx.shadow.backward, g, x)
        if not ctx.needs_input_grad[0]:
            return None, None, None
        product = linear if g.numel() * weight.shape[1] >= WORTH_IT else F.linear
        return product(g, weight.t()), None, None


def linear_layer(shadow: LayerCapture, input: Tensor) -> Tensor:
    """The private forward of ``nn.Linear``."""
    recorder = shadow.recorder
    if input.dim() < 2 or input.shape[0] != recorder.rows:
        recorder.check_rows(input, shadow.name, 2)
    weight = shadow.module._parameters["weight"]
    assert weight is not None
    same = input.dtype == weight.dtype and input.dtype not in HALF
    if not same or torch.is_autocast_enabled(input.device.type):
        return shadow.record(shadow.detached_forward(input), shadow.backward, input)
    y: Tensor = _Linear.apply(input, recorder.anchor, shadow)
    return y


def hooked(parameter: Tensor) -> str | None:
    """Why the hooks on this parameter's gradient are not allowed, or None if there are none."""
    if not (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
        return None
    return (
        "it has a hook on its gradient (register_hook or register_post_accumulate_grad_hook), "
        "which would never be called: there is no gradient of the batch before clipping and "
        "noise. Remove the hook (handle.remove()). To change the private gradient, change p.grad "
        "in a hook of the optimizer (register_step_pre_hook)"
    )


OLD_HOOK = (
    "it has a hook by register_backward_hook (deprecated in torch), which gets the gradients of "
    "the module's last operation only, and that is a different operation here. Use "
    "register_full_backward_hook"
)


def old_hook(module: nn.Module) -> bool:
    """Whether the module has a backward hook that is not a full one."""
    return module._is_full_backward_hook is False and bool(module._backward_hooks)


def is_private(module: nn.Module) -> bool:
    """Whether a layer of ``module`` already belongs to an engine."""
    return any(isinstance(part.__dict__.get("forward"), LayerCapture) for part in module.modules())
