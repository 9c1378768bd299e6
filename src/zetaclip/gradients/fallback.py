"""The general path for any other module: its own forward, run once per example.

Each example gets its own alias of the module's parameters, so that autograd computes separate
gradients. ``vmap`` does this for all examples at once. If the module cannot be vectorised
(recurrent layers, control flow that depends on values), a loop runs them one after the other. Both
give the exact gradients of the module as it is, including dropout, because they come from the same
forward pass.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
import torch.nn.modules.module as _hooks
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.rnn import PackedSequence
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_flatten, tree_unflatten

from .capture import HALF, CaptureError, LayerCapture, exact
from .contributions import Dense
from .recurrent import packed

# Hooks that compute a weight from the parameters before each forward: torch's older
# reparametrizations.
_MAKES_WEIGHTS = (WeightNorm, SpectralNorm, BasePruningMethod)
# Types of arguments that are not searched for per-record values; others are, down to _DEEPEST.
_SIMPLE = (
    Tensor,
    torch.Size,
    nn.Module,
    str,
    bytes,
    int,
    float,
    complex,
    type,
    type(None),
    torch.dtype,
    torch.device,
)
_DEEPEST = 5
VMAP = "per example (vmap)"
LOOP = "per example (loop)"
_NO_RECORD = (
    "its forward is given no record, so its parameters are used once for all records, and the "
    "gradient cannot be separated by record. Put the parameters (as nn.Parameter) into the module "
    "that computes with them and the records: it is then one unit"
)


class _Alias(torch.autograd.Function):
    """One alias of a parameter per example; backward receives the per-example gradients."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, shadow: LayerCapture, name: str, parameter: Tensor, rows: int
    ) -> Tensor:
        ctx.shadow, ctx.parameter_name, ctx.turn = shadow, name, shadow.recorder.turn
        return parameter.detach().unsqueeze(0).expand(rows, *parameter.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        if ctx.shadow.recorder.wants(ctx.turn):
            with exact(g.device):
                g = ctx.shadow.recorder.widened(g)
                ctx.shadow.hand_over({ctx.parameter_name: Dense(g.contiguous(), g.shape[1:])})
        return None, None, None, None, None


def run_per_example(shadow: LayerCapture, *args: Any, **kwargs: Any) -> Any:
    """The private forward of a module without a rule.

    Args:
        shadow: The module.
        *args: Its arguments; tensors must have one row per record.
        **kwargs: Its keyword arguments.

    Returns:
        What the module returns.

    Raises:
        CaptureError: The arguments or results cannot be split by record.
    """
    recorder = shadow.recorder
    recurrent = isinstance(shadow.module, nn.RNNBase)
    if "input" in kwargs:  # must come before a recurrent layer's states
        kwargs = {"input": kwargs["input"], **kwargs}
    if any(isinstance(given, PackedSequence) for given in (*args, *kwargs.values())):
        raise packed(shadow.name, type(shadow.module).__name__)
    leaves, structure = tree_flatten((args, kwargs))
    batch_dims: list[int | None] = []
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            batch_dims.append(None)
            continue
        # A recurrent layer's states are (layers, records, features).
        dim = 1 if recurrent and position > 0 else 0
        recorder.check_rows(leaf.movedim(dim, 0), shadow.name)
        batch_dims.append(dim)
    if all(dim is None for dim in batch_dims):
        raise CaptureError(f"{shadow.name} ({type(shadow.module).__name__}): {_NO_RECORD}")
    _refuse_unsplit(shadow, args, kwargs)
    if "unit" not in shadow.__dict__:
        shadow.__dict__["unit"] = _Unit(shadow)
    unit: _Unit = shadow.__dict__["unit"]
    unit.refuse_backward_hooks(shadow.name)
    if getattr(parametrize, "_cache_enabled", 0):
        raise CaptureError(
            f"{shadow.name} ({type(shadow.module).__name__}) was called inside "
            "torch.nn.utils.parametrize.cached(): the weight that was computed for one record "
            "would be used for all others, and get their gradients. Call it outside of cached()"
        )

    if torch.is_autocast_enabled(recorder.anchor.device.type) or any(
        isinstance(leaf, Tensor) and leaf.dtype in HALF
        for leaf in (*leaves, *shadow.parameters.values())
    ):
        recorder.half = True
    aliases = {
        name: _Alias.apply(recorder.anchor, shadow, name, parameter, recorder.rows)
        for name, parameter in shadow.parameters.items()
    }
    tensors = [leaf for leaf, dim in zip(leaves, batch_dims, strict=True) if dim is not None]
    dims = [dim for dim in batch_dims if dim is not None]

    def one(parameters: dict[str, Tensor], *rows: Tensor) -> Any:
        """The module on one record, with a batch dimension of size 1."""
        supply = iter(zip(rows, dims, strict=True))
        filled = []
        for leaf, dim in zip(leaves, batch_dims, strict=True):
            if dim is None:
                filled.append(leaf)
            else:
                row, at = next(supply)
                filled.append(row.unsqueeze(at))
        these_args, these_kwargs = tree_unflatten(filled, structure)
        return _call(unit, parameters, these_args, these_kwargs)

    if shadow.path == VMAP:
        state = torch.get_rng_state()
        try:
            return _vectorised(shadow, one, aliases, tensors, dims)
        except CaptureError:
            raise
        except Exception as problem:
            if getattr(shadow, "proven", False):
                raise
            from ..randomness._forward import rewind

            rewind(state)
            shadow.path = LOOP
            warnings.warn(
                f"{shadow.name} ({type(shadow.module).__name__}) cannot be vectorised over "
                f"examples ({(str(problem) or type(problem).__name__).splitlines()[0][:120]}); "
                "its gradients come from a loop over examples, which is exact but slow",
                stacklevel=3,
            )
    return _looped(shadow, one, aliases, tensors, dims, recurrent)


def _refuse_unsplit(shadow: LayerCapture, args: tuple, kwargs: dict) -> None:
    """Raises if an argument that is not a tensor may contain one value per record.

    The module is run once per record, and only tensors are split. A list with as many items as
    there are records, at any depth, may contain one value per record. If it had another length
    before, it is a setting. With a single record nothing needs to be split.
    """
    rows, settings = shadow.recorder.rows, shadow.__dict__.setdefault("settings", set())
    unit = f"{shadow.name} ({type(shadow.module).__name__})"
    todo = [(str(place), value, False) for place, value in [*enumerate(args), *kwargs.items()]]
    met: set[int] = set()
    while todo:
        place, value, hidden = todo.pop()
        if hidden and isinstance(value, Tensor | np.ndarray) and value.ndim > 0:
            raise CaptureError(
                f"{unit} was given a tensor or an array inside another object, in its argument "
                f"{place}: it is run once per record, and only tensors that are arguments "
                "themselves, or are in lists, tuples or dicts, are split. Pass it that way"
            )
        if isinstance(value, _SIMPLE) or id(value) in met or place.count(".") > _DEEPEST:
            continue
        met.add(id(value))
        inner = _parts_of(value)
        bare = isinstance(value, Sequence | np.ndarray | Set) and not any(
            isinstance(one, Tensor) for _, one in inner
        )
        for length in (
            (value.shape if isinstance(value, np.ndarray) else (len(inner),)) if bare else ()
        ):
            if length != rows:
                settings.add((place, length))
            elif rows > 1 and (place, length) not in settings:
                raise CaptureError(
                    f"{unit} was given {rows} items that are not tensors for {rows} records, in "
                    f"its argument {place}: it is run once per record, and only tensors are split. "
                    "Give per-record values as a tensor. If it is a setting that has the length of "
                    "this batch by chance, make it a torch.Size, or an attribute of the module"
                )
        structure = isinstance(value, (Sequence, Set, Mapping))
        todo += [(f"{place}.{name}", one, hidden or not structure) for name, one in inner]


def _parts_of(value: Any) -> list[tuple[Any, Any]]:
    """The contents of a list, a dict or any other object, by position or name."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (Sequence, Set)):
        return list(enumerate(value))
    slots = [
        name
        for kind in type(value).__mro__
        for name in getattr(kind, "__slots__", ())
        if hasattr(value, name)
    ]
    return [
        *getattr(value, "__dict__", {}).items(),
        *((name, getattr(value, name)) for name in slots),
    ]


def untensored(value: Any) -> bool:
    """Whether this is an array, or a list without tensors: it may have one item per record."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, (list, tuple)) and not any(
        isinstance(leaf, Tensor) for leaf in tree_flatten(value)[0]
    )


