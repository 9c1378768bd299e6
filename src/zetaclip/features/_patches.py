"""Features for pictures from patches: fixed in advance, made from synthetic pictures alone.

Nothing in them was learned from a photograph, a data set or a private record. So they cost no
privacy: what is trained privately is the head on top of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from ..errors import InputError
from ._blocks import Block, BlockModule, Second, make_block
from ._cache import constants
from ._draws import Draws
from ._frame import framed
from ._synthetic import pictures

Shape = tuple[int, int, int]

# Changes whenever the same settings would give other constants.
_VERSION = 1
_LEAST, _MOST = 8, 224
_BIAS = 0.1
# Pictures at a time: for the maps, and for the projections.
_FEW, _MANY = 8, 256


@dataclass(frozen=True)
class Settings:
    """What the constants depend on; equal settings give equal features.

    Args:
        shape: (channels, height, width) of the pictures.
        blocks: The blocks.
        pictures: How many synthetic pictures of each kind.
        seed: Another seed gives other synthetic pictures and filters.
        framed: So many of the blocks, the first ones, see pictures in a standard frame.
    """

    shape: Shape
    blocks: tuple[Block, ...]
    pictures: tuple[tuple[str, int], ...]
    seed: int = 0
    framed: int = 0

    @property
    def columns(self) -> int:
        """Number of features, with the constant one."""
        return sum(block.keep for block in self.blocks) + 1

    def digest(self) -> str:
        """A name for these settings."""
        # Not by height and width: what matters is the size that the blocks see.
        made = {**asdict(self), "shape": self.shape[0], "version": _VERSION}
        if not self.framed:  # what was made before there were frames keeps its name
            del made["framed"]
        text = json.dumps(made, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def fits(shape: tuple[int, ...]) -> bool:
    """Whether there are settings for pictures of this shape."""
    return (
        len(shape) == 3
        and shape[0] in (1, 3)
        and min(shape[1:]) >= _LEAST
        and max(shape[1:]) <= _MOST
    )


def settings_for(shape: tuple[int, ...], *, mirror: bool | None = None) -> Settings:
    """The settings for pictures of a shape.

    Args:
        shape: (channels, height, width): 1 or 3 channels, 8x8 to 224x224 pixels.
        mirror: Whether a picture and its mirror image mean the same. Default: in colour yes, in
            grey no, because letters and digits are grey.

    Raises:
        InputError: There are no features for such a shape.
    """
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise InputError(
            f"patches are for pictures of shape (1 or 3 channels, height, width), not {shape}"
        )
    channels, height, width = (int(side) for side in shape)
    if min(height, width) < _LEAST or max(height, width) > _MOST:
        raise InputError(
            f"patches are for pictures of {_LEAST}x{_LEAST} to {_MOST}x{_MOST} pixels, not"
            f" {height}x{width}; scale them first (--set data_options.size=64 for a folder)"
        )
    same = channels == 3 if mirror is None else mirror
    scale = min(1.0, 32 / min(height, width))
    size = round(height * scale), round(width * scale)
    half = (size[0] + 1) // 2, (size[1] + 1) // 2
    kinds: tuple[tuple[str, int], ...]
    if channels == 3:
        kinds = (("leaves", 4000), ("dense", 4000))
    else:
        kinds = (("strokes", 5000), ("shapes", 1000))
    side = min(size)
    in_frame = 0
    if side < 12:
        kinds = tuple((kind, count // 2) for kind, count in kinds)
        blocks = [Block(size, 1, 4, 1, 128, 3, 768, 100, same)]
    elif side < 24:
        blocks = [
            Block(size, 1, 5, 1, 512, 2, 1536, 300, same),
            Block(size, 2, 5, 1, 128, 2, 1536, 300, same, Second(1, 48, 512)),
        ]
    elif channels == 3:
        blocks = [
            Block(size, 0, 6, 2, 1024, 2, 2048, 1000, same),
            Block(half, 1, 6, 1, 1024, 2, 2048, 1000, same),
            Block(size, 0, 5, 1, 256, 2, 1536, 700, same, Second(1, 48, 512)),
            Block(size, 0, 5, 1, 256, 2, 2048, 1000, same, Second(2, 96, 1024)),
            Block(half, 2, 5, 1, 256, 2, 2048, 1000, same, Second(1, 64, 1024)),
        ]
    else:
        kinds, in_frame = (("glyphs", 5000), ("shapes", 1000)), 2
        two = Block(size, 2, 5, 1, 64, 4, 1536, 100, same, Second(1, 32, 128))
        blocks = [Block(size, 2, 6, 2, 128, 4, 1536, 100, same), two, two]  # the last: no frame
    return Settings((channels, height, width), tuple(blocks), kinds, framed=in_frame)


class Patches(nn.Module):
    """The features as a frozen module, for raw pictures.

    It has buffers and no parameters, so nothing of it can be trained. Each picture is treated by
    itself.

    Args:
        settings: The settings.
        blocks: The blocks with their constants.
    """

    made_from = "made from synthetic pictures, no real one"

    def __init__(self, settings: Settings, blocks: list[BlockModule]) -> None:
        super().__init__()
        self.settings = settings
        self.blocks = nn.ModuleList(blocks)
        self.columns = settings.columns
        self.shape = settings.shape
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Features (rows, columns) of pictures (rows, channels, height, width) in [-1, 1].

        A row has length 1, and beside it the constant column for the head's bias.
        """
        exporting = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if not exporting and len(x) > _MANY:
            return torch.cat([self(rows) for rows in x.split(_MANY)])
        # Few pictures at a time, so that their maps stay in the processor's cache; then one product
        # with each projection, which is too large for that.
        few = [self._pooled(rows) for rows in ([x] if exporting else x.split(_FEW))]
        share = len(self.blocks) ** -0.5
        parts = [
            block.whitened(torch.cat(rows)) * share
            for block, rows in zip(self._own, zip(*few, strict=True), strict=True)
        ]
        return torch.cat((*parts, x.new_full((x.shape[0], 1), _BIAS)), 1)

    @property
    def _own(self) -> list[BlockModule]:
        return [block for block in self.blocks if isinstance(block, BlockModule)]

    def _pooled(self, x: Tensor) -> list[Tensor]:
        """Each block's features before the whitening."""
        count, own = self.settings.framed, self._own
        known: dict[object, Tensor] = {}
        found = [block.pooled(x, known) for block in own[count:]]
        if count:
            x, known = framed(x), {}
        return [block.pooled(x, known) for block in own[:count]] + found

    def describe(self) -> dict[str, object]:
        """What was fixed in advance, for the result of a run."""
        own = self.settings
        return {
            "kind": "patches",
            "shape": list(own.shape),
            "columns": self.columns,
            "blocks": len(own.blocks),
            "mirror": own.blocks[0].mirror,
            "made_from": dict(own.pictures),
            "digest": own.digest(),
        }


