"""Random changes of pictures that leave their class as it is, each picture by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def shifted(pictures: Tensor, pixels: int, mirror: bool) -> Tensor:
    """Each picture moved by up to ``pixels`` in both directions, and mirrored half of the time.

    Args:
        pictures: (rows, channels, height, width); the border is repeated outwards.
        pixels: The largest shift.
        mirror: Whether to mirror left and right.

    Returns:
        New pictures of the same shape. Every one depends on its own picture alone.
    """
    rows, _, height, width = pictures.shape
    device = pictures.device
    down, right = torch.randint(-pixels, pixels + 1, (2, rows, 1)).to(device)
    columns = torch.arange(width, device=device).expand(rows, width)
    if mirror:
        turned = (torch.rand(rows, 1) < 0.5).to(device)
        columns = torch.where(turned, width - 1 - columns, columns)
    ys = (down + torch.arange(height, device=device)).clamp(0, height - 1)
    xs = (right + columns).clamp(0, width - 1)
    place = (ys.unsqueeze(2) * width + xs.unsqueeze(1)).view(rows, 1, -1)
    flat = pictures.flatten(2)
    return flat.gather(2, place.expand_as(flat)).view_as(pictures)


class Shift:
    """Augmentation of a batch whose first tensor is pictures; for ``make_private(augment=...)``.

    Args:
        pixels: The largest shift; by default an eighth of the shorter side.
        mirror: Whether to mirror; by default for colour pictures only, since mirrored letters and
            digits are other ones.
    """

    def __init__(self, pixels: int | None = None, mirror: bool | None = None) -> None:
        self.pixels, self.mirror = pixels, mirror

    def __call__(self, batch: Any) -> Any:
        """The batch with its pictures changed."""
        pictures = batch[0]
        pixels = min(pictures.shape[2:]) // 8 if self.pixels is None else self.pixels
        mirror = pictures.shape[1] == 3 if self.mirror is None else self.mirror
        return [shifted(pictures, pixels, mirror), *batch[1:]]
