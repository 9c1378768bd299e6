"""A bank of filters: patches of pictures or of maps, normalised, whitened, compared with others.

    patch → mean taken off, divided by its spread → ZCA → inner products with whitened patches

The dictionary is made of whitened synthetic patches and, where mirrors make sense, of their mirror
images. Whitening and dictionary are one linear map, so a convolution and a division do it all.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._draws import Draws

_PATCHES = 40_000
_ZCA_RIDGE = 0.1


class Bank(nn.Module):
    """Responses of the filters to every patch.

    Args:
        weight: (filters, channels, side, side). With a mirror, the second half are the mirror
            images of the first.
        stride: Distance of two patches.
        ridge: Added to a patch's variance before the division.
        centred: Whether a patch's mean is taken off.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, stride: int, ridge: float, centred: bool) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.stride, self.ridge, self.centred = stride, ridge, centred

    def forward(self, x: Tensor) -> Tensor:
        """Responses (rows, filters, height, width) to maps (rows, channels, ...)."""
        side, stride = self.weight.shape[-1], self.stride
        # Channels last: what follows is then vectorised over the filters.
        x = x.contiguous(memory_format=torch.channels_last)
        power = F.avg_pool2d(x.square().mean(1, keepdim=True), side, stride)
        if self.centred:
            power = power - F.avg_pool2d(x.mean(1, keepdim=True), side, stride).square()
        return F.conv2d(x, self.weight, stride=stride) * torch.rsqrt(power + self.ridge)


def normalised(patches: Tensor, ridge: float, centred: bool) -> Tensor:
    """Patches as rows, each with its mean taken off (if ``centred``) and divided by its spread."""
    if centred:
        patches = patches - patches.mean(1, keepdim=True)
    return patches * torch.rsqrt(patches.square().mean(1, keepdim=True) + ridge)


def zca(covariance: Tensor, ridge: float = _ZCA_RIDGE) -> Tensor:
    """The symmetric map that makes all directions equally strong, up to the ridge."""
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * torch.rsqrt(values.clamp_min(0.0) + ridge)) @ vectors.T


def filters_of(
    maps: Tensor,
    bank: Bank,
    *,
    least: float = 0.0,
    signs: Tensor | None = None,
    mirror: bool = True,
    draws: Draws,
) -> Tensor:
    """The weights of a bank whose filters are patches of synthetic pictures, or of maps of them.

    Args:
        maps: (count, channels, height, width), in double precision.
        bank: The bank; its weights are not read.
        least: Patches with less spread than this are left out: they are flat.
        signs: What a mirror does to each channel: 1 or -1; None: nothing.
        mirror: Whether half of the filters are mirror images of the others.
        draws: The random choice of patches.
    """
    filters, side = len(bank.weight), bank.weight.shape[-1]
    count, channels, height, width = maps.shape
    windows = maps.unfold(2, side, 1).unfold(3, side, 1)  # a view: (n, c, h', w', side, side)
    which = draws.whole(_PATCHES, low=0, high=count)
    y = draws.whole(_PATCHES, low=0, high=height - side + 1)
    x = draws.whole(_PATCHES, low=0, high=width - side + 1)
    patches = windows[which, :, y, x].reshape(_PATCHES, -1)
    if least:
        patches = patches[patches.std(1) > least]
    patches = normalised(patches, bank.ridge, bank.centred)

    def mirrored(rows: Tensor) -> Tensor:
        flipped = rows.reshape(-1, channels, side, side).flip(3)
        if signs is not None:
            flipped = flipped * signs[:, None, None]
        return flipped.reshape(len(rows), -1)

    covariance = patches.T @ patches / len(patches)
    if mirror:
        other = mirrored(patches)
        covariance = (covariance + other.T @ other / len(other)) / 2
    white = zca(covariance)
    chosen = draws.order(len(patches))[: filters // 2 if mirror else filters]
    dictionary = patches[chosen] @ white
    dictionary = dictionary / dictionary.norm(dim=1, keepdim=True)
    if mirror:
        dictionary = torch.cat((dictionary, mirrored(dictionary)))
    weight = dictionary @ white
    if bank.centred:  # taking the mean off a patch is the same as taking it off the filter
        weight = weight - weight.mean(1, keepdim=True)
    return weight.reshape(-1, channels, side, side)
