"""nn.MultiheadAttention: its projections are used without their own ``forward``, so it has a rule of its own.

The attention itself has no parameters and stays with autograd; only the projections in and out are recorded.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .capture import Contributions, LayerCapture
from .contributions import Outer
from .rules import _dense, layer_rule, linear_contributions


def _project(
    shadow: LayerCapture, x: Tensor, weight: str, bias: str, rows: slice | None = None
) -> Tensor:
    """A recorded linear map by a parameter of the attention module, or by a block of its rows."""
    named = dict(shadow.module.named_parameters())
    matrix = named[weight].detach()
    offset = named[bias].detach() if bias in named else None
    if rows is not None:
        matrix = matrix[rows]
        offset = None if offset is None else offset[rows]

    def backward(shadow: LayerCapture, g: Tensor, x: Tensor) -> Contributions:
        found = linear_contributions(shadow, g, x, weight, bias)
        if rows is None:
            return found
        blocks: Contributions = {}
        for name, part in found.items():
            if isinstance(part, Outer):
                blocks[name] = Outer(part.x, part.g, rows)
            else:
                # A bias is short: place its block in a whole row of zeros rather than treat blocks of it.
                whole = g.new_zeros(len(g), len(named[name]))
                whole[:, rows] = part.dense()
                blocks[name] = _dense(whole)
        return blocks

    return shadow.record(F.linear(x, matrix, offset), backward, x)


def _projected_inputs(
    shadow: LayerCapture, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    module: Any = shadow.module
    width = module.embed_dim
    if not module._qkv_same_embed_dim:
        thirds = [slice(i * width, (i + 1) * width) for i in range(3)]
        projected = []
        for name, x, third in zip(("q", "k", "v"), (query, key, value), thirds, strict=True):
            projected.append(_project_separate(shadow, x, f"{name}_proj_weight", third))
        return projected[0], projected[1], projected[2]
    if query is key and key is value:
        q, k, v = _project(shadow, query, "in_proj_weight", "in_proj_bias").chunk(3, dim=-1)
        return q, k, v
    q = _project(shadow, query, "in_proj_weight", "in_proj_bias", slice(0, width))
    k = _project(shadow, key, "in_proj_weight", "in_proj_bias", slice(width, 2 * width))
    v = _project(shadow, value, "in_proj_weight", "in_proj_bias", slice(2 * width, 3 * width))
    return q, k, v


def _project_separate(shadow: LayerCapture, x: Tensor, weight: str, third: slice) -> Tensor:
    """Own weight per input, and a third of the shared bias."""
    module: Any = shadow.module
    matrix = getattr(module, weight).detach()
    offset = None if module.in_proj_bias is None else module.in_proj_bias.detach()[third]

    def backward(shadow: LayerCapture, g: Tensor, x: Tensor) -> Contributions:
        found = linear_contributions(shadow, g, x, weight, "in_proj_bias")
        if "in_proj_bias" in found:
            whole = g.new_zeros(len(g), 3 * module.embed_dim)
            whole[:, third] = found["in_proj_bias"].dense()
            found["in_proj_bias"] = _dense(whole)
        return found

    return shadow.record(F.linear(x, matrix, offset), backward, x)


def _additive_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, batch: int, heads: int, like: Tensor
) -> Tensor | None:
    """Both masks as one additive float mask that broadcasts to (batch, heads, queries, keys), or None."""

    def additive(mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool:
            return mask.to(like.dtype)
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)

    total = None
    if attn_mask is not None:
        total = additive(attn_mask)
        if total.dim() == 3:
            total = total.view(batch, heads, *total.shape[1:])
    if key_padding_mask is not None:
        padding = additive(key_padding_mask).view(batch, 1, 1, -1)
        total = padding if total is None else total + padding
    return total


def _forward(
    shadow: LayerCapture,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    module: Any = shadow.module
    for name, tensor in (
        ("query", query),
        ("key", key),
        ("value", value),
        ("key_padding_mask", key_padding_mask),
    ):
        if tensor is not None:
            shadow.recorder.check_rows(tensor, f"{shadow.name} ({name})")
    if is_causal and attn_mask is None:
        raise RuntimeError(
            "is_causal=True is a hint about attn_mask, which is missing; pass the mask too"
        )
    batch, heads = query.shape[0], module.num_heads
    q, k, v = (
        t.view(batch, t.shape[1], heads, module.head_dim).transpose(1, 2)
        for t in _projected_inputs(shadow, query, key, value)
    )
    mask = _additive_mask(attn_mask, key_padding_mask, batch, heads, q)
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        scores = (q / math.sqrt(module.head_dim)) @ k.transpose(-2, -1)
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        weights = F.dropout(weights, dropout) if dropout > 0 else weights
        mixed = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    mixed = mixed.transpose(1, 2).reshape(batch, query.shape[1], module.embed_dim)
    return _project(shadow, mixed, "out_proj.weight", "out_proj.bias"), weights


def _refused(module: nn.MultiheadAttention) -> str | None:
    if not module.batch_first:
        return "batch_first=False puts time before the records; build it with batch_first=True and feed (records, time, features)"
    return None


def _general(module: nn.MultiheadAttention) -> bool:
    return module.bias_k is not None or module.bias_v is not None or module.add_zero_attn


@layer_rule(
    nn.MultiheadAttention,
    path="attention",
    forward=_forward,
    refuse=_refused,
    skip=_general,
    names=frozenset(
        {
            "in_proj_weight",
            "in_proj_bias",
            "q_proj_weight",
            "k_proj_weight",
            "v_proj_weight",
            "out_proj.weight",
            "out_proj.bias",
        }
    ),
)
def _attention(shadow: LayerCapture, g: Tensor, x: Tensor) -> Contributions:
    raise AssertionError("attention records its projections one by one")
