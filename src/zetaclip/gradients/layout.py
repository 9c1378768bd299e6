"""Where each trained parameter lies in the flat vector, and which rank owns which part of it.

The vector may be spread over ranks: every parameter is divided along its first dimension, as
``torch.distributed.fsdp.fully_shard`` divides it. Then each rank owns the sum, the noise and the
update of its own part, and never holds those of the whole vector. A chunk's clipped gradients are
added up a few parameters at a time, a *bucket*, and each rank keeps what it owns of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

# Numbers of a bucket, unless one parameter alone has more: 8 MiB in float64.
BUCKET = 1 << 20


@dataclass(frozen=True)
class Layout:
    """The position of each trained parameter in the flat vector that the mechanism works on.

    Attributes:
        names: Names of the parameters.
        parameters: The parameters.
        offsets: The first position of each.
        places: (size, stride, offset) of each, the arguments of ``as_strided``, which is the
            fastest way to make a view.
        numel: Length of the flat vector.
        dtype: float64 if a parameter is float64, otherwise float32.
        device: The device of all parameters.
        shards: What this rank owns of the vector; None if it holds all of it.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    offsets: tuple[int, ...]
    places: tuple[tuple, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device
    shards: Shards | None = None

    @property
    def own(self) -> int:
        """Length of the vector that this process sums and releases."""
        return self.numel if self.shards is None else self.shards.numel

    @staticmethod
    def of(named: dict[str, nn.Parameter]) -> Layout:
        """The layout of these parameters, in their order.

        Raises:
            ValueError: They are on several devices.
        """
        offsets, total = [], 0
        for parameter in named.values():
            offsets.append(total)
            total += parameter.numel()
        parameters = tuple(named.values())
        wide = any(p.dtype == torch.float64 for p in parameters)
        devices = {p.device for p in parameters}
        if len(devices) > 1:
            raise ValueError(
                "trained parameters lie on several devices "
                f"({', '.join(sorted(map(str, devices)))}); put them on one"
            )
        dtype = torch.float64 if wide else torch.float32
        shapes = [torch.empty(p.shape, device="meta") for p in parameters]
        places = tuple(
            (s.shape, s.stride(), offset) for s, offset in zip(shapes, offsets, strict=True)
        )
        return Layout(
            tuple(named), parameters, tuple(offsets), places, total, dtype, parameters[0].device
        )

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of the flat vector, in the parameter's shape."""
        return [flat.as_strided(*place) for place in self.places]


@dataclass(frozen=True)
class Bucket:
    """Some parameters in a row.

    Attributes:
        layout: Their own layout, from 0 on.
        begin: Where they begin in the flat vector of all parameters.
        pieces: For each rank, its parts of ``layout`` as slices, in order.
        width: Numbers of the rank that owns most of it.
        own: Where this rank's parts lie in its own vector.
    """

    layout: Layout
    begin: int
    pieces: tuple[tuple[slice, ...], ...]
    width: int
    own: slice

    def by_rank(self, flat: Tensor) -> Tensor:
        """The bucket as (ranks, width): a row for each rank that owns it, filled up with zeros."""
        rows = flat.new_zeros(len(self.pieces), self.width)
        for row, pieces in zip(rows, self.pieces, strict=True):
            begin = 0
            for piece in pieces:
                size = piece.stop - piece.start
                row[begin : begin + size] = flat[piece]
                begin += size
        return rows


@dataclass(frozen=True)
class Shards:
    """What one rank owns of every parameter.

    Attributes:
        rank: This rank.
        count: Number of ranks.
        numel: Numbers that this rank owns.
        places: (size, stride, offset) of each parameter's own part in this rank's vector.
        buckets: All parameters, in the order of the layout.

    **Guarantee.** Every coordinate has one owner; whose it is depends on shapes alone.
    """

    rank: int
    count: int
    numel: int
    places: tuple[tuple, ...]
    buckets: tuple[Bucket, ...]


def spread(layout: Layout, rank: int, count: int) -> Layout:
    """This layout with what the rank owns of it.

    Args:
        layout: The whole layout.
        rank: The rank.
        count: The number of ranks.
    """
    places, buckets, numel = [], [], 0
    for parameter in layout.parameters:
        first, last = owned_rows(parameter.shape[0], rank, count)
        own = torch.empty((last - first, *parameter.shape[1:]), device="meta")
        places.append((own.shape, own.stride(), numel))
        numel += own.numel()
    begin = 0
    for indices in _buckets([p.numel() for p in layout.parameters]):
        named = {layout.names[i]: layout.parameters[i] for i in indices}
        some = replace(Layout.of(named), dtype=layout.dtype)
        pieces = tuple(_pieces(some, one, count) for one in range(count))
        sizes = [sum(piece.stop - piece.start for piece in each) for each in pieces]
        start = places[indices[0]][2]
        own_part = slice(start, start + sizes[rank])
        buckets.append(Bucket(some, begin, pieces, max(sizes), own_part))
        begin += some.numel
    shards = Shards(rank, count, numel, tuple(places), tuple(buckets))
    return replace(layout, shards=shards)


def owned_rows(rows: int, rank: int, count: int) -> tuple[int, int]:
    """The first row of a rank and the one after its last, as ``torch.chunk`` divides them.

    Args:
        rows: How many there are.
        rank: The rank.
        count: The number of ranks.
    """
    each = math.ceil(rows / count)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def _buckets(sizes: list[int]) -> list[list[int]]:
    found: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not found or size > room:
            found.append([])
            room = BUCKET
        found[-1].append(index)
        room -= size
    return found


def _pieces(layout: Layout, rank: int, count: int) -> tuple[slice, ...]:
    found = []
    for parameter, offset in zip(layout.parameters, layout.offsets, strict=True):
        width = parameter.numel() // max(1, parameter.shape[0])
        first, last = owned_rows(parameter.shape[0], rank, count)
        found.append(slice(offset + first * width, offset + last * width))
    return tuple(found)
