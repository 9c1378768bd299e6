"""Which parts of a module can't be trained privately, and what to use instead.

All of it is found before the first batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Set
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..gradients import Refusal, is_private
from ..gradients.capture import OLD_HOOK, hooked, old_hook
from ..gradients.rules import layer_type


class ValidationError(ValueError):
    """The module can't be trained privately as it is.

    The message names each part and what to do.
    """


_WRAPPERS = {
    "DistributedDataParallel": "it would sum raw gradients over the ranks; the engine adds up "
    "clipped ones itself. Pass the module inside "
    "it: make_private(module=ddp.module, ...)",
    "DataParallel": "it splits the batch over replicas; pass the module inside it (model.module)",
    "FullyShardedDataParallel": "the first form of FSDP is not supported; call "
    "torch.distributed.fsdp.fully_shard on the module before it is wrapped",
    "OptimizedModule": "torch.compile of a private module is not supported; pass the module "
    "inside it (model._orig_mod)",
}


def check_module(module: Any) -> None:
    """Raises for wrappers and for a module that is private already."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    if is_private(module):
        raise ValueError(
            "this module is private already: its layers report to another engine. Call detach() on "
            "that engine first, or copy the module (copy.deepcopy gives a plain one)"
        )
    for name, part in module.named_modules():
        reason = _WRAPPERS.get(layer_type(part).__name__)
        if isinstance(part, torch.jit.ScriptModule):
            reason = (
                "TorchScript runs without Python, where per-example gradients are recorded; train "
                "the module as it was before torch.jit.script or torch.jit.trace, and script a "
                "copy for inference"
            )
        if reason is None and getattr(part, "_compiled_call_impl", None) is not None:
            reason = (
                "it was compiled in place (module.compile()), which is not supported; "
                "build it without compiling"
            )
        if reason is not None:
            raise ValidationError(f"{name or 'the module'} ({type(part).__name__}): {reason}")


def structural_refusals(module: nn.Module, sharded: Set[int] = frozenset()) -> Iterator[Refusal]:
    """Layers that mix records or learn from them outside of the gradient.

    Args:
        module: The model.
        sharded: Parameters that ``fully_shard`` takes care of, by id().
    """
    for name, part in module.named_modules():
        kind = type(part).__name__
        if isinstance(part, _BatchNorm):
            if part.training or not part.track_running_stats:
                yield Refusal(
                    name,
                    kind,
                    "its output for one record depends on the others in the batch. "
                    "zetaclip.fix(module) returns a copy with nn.GroupNorm in its place; build the "
                    "optimizer from that copy",
                )
        elif isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            yield Refusal(
                name,
                kind,
                "max_norm rewrites the rows that the records use, in forward; build it with "
                "max_norm=None",
            )
        elif isinstance(part, _NormBase) and part.track_running_stats and part.training:
            yield Refusal(
                name,
                kind,
                "it keeps running statistics of the records; build it with "
                "track_running_stats=False",
            )
        if old_hook(part):
            yield Refusal(name, kind, OLD_HOOK)
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            yield Refusal(
                name, "parameter", "not initialised yet; run one forward before make_private"
            )
        elif parameter.device.type == "meta":
            yield Refusal(
                name, "parameter", "it is on the meta device; materialise the module first"
            )
        elif hasattr(parameter, "device_mesh") and id(parameter) not in sharded:
            yield Refusal(
                name,
                "parameter",
                "it is spread over a device mesh (DTensor), which make_private supports where "
                "fully_shard did it, and nothing else does",
            )
        elif parameter.requires_grad and not parameter.is_floating_point():
            yield Refusal(
                name,
                "parameter",
                f"{parameter.dtype} can't be trained privately; use real floating point",
            )
        elif parameter.requires_grad and (reason := hooked(parameter)):
            yield Refusal(name, "parameter", reason)


def trained_parameters(module: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The module's trainable parameters by name.

    They must be just those that the optimizer holds.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not named:
        raise ValidationError(
            "no parameter of the module requires a gradient; there is nothing to train"
        )
    missing = [name for name, p in named.items() if id(p) not in held]
    if missing:
        raise ValidationError(
            f"{_few(missing)}: trainable, but not in the optimizer. Give it to the optimizer, or "
            "freeze it with requires_grad_(False)"
        )
    own = {id(p) for p in module.parameters()}
    strangers = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if strangers:
        raise ValidationError(
            f"the optimizer holds {strangers} parameter tensor(s) that are not the module's; they "
            "would be trained without privacy. Build the optimizer from module.parameters() of "
            "this very module"
        )
    return named


_PRIVATE: dict[int, weakref.ref[nn.Parameter]] = {}  # parameters that some engine trains, by id()


def claim(named: dict[str, nn.Parameter]) -> None:
    """Notes that these parameters are trained by one engine now; a second one is refused."""
    for name, parameter in named.items():
        held = _PRIVATE.get(id(parameter))
        if held is not None and held() is parameter:
            raise ValidationError(
                f"{name} is trained privately by another engine already; one parameter can't have "
                "two ledgers. Share it within one module, or detach() the other engine"
            )
    for parameter in named.values():
        _PRIVATE[id(parameter)] = weakref.ref(parameter)


def release(parameters: Iterable[nn.Parameter]) -> None:
    """Gives parameters back."""
    for parameter in parameters:
        _PRIVATE.pop(id(parameter), None)


def raise_refusals(refusals: list[Refusal]) -> None:
    if refusals:
        lines = "\n  ".join(str(refusal) for refusal in refusals)
        raise ValidationError(f"the module can't be trained privately as it is:\n  {lines}")


def _few(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