def _holds_tensors(value: Any) -> bool:
    """Whether an object has tensors or arrays among its attributes."""
    inside = tree_flatten([one for _, one in _parts_of(value)])[0]
    return any(isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim > 0 for leaf in inside)


class _Unit(nn.Module):
    """Runs a module's own forward without its hooks, which torch calls around the shadow.

    This includes global hooks. Only hooks that compute a weight from parameters run here.
    """

    def __init__(self, shadow: LayerCapture) -> None:
        super().__init__()
        self.unit, self.inner = shadow.module, shadow.inner
        self.inside = [(name, part) for name, part in self.unit.named_modules() if name]
        self.made = [
            (part, hook.name if hasattr(hook, "name") else hook._tensor_name)
            for part in self.unit.modules()
            for hook in part._forward_pre_hooks.values()
            if isinstance(hook, _MAKES_WEIGHTS)
        ]

    def __call__(self, args: tuple, kwargs: dict) -> Any:
        for hook in self.unit._forward_pre_hooks.values():
            if isinstance(hook, _MAKES_WEIGHTS):
                hook(self.unit, args)
        return self.inner(*args, **kwargs)

    def refuse_backward_hooks(self, name: str) -> None:
        """Raises if an inner part has backward hooks.

        vmap would not call them, and a loop would call them once per record.
        """
        everywhere = _hooks._global_backward_hooks or _hooks._global_backward_pre_hooks
        for inner, part in self.inside:
            if everywhere or part._backward_hooks or part._backward_pre_hooks:
                raise CaptureError(
                    f"{inner} ({type(part).__name__}) inside of {name} "
                    f"({type(self.unit).__name__}) has a backward "
                    f"hook{' (a global one)' if everywhere else ''}, but {name} is run once per "
                    "record as a whole, where such hooks are not called as in torch. Remove the "
                    f"hook, or register it on {name}"
                )


