"""Blocks of features: one or two layers of filters, pooling, and whitening.

A block's settings are plain data; ``make_block`` turns them and synthetic pictures into a module.
Constants are made in double precision: then every machine gets the same, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._bank import Bank, filters_of
from ._draws import Draws

_ROWS = 16  # pictures at a time: their maps stay in the processor's cache
_MAPS = 1500  # pictures that the second layer's constants are made from
_MAP_RIDGE = 0.1  # added to the variance of a patch of maps
THRESHOLD = 0.25


@dataclass(frozen=True)
class Second:
    """The second layer: a bank on the pooled maps of the first.

    Args:
        pool: The maps are averaged over squares of this side first.
        channels: They are reduced to so many channels by a whitened PCA.
        filters: Number of filters; their patches are 3x3.
    """

    pool: int
    channels: int
    filters: int


@dataclass(frozen=True)
class Block:
    """Settings of one block.

    Args:
        size: (height, width) of the pictures that the block sees; larger ones are averaged down.
        pad: Pixels added on each side, copies of the edge.
        side: Side of a patch.
        stride: Distance of two patches.
        filters: Number of filters.
        grid: Responses are averaged over grid x grid cells.
        keep: Number of features after the PCA.
        ridge: The whitening divides by sqrt(w + w[ridge]), with w the PCA's eigenvalues.
        mirror: Whether a picture and its mirror image get the same features.
        second: The second layer, or None.
    """

    size: tuple[int, int]
    pad: int
    side: int
    stride: int
    filters: int
    grid: int
    keep: int
    ridge: int
    mirror: bool
    second: Second | None = None

    @property
    def first(self) -> tuple[object, ...]:
        """What the first layer depends on: blocks that agree in it have the same one."""
        return self.size, self.pad, self.side, self.stride, self.filters, self.mirror

    @property
    def pooled(self) -> int:
        """Number of features before the PCA."""
        filters = self.filters if self.second is None else self.second.filters
        return (1 if self.mirror else 2) * filters * self.grid**2


def excess(r: Tensor, side: tuple[int, int], step: tuple[int, int]) -> Tensor:
    """Means over windows of what responses exceed the threshold by, above and below zero.

    Args:
        r: (rows, filters, height, width).
        side: Height and width of a window.
        step: Distance of two windows.

    Returns:
        (rows, 2, filters, windows down, windows across).
    """
    # relu(r - t) is max(r, t) - t, and the constant comes out of the mean.
    above = F.avg_pool2d(r.clamp(min=THRESHOLD), side, step) - THRESHOLD
    below = F.avg_pool2d(r.clamp(max=-THRESHOLD), side, step) + THRESHOLD
    return torch.stack((above, -below), 1).clamp_min(0.0)  # rounding can leave -1e-9


def cells(r: Tensor, grid: int) -> Tensor:
    """``excess`` over grid x grid windows that cover the map; neighbours overlap if they must."""
    height, width = r.shape[2:]
    step = max(1, height // grid), max(1, width // grid)
    return excess(r, (height - (grid - 1) * step[0], width - (grid - 1) * step[1]), step)


class Area(nn.Module):
    """Averages pictures down to a size, each pixel by the area that it covers.

    Args:
        before: (height, width).
        after: (height, width), at most as large.
    """

    rows: Tensor
    columns: Tensor

    def __init__(self, before: tuple[int, int], after: tuple[int, int]) -> None:
        super().__init__()
        for name, large, small in zip(("rows", "columns"), before, after, strict=True):
            edges = torch.arange(small + 1, dtype=torch.float64) * large / small
            pixel = torch.arange(large, dtype=torch.float64)
            low = torch.maximum(edges[:-1, None], pixel)
            high = torch.minimum(edges[1:, None], pixel + 1)
            share = (high - low).clamp_min(0.0) * small / large
            self.register_buffer(name, share.float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Pictures of the size ``after``."""
        return self.rows.to(x.dtype) @ x @ self.columns.T.to(x.dtype)


class Reduce(nn.Module):
    """A whitened PCA over the channels of maps: an affine map at every position.

    Args:
        after: Number of channels that go out.
        before: Number of channels that come in.
        pool: The maps are averaged over squares of this side first.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, after: int, before: int, pool: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(after, before, 1, 1))
        self.register_buffer("bias", torch.empty(after))
        self.pool = pool

    def shrunk(self, maps: Tensor) -> Tensor:
        """Smaller maps."""
        return F.avg_pool2d(maps, self.pool) if self.pool > 1 else maps

    def forward(self, maps: Tensor) -> Tensor:
        """Smaller maps with fewer channels."""
        return F.conv2d(self.shrunk(maps), self.weight, self.bias)


class BlockModule(nn.Module):
    """One block as a frozen module: pictures in [-1, 1] to features of unit length.

    Args:
        settings: The settings.
        shape: (channels, height, width) of the pictures that come in.
    """

    mean: Tensor
    project: Tensor

    def __init__(self, settings: Block, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.settings = settings
        channels, *size = shape
        ridge = (25.0 if channels == 1 else 10.0) / 127.5**2
        first, second = settings.filters, settings.second
        self.area = Area((size[0], size[1]), settings.size)
        weight = torch.empty(first, channels, settings.side, settings.side)
        self.bank = Bank(weight, settings.stride, ridge, True)
        self.reduce = self.over = None
        if second is not None:
            self.reduce = Reduce(second.channels, 2 * first, second.pool)
            over = torch.empty(second.filters, second.channels, 3, 3)
            self.over = Bank(over, 1, _MAP_RIDGE, False)
        self.register_buffer("mean", torch.empty(settings.pooled))
        self.register_buffer("project", torch.empty(settings.keep, settings.pooled))

    def pooled(self, x: Tensor, known: dict[object, Tensor] | None = None) -> Tensor:
        """Features before the whitening: (rows, columns).

        Args:
            x: Pictures.
            known: First layers' maps of these pictures that are known already; gets this block's.
        """
        own = self.settings
        if self.reduce is not None and self.over is not None:
            known = {} if known is None else known
            if own.first not in known:
                known[own.first] = self.maps(self.bank(self.seen(x)))
            r = self.over(self.reduce(known[own.first]))
        else:
            r = self.bank(self.seen(x))
        found = cells(r, own.grid)
        if own.mirror:  # the mean with the features of the mirror image
            half = found.shape[2] // 2
            found = (found[:, :, :half] + found[:, :, half:].flip(4)) / 2
        return found.flatten(1).sqrt()

    def seen(self, x: Tensor) -> Tensor:
        """The pictures as the block sees them."""
        x = x if x.shape[2:] == self.settings.size else self.area(x)
        return F.pad(x, (self.settings.pad,) * 4, "replicate") if self.settings.pad else x

    def maps(self, r: Tensor) -> Tensor:
        """The first layer's maps, for the second: pooled 2x2."""
        return excess(r, (2, 2), (2, 2)).flatten(1, 2).sqrt()

    def whitened(self, pooled: Tensor) -> Tensor:
        """Features (rows, keep) of unit length."""
        z = F.linear(pooled - self.mean, self.project)
        return z / z.norm(dim=1, keepdim=True).clamp_min(1e-6)


