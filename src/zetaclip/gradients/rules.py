"""One rule per layer type: from a layer's input and output gradient to contributions.

A rule is for an exact type: a subclass may compute something else, so it takes the general path of
``fallback``. A new rule is a function with the decorator ``@layer_rule(Type)``; the shared tests
cover every registered rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .capture import Contributions, LayerCapture, Node, linear_layer
from .contributions import Dense, Lookup, Outer, Single
from .convolution import Geometry, convolution_contribution


@dataclass(frozen=True)
class LayerRule:
    """How per-example gradients of a layer type are computed.

    Attributes:
        path: Name of the rule, for reports.
        backward: ``backward(shadow, g, x)`` returns a contribution for each name in
            ``shadow.parameters``. ``g`` and ``x`` have one row per record.
        forward: ``forward(shadow, *args)`` replaces the default, which runs the layer's own forward
            and records its only input.
        refuse: ``refuse(module)`` returns why a configuration cannot be used privately, or None.
        skip: Whether a configuration takes the general path instead.
        names: Parameters that the rule knows; a layer with others takes the general path.
        dims: The least number of dimensions of a batch of inputs.
    """

    path: str
    backward: Callable[..., Contributions]
    forward: Callable[..., Any] | None = None
    refuse: Callable[[Any], str | None] = lambda module: None
    skip: Callable[[Any], bool] = lambda module: False
    names: frozenset[str] = frozenset({"weight", "bias"})
    dims: Callable[[Any], int] = lambda module: 1


LAYER_RULES: dict[type[nn.Module], LayerRule] = {}


def layer_rule(*types: type[nn.Module], path: str, **options: Any) -> Callable:
    """A decorator that registers a ``backward`` function for layer types.

    Args:
        *types: Exact types; subclasses are not included.
        path: Name of the rule, for reports.
        **options: Further fields of ``LayerRule``.

    Returns:
        The decorator. It raises ``ValueError`` if a type has a rule already.

    Examples:
        A layer ``y = x * self.weight``::

            @layer_rule(Scale, path="scale")
            def _scale(shadow, g, x):
                gradients = g * x
                return {"weight": Dense(gradients, gradients.shape[1:])}

    **Guarantee.** The engine clips what the rule returns. A rule with wrong gradients voids the
    guarantee, so compare it with ``check_parity``.
    """

    def register(backward: Callable[..., Contributions]) -> Callable[..., Contributions]:
        for kind in types:
            if kind in LAYER_RULES:
                raise ValueError(
                    f"{kind.__name__} has a layer rule already; "
                    "remove it from LAYER_RULES to replace it"
                )
            LAYER_RULES[kind] = LayerRule(path, backward, **options)
        return backward

    return register


def linear_contributions(
    shadow: LayerCapture, g: Tensor, x: Tensor, weight: str, bias: str
) -> Contributions:
    """Contributions for y = x Wᵀ + b.

    Args:
        shadow: The layer.
        g: Output gradients, (B, ..., O).
        x: Inputs, (B, ..., I).
        weight: Name of W.
        bias: Name of b.

    Returns:
        Contributions of those of the two that are trained.
    """
    found: Contributions = {}
    if g.dim() == 2:
        if weight in shadow.parameters:
            found[weight] = Single(x, g)
        if bias in shadow.parameters:
            found[bias] = Dense(g, g.shape[1:])
        return found
    g = g.reshape(len(g), -1, g.shape[-1])
    if weight in shadow.parameters:
        found[weight] = Outer(x.reshape(len(x), -1, x.shape[-1]), g)
    if bias in shadow.parameters:
        found[bias] = _dense(g.sum(1))
    return found


def _dense(gradients: Tensor) -> Dense:
    return Dense(gradients, gradients.shape[1:])


@layer_rule(
    nn.Linear,
    nn.modules.linear.NonDynamicallyQuantizableLinear,
    path="linear",
    forward=linear_layer,
)
def _linear(shadow: LayerCapture, g: Tensor, x: Tensor) -> Contributions:
    return linear_contributions(shadow, g, x, "weight", "bias")


@layer_rule(
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    path="convolution",
    dims=lambda module: len(module.kernel_size) + 2,
)
def _convolution(shadow: LayerCapture, g: Tensor, x: Tensor) -> Contributions:
    found: Contributions = {}
    module: Any = shadow.module
    if "weight" in shadow.parameters:
        padding = module.padding
        if isinstance(padding, str) or module.padding_mode != "zeros":
            # Circular, reflected, or uneven padding: pad first, then use no padding.
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
            padding = (0,) * len(module.kernel_size)
        geometry = Geometry(
            module.kernel_size, module.stride, padding, module.dilation, module.groups
        )
        found["weight"] = convolution_contribution(x, g, geometry)
    if "bias" in shadow.parameters:
        found["bias"] = _dense(g.flatten(2).sum(2))
    return found


def _embedding_refused(module: nn.Embedding) -> str | None:
    if module.max_norm is not None:
        return (
            "max_norm rewrites rows of the table in forward, from the records of the batch; "
            "build it with max_norm=None"
        )
    if module.scale_grad_by_freq:
        return (
            "scale_grad_by_freq divides by counts over the whole batch, which mixes records; "
            "set it to False"
        )
    return None


@layer_rule(nn.Embedding, path="embedding", refuse=_embedding_refused)
def _embedding(shadow: LayerCapture, g: Tensor, ids: Tensor) -> Contributions:
    module: Any = shadow.module
    g = g.reshape(len(g), -1, g.shape[-1])
    ids = ids.reshape(len(ids), -1)
    if module.padding_idx is not None:
        g = g * (ids != module.padding_idx).unsqueeze(2)
    return {"weight": Lookup(ids, g, module.weight.shape)}


def _affine(
    shadow: LayerCapture, g: Tensor, normalized: Tensor, over: tuple[int, ...]
) -> Contributions:
    """For y = normalized * weight + bias, with the weight shared over the dimensions ``over``."""
    found: Contributions = {}
    if "weight" in shadow.parameters:
        product = g * normalized
        found["weight"] = _dense(product.sum(over) if over else product)
    if "bias" in shadow.parameters:
        found["bias"] = _dense(g.sum(over) if over else g)
    return found


@layer_rule(nn.LayerNorm, path="layer norm")
def _layer_norm(shadow: LayerCapture, g: Tensor, x: Tensor) -> Contributions:
    module: Any = shadow.module
    normalized = F.layer_norm(x, module.normalized_shape, eps=module.eps)
    return _affine(shadow, g, normalized, tuple(range(1, x.dim() - len(module.normalized_shape))))


@layer_rule(nn.RMSNorm, path="rms norm")
def _rms_norm(shadow: LayerCapture, g: Tensor, x: Tensor) -> Contributions:
    module: Any = shadow.module
    normalized = F.rms_norm(x, module.normalized_shape, eps=module.eps)
    return _affine(shadow, g, normalized, tuple(range(1, x.dim() - len(module.normalized_shape))))


def _instance_norm_refused(module: Any) -> str | None:
    if module.track_running_stats:
        return "it keeps running statistics of the records; build it with track_running_stats=False"
    return None


@layer_rule(
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    path="instance norm",
    refuse=_instance_norm_refused,
)
def _instance_norm(shadow: LayerCapture, g: Tensor, x: Tensor) -> Contributions:
    module: Any = shadow.module
    normalized = F.instance_norm(x, eps=module.eps)
    return _affine(shadow, g, normalized, tuple(range(2, x.dim())))


class _FoldedGroupNorm(Node):
    """Group norm whose backward gets every example's weight gradient from torch's own kernel.

    The batch is folded into the channels, and the weight repeated. Then the kernel's sum over the
    batch is a sum over one example, at no extra cost.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, shadow: LayerCapture) -> Tensor:
        module: Any = shadow.module
        x = x.contiguous()
        batch, channels = x.shape[:2]
        area = x.shape[2:].numel()
        y, mean, rstd = torch.native_group_norm(
            x, module.weight, module.bias, batch, channels, area, module.num_groups, module.eps
        )
        ctx.save_for_backward(x, mean, rstd, module.weight)
        ctx.shadow, ctx.area, ctx.groups = shadow, area, module.num_groups
        ctx.turn = shadow.recorder.turn
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        x, mean, rstd, weight = ctx.saved_tensors
        batch, channels = x.shape[:2]
        wanted = ctx.shadow.recorder.wants(ctx.turn)
        # The kernel assumes contiguous memory, but reshape may return a view with other strides,
        # for example if the loss is a sum of the norm's output, or for one record.
        g = g.contiguous()
        dx, dweight, dbias = torch.ops.aten.native_group_norm_backward(
            g.reshape(1, batch * channels, *x.shape[2:]),
            x.view(1, batch * channels, *x.shape[2:]),
            mean.view(1, -1),
            rstd.view(1, -1),
            weight.expand(batch, -1).reshape(-1),
            1,
            batch * channels,
            ctx.area,
            batch * ctx.groups,
            [ctx.needs_input_grad[0], wanted, wanted],
        )
        if wanted:
            per_example = {"weight": dweight, "bias": dbias}
            ctx.shadow.hand_over(
                {
                    name: _dense(per_example[name].view(batch, channels))
                    for name in ctx.shadow.parameters
                }
            )
        return (None if dx is None else dx.view_as(x)), None, None


