"""``fix``: replaces layers that can't be trained privately by ones that can."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy


def fix(module: nn.Module) -> nn.Module:
    """A copy of the module that can be trained privately; every change is told in a warning.

    - BatchNorm becomes GroupNorm with the same scale and shift. BatchNorm1d and narrow layers get
      one group, which is a LayerNorm over channels.
    - InstanceNorm stops keeping running statistics.
    - Embeddings lose ``max_norm``.

    Build the optimizer from the copy's parameters.

    Args:
        module: The module; it is left as it is.

    Returns:
        The copy. It is an unchanged copy if nothing had to be replaced.

    Raises:
        ValueError: A layer is lazy: run one forward first.

    **Edge cases.** GroupNorm does not compute what BatchNorm did: running statistics are dropped,
    and a pretrained network has to be trained again. BatchNorm in eval mode is replaced, too,
    because the next ``train()`` would turn it on.

    Examples:
        >>> model = zetaclip.fix(torchvision.models.resnet18())
    """
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise ValueError("the module has lazy layers; run one forward before fix")
    fixed = copy.deepcopy(module)
    told: list[str] = []
    made: dict[int, nn.Module] = {}  # a layer that is used at several places stays one layer
    for name, part in list(fixed.named_modules(remove_duplicate=False)):
        new = made.get(id(part)) or _replacement(part)
        if new is None:
            continue
        made[id(part)] = new
        told.append(f"{name or 'the module'}: {type(part).__name__} is now {new}")
        if not name:
            fixed = new
        else:
            parent, _, last = name.rpartition(".")
            setattr(fixed.get_submodule(parent), last, new)
    if told:
        warnings.warn(
            "to be trained privately, the copy differs from the module:\n  " + "\n  ".join(told),
            stacklevel=2,
        )
    return fixed


def _replacement(part: nn.Module) -> nn.Module | None:
    new: nn.Module
    if isinstance(part, _BatchNorm):
        new = nn.GroupNorm(_groups(part), part.num_features, part.eps, part.affine)
    elif isinstance(part, _NormBase) and part.track_running_stats:
        new = copy.copy(part)  # InstanceNorm
        new._buffers = dict.fromkeys(part._buffers)
        new.track_running_stats = False
        return new
    elif isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
        new = copy.copy(part)
        new.max_norm = None
        return new
    else:
        return None
    with torch.no_grad():
        for own, old in zip(new.parameters(), part.parameters()):
            own.copy_(old)
            own.requires_grad_(old.requires_grad)
    for old in part.parameters():
        new.to(old.device, old.dtype)
    return new.train(part.training)


def _groups(part: _BatchNorm) -> int:
    """At most 32 groups of at least four channels each.

    A BatchNorm1d may get records of shape (channels,). A group of one channel would then be one
    number, and its normalised value zero.
    """
    if isinstance(part, nn.BatchNorm1d):
        return 1
    most = min(32, part.num_features // 4)
    return next((n for n in range(most, 1, -1) if part.num_features % n == 0), 1)