def make_block(settings: Block, x: Tensor, seed: int) -> BlockModule:
    """A block with its constants, in double precision.

    Args:
        settings: The settings.
        x: Synthetic pictures in double precision.
        seed: Another seed gives other filters.
    """
    block = BlockModule(settings, (x.shape[1], x.shape[2], x.shape[3])).double()
    block.bank.weight = filters_of(
        block.seen(x),
        block.bank,
        least=(10.0 if x.shape[1] == 1 else 4.0) / 127.5,
        mirror=settings.mirror,
        draws=Draws("first", settings.first, seed),
    )
    if block.reduce is not None and block.over is not None:
        few = x[:_MAPS]
        maps = [block.maps(block.bank(block.seen(rows))) for rows in few.split(_ROWS)]
        shrunk = torch.cat([block.reduce.shrunk(rows) for rows in maps])
        signs = _fill_reduce(block.reduce, shrunk, settings.mirror)
        block.over.weight = filters_of(
            torch.cat([block.reduce(rows) for rows in maps]),
            block.over,
            signs=signs,
            mirror=settings.mirror,
            draws=Draws("second", settings, seed),
        )
        del maps, shrunk
    features = x.new_empty(len(x), settings.pooled)
    for at in range(0, len(x), _ROWS):
        features[at : at + _ROWS] = block.pooled(x[at : at + _ROWS])
    block.mean, block.project = whitening(features, settings.keep, settings.ridge)
    return block


def _fill_reduce(reduce: Reduce, maps: Tensor, mirror: bool) -> Tensor | None:
    """Sets the whitened PCA over the channels of maps.

    Returns:
        What a mirror does to each channel, 1 or -1; None without a mirror.
    """
    flat = maps.movedim(1, 3).flatten(0, 2)
    mean, moment = flat.mean(0), flat.T @ flat / len(flat)
    size, parts = len(mean), [torch.eye(flat.shape[1], dtype=flat.dtype)]
    if mirror:
        # A mirror swaps the channels in pairs. So sums and differences of pairs are apart.
        swap = torch.arange(size).unflatten(0, (2, 2, -1)).flip(1).flatten()
        first = torch.arange(size)[torch.arange(size) < swap]
        (unit,) = parts
        parts = [(unit[first] + sign * unit[swap[first]]) / 2**0.5 for sign in (1.0, -1.0)]
        mean = (mean + mean[swap]) / 2
        moment = (moment + moment[swap][:, swap]) / 2
    covariance = moment - torch.outer(mean, mean)
    found = [torch.linalg.eigh(part @ covariance @ part.T) for part in parts]
    values = torch.cat([pair[0] for pair in found])
    vectors = torch.cat([pair[1].T @ part for pair, part in zip(found, parts, strict=True)])
    order = values.argsort(descending=True)[: len(reduce.bias)]
    values, vectors = values[order], oriented(vectors[order])
    scale = torch.rsqrt(values + values[-1])
    scale = scale / (values * scale.square()).mean().sqrt()
    weight = vectors * scale[:, None]
    reduce.weight, reduce.bias = weight[:, :, None, None], -weight @ mean
    return torch.where(order < size // 2, 1.0, -1.0).to(mean) if mirror else None


def oriented(vectors: Tensor) -> Tensor:
    """Unit vectors as rows with their signs settled: a fixed random vector lies on their side."""
    side = vectors @ Draws("orientation").normal(vectors.shape[1])
    return vectors * torch.where(side < 0, -1.0, 1.0)[:, None]


def whitening(features: Tensor, keep: int, ridge: int) -> tuple[Tensor, Tensor]:
    """Mean, and the map from features to their whitened first principal components.

    Args:
        features: Of synthetic pictures, one row each.
        keep: Number of components.
        ridge: Component number ``ridge`` is divided by the square root of twice its variance;
            stronger ones become more alike, weaker ones stay weak.

    Returns:
        (columns), and (keep, columns).
    """
    mean = features.mean(0)
    rest = features - mean
    values, vectors = torch.linalg.eigh(rest.T @ rest / len(rest))
    values, vectors = values.flip(0), oriented(vectors.T.flip(0)[:keep])
    keep = len(vectors)
    scale = torch.rsqrt(values[:keep].clamp_min(0.0) + values[min(ridge, keep - 1)])
    return mean, vectors * scale[:, None]