def _call(unit: _Unit, parameters: dict[str, Tensor], args: tuple, kwargs: dict) -> Any:
    """The module's own forward with other tensors for its trained parameters, frozen detached."""
    module = unit.unit
    tensors = {f"unit.{name}": p.detach() for name, p in module.named_parameters()}
    tensors |= {f"unit.{name}": p for name, p in parameters.items()}
    attached = module.forward
    module.forward = unit.inner  # a forward that calls itself must not call the shadow
    made = [(part.__dict__, name, part.__dict__.get(name)) for part, name in unit.made]
    try:
        return functional_call(unit, tensors, (args, kwargs), tie_weights=True)
    finally:
        module.forward = attached
        for held, name, weight in made:  # the module must not keep one record's weight
            held[name] = weight


def _vectorised(
    shadow: LayerCapture,
    one: Callable[..., Any],
    aliases: dict[str, Tensor],
    tensors: list[Tensor],
    dims: list[int],
) -> Any:
    with warnings.catch_warnings():
        # torch may have no batched form of an operation and use a loop; the result is the same.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        outputs = vmap(one, in_dims=(0, *dims), randomness="different")(aliases, *tensors)
    shadow.proven = True  # type: ignore[attr-defined]
    leaves, structure = tree_flatten(outputs)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            _check_single(shadow, leaf.shape[1:], 0)
    rows = [leaf.squeeze(1) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    if shadow.spread:  # an in-place change of a view would undo the hook that gathers the weights
        rows = [row.clone() if isinstance(row, Tensor) else row for row in rows]
    return tree_unflatten(rows, structure)


def _check_single(shadow: LayerCapture, shape: torch.Size, dim: int) -> None:
    """Raises if a result for one record does not have one row."""
    if len(shape) <= dim or shape[dim] != 1:
        raise CaptureError(
            f"{shadow.name} ({type(shadow.module).__name__}) returned {tuple(shape)} for a single "
            "record; every tensor it returns must have one row per record in the first dimension"
        )


def _looped(
    shadow: LayerCapture,
    one: Callable[..., Any],
    aliases: dict[str, Tensor],
    tensors: list[Tensor],
    dims: list[int],
    recurrent: bool,
) -> Any:
    results = []
    structure = None
    for i in range(shadow.recorder.rows):
        own = {name: alias[i] for name, alias in aliases.items()}
        output = one(
            own, *(tensor.select(dim, i) for tensor, dim in zip(tensors, dims, strict=True))
        )
        leaves, structure = tree_flatten(output)
        results.append(leaves)
    joined = []
    for position, rows in enumerate(zip(*results, strict=True)):
        if not isinstance(rows[0], Tensor):
            joined.append(_same_for_all(shadow, rows))
            continue
        dim = 1 if recurrent and position > 0 else 0
        _check_single(shadow, rows[0].shape, dim)
        joined.append(torch.cat(rows, dim=dim))
    assert structure is not None
    return tree_unflatten(joined, structure)


def _same_for_all(shadow: LayerCapture, values: tuple) -> Any:
    """A result that is not a tensor, if it is the same for every record; otherwise raises."""
    first = values[0]
    plain = first is None or isinstance(first, (bool, int, float, str, torch.dtype, torch.device))
    if len(values) == 1 or (plain and all(value == first for value in values)):
        return first
    if all(value is first for value in values) and not _holds_tensors(first):
        return first
    raise CaptureError(
        f"{shadow.name} ({type(shadow.module).__name__}) returned, beside tensors, an object of "
        f"type {type(first).__name__} that is different for each record; it is run once per "
        "record, and only tensors can be joined. Return tensors, in tuples or dicts if needed"
    )


def recurrent_refusal(module: nn.Module) -> str | None:
    """Why a recurrent layer cannot be used in its present configuration, or None."""
    if isinstance(module, nn.RNNBase) and not module.batch_first:
        return (
            "batch_first=False puts time before the records; build it with batch_first=True and "
            "feed (records, time, features)"
        )
    return None


def sparse_refusal(module: nn.Module) -> str | None:
    """Why an embedding table cannot be used in its present configuration, or None."""
    table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    if table and module.sparse and module.weight.requires_grad:
        return "private gradients are dense, because the noise is; build it with sparse=False"
    return None


def recordless_refusal(module: nn.Module) -> str | None:
    """Why a module cannot be a unit: its ``forward`` takes no argument. Otherwise None."""
    try:
        takes = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # no signature; the call will be checked
        return None
    return None if takes else _NO_RECORD