def _group_norm_forward(shadow: LayerCapture, input: Tensor) -> Tensor:
    shadow.recorder.check_rows(input, shadow.name)
    module: Any = shadow.module
    low = input.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(
        input.device.type
    )
    if low or input.device.type != "cpu" or module.weight.dtype != input.dtype or input.dim() < 3:
        return shadow.record(shadow.detached_forward(input), _group_norm, input)
    y: Tensor = _FoldedGroupNorm.apply(input, shadow.recorder.anchor, shadow)
    return y


@layer_rule(nn.GroupNorm, path="group norm", forward=_group_norm_forward)
def _group_norm(shadow: LayerCapture, g: Tensor, x: Tensor) -> Contributions:
    module: Any = shadow.module
    normalized = F.group_norm(x, module.num_groups, eps=module.eps)
    return _affine(shadow, g, normalized, tuple(range(2, x.dim())))


def find_rule(module: nn.Module) -> LayerRule | None:
    """The rule for this module, or None if it takes the general path.

    A rule is not used if the layer may compute something else than its class does: with a
    ``forward`` on the instance, a reparametrization, or parameters of other names.
    """
    rule = LAYER_RULES.get(layer_type(module))
    if rule is None or not _runs_its_own_forward(module) or rule.skip(module):
        return None
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    # A rule would return the contribution of a tied parameter under a name that is not used.
    tied = len(names) > len(list(module.parameters()))
    return rule if rule.names.issuperset(names) and not tied else None


def layer_type(module: nn.Module) -> type[nn.Module]:
    """The class of a module; that which it had before ``fully_shard`` put one of its own over it.

    Such a class adds hooks around ``forward`` and leaves it alone.
    """
    kind = type(module)
    if len(kind.__bases__) == 2 and kind.__bases__[0].__name__ == "FSDPModule":
        return kind.__bases__[1]
    return kind


def _runs_its_own_forward(module: nn.Module) -> bool:
    """Whether ``forward`` is the class's own; copies of a private module have it as attribute."""
    own = module.__dict__.get("forward")
    return own is None or (
        getattr(own, "__func__", None) is type(module).forward and own.__self__ is module
    )


def refusal(module: nn.Module) -> str | None:
    """Why this layer cannot be trained privately in its present configuration, or None."""
    rule = LAYER_RULES.get(layer_type(module))
    return rule.refuse(module) if rule is not None else None