def patches(
    shape: tuple[int, ...],
    *,
    mirror: bool | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Patches:
    """The features for pictures of a shape.

    Their constants are made once and kept in the cache folder ($ZETACLIP_CACHE, or
    $XDG_CACHE_HOME/zetaclip, or ~/.cache/zetaclip), under a digest of the settings.

    Args:
        shape: (channels, height, width): 1 or 3 channels, 8x8 to 224x224 pixels.
        mirror: See ``settings_for``.
        say: Told when constants are made, which takes seconds to minutes.

    Raises:
        InputError: There are no features for such a shape.
    """
    return from_settings(settings_for(shape, mirror=mirror), say)


def from_settings(settings: Settings, say: Callable[[str], None] = lambda text: None) -> Patches:
    """The features with these settings, from the cache if they were made before."""
    empty = Patches(settings, [BlockModule(block, settings.shape) for block in settings.blocks])
    shapes = {name: value.shape for name, value in empty.state_dict().items()}
    empty.load_state_dict(constants(settings.digest(), shapes, lambda: _make(settings, say)))
    return empty


@torch.no_grad()
def _make(settings: Settings, say: Callable[[str], None]) -> dict[str, Tensor]:
    """The constants by name."""
    size = [max(block.size[axis] for block in settings.blocks) for axis in (0, 1)]
    shape = settings.shape[0], size[0], size[1]
    say("making the constants of the features from synthetic pictures (once; they are cached)")
    drawn = torch.cat([pictures(k, n, shape, settings.seed) for k, n in settings.pictures])
    drawn = drawn[Draws("order", settings.seed).order(len(drawn))]
    seen = framed(drawn) if settings.framed else drawn
    made: dict[str, Tensor] = {}
    for number, block in enumerate(settings.blocks):
        given = seen if number < settings.framed else drawn
        state = make_block(block, given, settings.seed).float().state_dict()
        made |= {f"blocks.{number}.{name}": value for name, value in state.items()}
        say(f"constants of block {number + 1} of {len(settings.blocks)} are made")
    return made
