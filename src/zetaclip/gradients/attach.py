"""Chooses how each layer's gradients are computed, and creates the shadows for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from . import attention, recurrent  # noqa: F401  (they register rules)
from .capture import CaptureBuffer, LayerCapture, any_layer
from .fallback import (
    LOOP,
    VMAP,
    recordless_refusal,
    recurrent_refusal,
    run_per_example,
    sparse_refusal,
)
from .rules import find_rule, refusal


@dataclass(frozen=True)
class Refusal:
    """A part of the module that cannot be trained privately.

    Attributes:
        name: Name of the part in the module.
        kind: Its type.
        reason: Why, and what to do about it.
    """

    name: str
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name or 'the module'} ({self.kind}): {self.reason}"


def make_shadows(
    module: nn.Module, trained: set[nn.Parameter], recorder: CaptureBuffer
) -> tuple[list[LayerCapture], list[Refusal]]:
    """Creates a shadow for every part that has trained parameters, without attaching it.

    A part with a layer rule, or with its own parameters and no rule, is one unit: its inner parts
    are not visited. So is a parametrized part (``torch.nn.utils.parametrize``), because the inner
    module with its parameters never gets a record. All other parts are only containers.

    Args:
        module: The model.
        trained: Its trained parameters.
        recorder: Where the shadows put their contributions.

    Returns:
        The shadows, and the parts that cannot be trained privately.
    """
    shadows: list[LayerCapture] = []
    refusals: list[Refusal] = []
    seen: set[nn.Module] = set()

    def visit(part: nn.Module, name: str) -> None:
        if part in seen:
            return
        seen.add(part)
        here = {n: p for n, p in part.named_parameters() if p in trained}
        if not here:
            return
        rule = find_rule(part)
        reason = refusal(part) or (recurrent_refusal(part) if rule is None else None)
        if reason is not None:
            refusals.append(Refusal(name, type(part).__name__, reason))
            return
        if rule is not None:
            run, handler = rule.forward or any_layer, (rule.backward, rule.dims(part))
            shadows.append(LayerCapture(part, name, rule.path, run, here, recorder, *handler))
        elif is_parametrized(part) or any(p in trained for p in _own_parameters(part)):
            reason = recordless_refusal(part) or sparse_refusal(part)
            if reason is not None:
                refusals.append(Refusal(name, type(part).__name__, reason))
                return
            refusals.extend(_refused_inside(part, name))
            path = LOOP if isinstance(part, nn.RNNBase) else VMAP
            shadows.append(LayerCapture(part, name, path, run_per_example, here, recorder))
        else:
            for child_name, child in part.named_children():
                visit(child, f"{name}.{child_name}" if name else child_name)

    visit(module, "")
    return shadows, refusals


def _own_parameters(part: nn.Module) -> Iterator[nn.Parameter]:
    """Its own parameters, and those in lists and dicts of parameters, which have no forward."""
    yield from (p for p in part._parameters.values() if p is not None)
    for child in part.children():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            yield from child.parameters()


def _refused_inside(part: nn.Module, name: str) -> Iterator[Refusal]:
    for inner_name, inner in part.named_modules():
        if inner is not part:
            reason = refusal(inner) or recurrent_refusal(inner) or sparse_refusal(inner)
            if reason is not None:
                yield Refusal(
                    f"{name}.{inner_name}" if name else inner_name, type(inner).__name__, reason
                )
