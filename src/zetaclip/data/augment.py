"""Random changes of pictures that leave their class as it is, each picture by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


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
    padded = functional.pad(pictures, (pixels,) * 4, mode="replicate")
    down, right = torch.randint(0, 2 * pixels + 1, (2, rows)).to(pictures.device)
    ys = down.view(-1, 1, 1) + torch.arange(height, device=pictures.device).view(1, -1, 1)
    columns = torch.arange(width, device=pictures.device).expand(rows, width)
    if mirror:
        turned = (torch.rand(rows) < 0.5).to(pictures.device).view(-1, 1)
        columns = torch.where(turned, width - 1 - columns, columns)
    xs = (right.view(-1, 1) + columns).unsqueeze(1)
    place = torch.arange(rows, device=pictures.device).view(-1, 1, 1)
    return padded[place, :, ys, xs].permute(0, 3, 1, 2).contiguous()


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
