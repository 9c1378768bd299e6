"""Synthetic pictures: what the constants of the features are made from.

Nobody took these pictures: shapes are drawn one over the other, as leaves fall on a lawn. Their
edges, corners and textures are enough like those of real pictures to choose filters by. Edges are
smooth, so that rounding can't flip a pixel, and every machine gets the same pictures.

All pictures have values from -1 (black) to 1 (white) and are in double precision.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ._draws import Draws

_ROWS = 64  # pictures that are drawn together; small, so that they stay in the processor's cache
_EDGES = 6
KINDS = ("leaves", "dense", "strokes", "shapes", "glyphs")


def pictures(kind: str, count: int, shape: tuple[int, int, int], seed: int = 0) -> Tensor:
    """Synthetic pictures.

    Args:
        kind: "leaves": few to many opaque shapes with texture. "dense": the whole canvas is
            covered, in related colours, sometimes blurred. "strokes": thick curves on black.
            "shapes": a few filled shapes on black. "glyphs": strokes of one width that hang
            together, as in letters and digits.
        count: How many.
        shape: (channels, height, width), with 1 or 3 channels.
        seed: Another seed gives other pictures.

    Returns:
        Shape (count, channels, height, width).
    """
    make = (_leaves, _dense, _strokes, _shapes, _glyphs)[KINDS.index(kind)]
    draws = Draws("pictures", kind, shape, seed)
    parts = [make(draws, min(_ROWS, count - at), shape) for at in range(0, count, _ROWS)]
    return torch.cat(parts)[:count].clamp_(-1.0, 1.0)


def _leaves(draws: Draws, rows: int, shape: tuple[int, int, int]) -> Tensor:
    channels, side, most = shape[0], max(shape[1:]), 60
    number = draws.whole(rows, low=4, high=most)
    radius = _radii(draws, rows, most, draws.uniform(rows, 1, low=1.0, high=1.0), 0.6 * side)
    radius = _falling(draws, radius, 0.5)
    grey = draws.uniform(rows, most, 1) * 255 + 30 * draws.normal(rows, most, 1)
    tint = 40 * draws.uniform(rows, 1, 1) * draws.normal(rows, most, 3)
    colours = (grey + tint).clamp(0, 255)
    canvas = draws.uniform(rows, 3) * 255
    canvas = canvas[:, :, None, None].expand(rows, 3, *shape[1:]).clone()
    canvas = _painted(draws, canvas, number, radius, colours, 1 / 3)
    texture = _texture(draws, rows, shape[1:], draws.uniform(rows, low=0.0, high=30.0))
    return _seen(canvas + texture, channels)


def _dense(draws: Draws, rows: int, shape: tuple[int, int, int]) -> Tensor:
    channels, side, most = shape[0], max(shape[1:]), 120
    number = draws.whole(rows, low=15, high=most)
    least = draws.uniform(rows, 1, low=1.25, high=4.0)
    radius = _radii(draws, rows, most, least, 0.7 * side)
    radius[:, :4] = side * draws.uniform(rows, 4, low=0.3, high=0.8)
    radius = _falling(draws, radius, 0.7)
    spread = draws.uniform(rows, 1, 1, low=3.0, high=35.0)
    grey = draws.uniform(rows, 1, 1, low=60.0, high=190.0)
    grey = grey + draws.uniform(rows, 1, 1, low=15.0, high=70.0) * draws.normal(rows, most, 1)
    tint = spread * (draws.normal(rows, 1, 3) + 0.7 * draws.normal(rows, most, 3))
    colours = (grey + tint).clamp(0, 255)
    canvas = colours[:, 0, :, None, None].expand(rows, 3, *shape[1:]).clone()
    canvas = _painted(draws, canvas, number, radius, colours, 0.4)
    canvas = _blurred(draws, canvas)
    texture = _texture(draws, rows, shape[1:], draws.uniform(rows, low=0.0, high=20.0))
    slope = [torch.linspace(-1.0, 1.0, size, dtype=torch.float64) for size in shape[1:]]
    light = 12 * draws.normal(rows, 1, 1, 1) * slope[0][:, None]
    return _seen(canvas + texture + light + 8 * draws.normal(rows, 1, 1, 1) * slope[1], channels)


def _shapes(draws: Draws, rows: int, shape: tuple[int, int, int]) -> Tensor:
    side, most = min(shape[1:]), 6
    number = draws.whole(rows, low=1, high=most)
    radius = side * draws.uniform(rows, most, low=0.1, high=0.45)
    grey = draws.uniform(rows, most, 1, low=40.0, high=255.0)
    canvas = torch.zeros(rows, 3, *shape[1:], dtype=torch.float64)
    spot = draws.uniform(rows, most, 2, low=0.25, high=0.75)
    canvas = _painted(draws, canvas, number, radius, grey.expand(-1, -1, 3), 0.3, spot)
    texture = _texture(draws, rows, shape[1:], draws.uniform(rows, low=0.0, high=40.0))
    return _seen(canvas + texture * (canvas > 0), shape[0])


def _strokes(draws: Draws, rows: int, shape: tuple[int, int, int]) -> Tensor:
    _, height, width = shape
    side, most, pieces = min(height, width), 3, 15
    number = draws.whole(rows, low=1, high=most + 1)
    corners = draws.uniform(rows, most, 4, 2, low=0.15, high=0.85)
    corners = corners * torch.tensor([height, width], dtype=torch.float64)
    t = torch.linspace(0.0, 1.0, pieces + 1, dtype=torch.float64)
    weights = torch.stack(((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3), 1)
    points = weights @ corners  # along cubic Bézier curves: (rows, most, pieces + 1, 2)
    thick = side * draws.uniform(rows, most, low=0.045, high=0.14) + 0.2
    return _drawn(points, thick, number, shape)


def _glyphs(draws: Draws, rows: int, shape: tuple[int, int, int]) -> Tensor:
    size = torch.tensor(shape[1:], dtype=torch.float64)
    side, most, knots, pieces = min(shape[1:]), 3, 5, 6
    number = draws.whole(rows, low=1, high=most + 1)
    # Walks with a bend of their own: lines, arcs, waves, loops.
    turn = 1.2 * draws.uniform(rows, most, knots - 1, low=-1.0, high=1.0)
    turn = (turn + 1.4 * draws.uniform(rows, most, 1, low=-1.0, high=1.0)).cumsum(2)
    turn = turn + 2 * torch.pi * draws.uniform(rows, most, 1)
    step = torch.stack((turn.sin(), turn.cos()), 3)
    step = step * draws.uniform(rows, most, knots - 1, 1, low=0.5, high=1.5)
    step = step * draws.uniform(rows, most, 1, 1, low=0.4, high=1.2)
    walks = list(F.pad(step.cumsum(2), (0, 0, 1, 0)).unbind(1))
    # Each has a knot at one of the walk before, most often.
    row = torch.arange(rows)
    for k in range(1, most):
        there = walks[k - 1][row, draws.whole(rows, low=0, high=knots)]
        here = walks[k][row, draws.whole(rows, low=0, high=knots)]
        apart = 0.8 * draws.normal(rows, 2) * (draws.uniform(rows, 1) < 0.3)
        walks[k] = walks[k] + (there - here + apart)[:, None]
    # Smooth curves through the knots (Catmull-Rom), in a box in the middle.
    walk = torch.stack(walks, 1)
    walk = torch.cat((walk[:, :, :1], walk, walk[:, :, -1:]), 2)
    t = torch.arange(pieces, dtype=torch.float64) / pieces
    weights = (-t + 2 * t**2 - t**3, 2 - 5 * t**2 + 3 * t**3, t + 4 * t**2 - 3 * t**3, t**3 - t**2)
    points = walk.unfold(2, 4, 1) @ (torch.stack(weights) / 2)
    points = torch.cat((points.transpose(3, 4).flatten(2, 3), walk[:, :, -1:]), 2)
    used = (torch.arange(most) < number[:, None])[:, :, None, None]
    low = torch.where(used, points, torch.inf).amin((1, 2), keepdim=True)
    high = torch.where(used, points, -torch.inf).amax((1, 2), keepdim=True)
    box = side * draws.uniform(rows, 1, 1, 1, low=0.55, high=0.8)
    scale = box / (high - low).amax(3, keepdim=True)
    points = (points - (low + high) / 2) * scale + size / 2
    thick = side * draws.uniform(rows, 1, low=0.05, high=0.13)
    thick = thick * draws.uniform(rows, most, low=0.85, high=1.15)
    return _drawn(points, thick, number, shape)


def _drawn(points: Tensor, thick: Tensor, number: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """White lines on black.

    Args:
        points: Along the lines: (rows, lines, points, 2).
        thick: Their width: (rows, lines).
        number: How many of the lines are drawn: (rows).
        shape: (channels, height, width).
    """
    channels, height, width = shape
    rows = len(points)
    ink = torch.zeros(rows, height, width, dtype=torch.float64)
    y, x = _grid(height, width)
    for curve in range(points.shape[1]):
        nearest = torch.full_like(ink, torch.inf)
        for piece in range(points.shape[2] - 1):
            start = points[:, curve, piece, :, None, None]
            along = points[:, curve, piece + 1, :, None, None] - start
            dy, dx = y - start[:, 0], x - start[:, 1]
            length = along.square().sum(1).clamp_min(1e-12)
            share = ((dy * along[:, 0] + dx * along[:, 1]) / length).clamp_(0.0, 1.0)
            gap = (dy - share * along[:, 0]).square_() + (dx - share * along[:, 1]).square_()
            nearest = torch.minimum(nearest, gap)
        cover = (thick[:, curve, None, None] / 2 + 0.5 - nearest.sqrt()).clamp_(0.0, 1.0)
        cover *= (curve < number)[:, None, None]
        ink = torch.maximum(ink, cover)
    return (2.0 * ink - 1.0)[:, None].expand(rows, channels, height, width).clone()


def _grid(height: int, width: int) -> tuple[Tensor, Tensor]:
    """The middles of the pixels, as a column and a row."""
    y = torch.arange(height, dtype=torch.float64)[:, None] + 0.5
    return y, torch.arange(width, dtype=torch.float64)[None] + 0.5


def _radii(draws: Draws, rows: int, most: int, least: Tensor, largest: float) -> Tensor:
    """Radii with density r^-3: a scene looks alike from near and from far."""
    low, high = least**-2, largest**-2
    return (high + (low - high) * (1 - draws.uniform(rows, most))) ** -0.5


def _falling(draws: Draws, radius: Tensor, share: float) -> Tensor:
    """In a share of the pictures the large shapes lie below the small ones."""
    ordered = radius.sort(dim=1, descending=True).values
    return torch.where(draws.uniform(len(radius), 1) < share, ordered, radius)


def _painted(
    draws: Draws,
    canvas: Tensor,
    number: Tensor,
    radius: Tensor,
    colours: Tensor,
    round_share: float,
    spot: Tensor | None = None,
) -> Tensor:
    """Opaque shapes, one over the other: ellipses, and polygons with corners on ellipses."""
    rows, _, height, width = canvas.shape
    most = radius.shape[1]
    if spot is None:
        size = torch.tensor([height, width], dtype=torch.float64)
        middle = draws.uniform(rows, most, 2) * (size + 8) - 4
    else:
        middle = spot * torch.tensor([height, width], dtype=torch.float64)
    flat = draws.uniform(rows, most, low=0.4, high=1.0)
    is_round = draws.uniform(rows, most) < round_share
    edges = draws.whole(rows, most, 1, low=3, high=_EDGES + 1)
    turn = draws.uniform(rows, most, _EDGES) * 2 * torch.pi
    turn = torch.where(torch.arange(_EDGES) < edges, turn, torch.inf).sort(dim=2).values
    turn = turn.gather(2, torch.arange(_EDGES).expand(rows, most, -1) % edges)
    following = (torch.arange(_EDGES).expand(rows, most, -1) % edges + 1) % edges
    corner_x = 1.25 * radius[..., None] * turn.cos()
    corner_y = 1.25 * (radius * flat)[..., None] * turn.sin()
    along_x = corner_x.gather(2, following) - corner_x
    along_y = corner_y.gather(2, following) - corner_y
    length = (along_x.square() + along_y.square()).sqrt().clamp_min(1e-9)
    out_x, out_y = along_y / length, -along_x / length
    offset = corner_x * out_x + corner_y * out_y
    y, x = _grid(height, width)
    for k in range(int(number.max())):
        dx = x - middle[:, k, 1, None, None]
        dy = y - middle[:, k, 0, None, None]
        short = (radius * flat)[:, k, None, None]
        far = ((dx / radius[:, k, None, None]).square() + (dy / short).square()).sqrt()
        outside = (far - 1.0) * short
        corners = dx * out_x[:, k, 0, None, None] + dy * out_y[:, k, 0, None, None]
        corners -= offset[:, k, 0, None, None]
        for e in range(1, _EDGES):
            edge = dx * out_x[:, k, e, None, None] + dy * out_y[:, k, e, None, None]
            corners = torch.maximum(corners, edge.sub_(offset[:, k, e, None, None]))
        outside = torch.where(is_round[:, k, None, None], outside, corners)
        cover = (0.5 - outside).clamp_(0.0, 1.0) * (k < number)[:, None, None]
        canvas += cover[:, None] * (colours[:, k, :, None, None] - canvas)
    return canvas


def _texture(draws: Draws, rows: int, size: tuple[int, int], strength: Tensor) -> Tensor:
    """Noise whose power falls with frequency, the same in all channels."""
    height, width = size
    square = torch.fft.fftfreq(height, dtype=torch.float64)[:, None] ** 2
    square = square + torch.fft.rfftfreq(width, dtype=torch.float64) ** 2
    square[0, 0] = 1.0
    power = draws.uniform(rows, 1, 1, low=0.4, high=0.9)
    noise = torch.fft.rfft2(draws.normal(rows, height, width)) / square**power
    noise[:, 0, 0] = 0.0
    noise = torch.fft.irfft2(noise, s=size)
    noise = noise / (noise.std(dim=(1, 2), keepdim=True) + 1e-6)
    return (noise * strength[:, None, None])[:, None]


def _blurred(draws: Draws, canvas: Tensor) -> Tensor:
    """Half of the pictures, blurred by a Gaussian of a quarter to one pixel."""
    rows, channels = canvas.shape[:2]
    width = draws.uniform(rows, 1, low=0.25, high=1.0)
    taps = torch.exp(-0.5 * (torch.arange(-3, 4, dtype=torch.float64) / width) ** 2)
    taps = (taps / taps.sum(1, keepdim=True)).repeat_interleave(channels, 0)
    flat = canvas.reshape(1, rows * channels, *canvas.shape[2:])
    flat = F.conv2d(F.pad(flat, (3, 3, 3, 3), "replicate"), taps[:, None, None], groups=len(taps))
    flat = F.conv2d(flat, taps[:, None, :, None], groups=len(taps))
    chosen = draws.uniform(rows, 1, 1, 1) < 0.5
    return torch.where(chosen, flat.reshape(canvas.shape), canvas)


def _seen(canvas: Tensor, channels: int) -> Tensor:
    """Values from 0 to 255 as -1 to 1, in colour or grey."""
    canvas = canvas if channels == 3 else canvas.mean(1, keepdim=True)
    return canvas / 127.5 - 1.0
