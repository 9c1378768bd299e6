"""Pictures in a standard frame: what they show is in the middle, upright, and of a similar size.

The same letter differs in slant and size from hand to hand. A linear head can't learn to overlook
that, so it is taken out of each picture before the features are made.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# The spread that pictures are brought halfway to, up and down and across, in half sides.
_SPREAD = (0.42, 0.33)
_LEAST = 0.05  # added to a spread, so that a thin stroke does not become a bar
_STEEPEST = 1.0


def framed(x: Tensor) -> Tensor:
    """Pictures with their ink in the middle, sheared until it stands upright, and scaled.

    Ink is how far a pixel is from the ground, the median of the pixels at the edge; so bright
    strokes on black and dark ones on white are treated alike. Each picture is treated by itself.

    Args:
        x: Pictures (rows, channels, height, width).

    Returns:
        The same shape. A flat picture stays flat.
    """
    height, width = x.shape[2:]
    grey = x.mean(1)
    edge = torch.cat((grey[:, 0], grey[:, -1], grey[:, :, 0], grey[:, :, -1]), 1)
    # Not torch.median, which can't be exported to ONNX.
    ground = edge.sort(1).values[:, (edge.shape[1] - 1) // 2]
    ink = (grey - ground[:, None, None]).abs()
    ink = ink / ink.sum((1, 2), keepdim=True).clamp_min(1e-6)
    # The middles of the pixels; the picture reaches from -1 to 1.
    v = ((torch.arange(height, device=x.device) + 0.5) * 2 / height - 1).to(x.dtype)[:, None]
    u = ((torch.arange(width, device=x.device) + 0.5) * 2 / width - 1).to(x.dtype)

    def mean(of: Tensor) -> Tensor:
        return (ink * of).sum((1, 2), keepdim=True)

    mid_v, mid_u = mean(v), mean(u)
    down, across = v - mid_v, u - mid_u
    tall = mean(down.square())
    slant = (mean(down * across) / (tall + 1e-3)).clamp(-_STEEPEST, _STEEPEST)
    wide = mean((across - slant * down).square())
    scale = [((s.sqrt() + _LEAST) / f).sqrt() for s, f in zip((tall, wide), _SPREAD, strict=True)]
    at_v = mid_v + scale[0] * v
    at_u = mid_u + scale[1] * u + slant * scale[0] * v
    grid = torch.stack((at_u, at_v.expand_as(at_u)), 3)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)
