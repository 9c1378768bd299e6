"""First-order scattering: fixed wavelets, their absolute values, averaged; for comparison.

Mallat's scattering transform with Morlet wavelets in J scales and L directions, first order: what
Tramèr and Boneh (2021) used the first two orders of. Nothing in it was learned.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import InputError

_SCALES, _DIRECTIONS = 2, 8
_BIAS = 0.1
_ROWS = 16  # pictures at a time: their maps stay in the processor's cache


class Scattering(nn.Module):
    """The features as a frozen module, for raw pictures.

    Args:
        shape: (channels, height, width), at least 8x8 pixels.
        length: The length of a row of features. A network whose first layer starts as torch's
            does hears features of length 1 only faintly; a length of 10 suits it.
    """

    made_from = "made of wavelets"
    low: Tensor
    waves: Tensor

    def __init__(self, shape: tuple[int, ...], length: float = 1.0) -> None:
        super().__init__()
        if isinstance(length, bool) or not isinstance(length, int | float) or not 0 < length < 1e6:
            raise InputError(f"length is a number above 0, not {length!r}")
        self.length = float(length)
        if len(shape) != 3 or min(shape[1:]) < 8:
            raise InputError(
                f"scattering is for pictures of shape (channels, height, width) of at least 8x8"
                f" pixels, not {shape}"
            )
        self.shape = shape[0], shape[1], shape[2]
        size = shape[1] + 2 * _PAD, shape[2] + 2 * _PAD
        waves = [
            _morlet(size, 0.8 * 2**j, 3 * math.pi / 4 / 2**j, math.pi * k / _DIRECTIONS)
            for j in range(_SCALES)
            for k in range(_DIRECTIONS)
        ]
        self.register_buffer("waves", torch.stack(waves).float(), persistent=False)
        gauss = _gauss(size, 0.8 * 2 ** (_SCALES - 1))
        self.register_buffer("low", (gauss / gauss[0, 0]).float(), persistent=False)
        step = 2**_SCALES
        cells = math.prod((side + step // 2 - 1) // step for side in shape[1:])
        self.columns = shape[0] * (1 + _SCALES * _DIRECTIONS) * cells + 1
        self.eval()

    def maps(self, x: Tensor) -> Tensor:
        """Coefficients (rows, channels, 1 + scales · directions, height / 4, width / 4)."""
        padded = F.pad(x, (_PAD,) * 4, "replicate")
        spectrum = torch.fft.fft2(padded)[:, :, None]
        first = torch.fft.ifft2(spectrum * self.waves).abs()
        every = torch.cat((spectrum, torch.fft.fft2(first)), 2)
        smooth = torch.fft.ifft2(every * self.low).real
        step = 2**_SCALES
        inside = smooth[..., _PAD:-_PAD, _PAD:-_PAD]
        return inside[..., step // 2 :: step, step // 2 :: step]

    def forward(self, x: Tensor) -> Tensor:
        """Features (rows, columns) of pictures in [-1, 1], of one length, and a constant column.

        Every channel of a picture's maps has its mean taken off, and is divided by its spread.
        """
        if len(x) > _ROWS:
            return torch.cat([self(part) for part in x.split(_ROWS)])
        maps = self.maps(x)
        maps = maps - maps.mean((3, 4), keepdim=True)
        maps = maps / (maps.square().mean((3, 4), keepdim=True) + 1e-4).sqrt()
        flat = maps.flatten(1)
        flat = flat / flat.norm(dim=1, keepdim=True).clamp_min(1e-6)
        return self.length * torch.cat((flat, x.new_full((x.shape[0], 1), _BIAS)), 1)

    def describe(self) -> dict[str, object]:
        """What was fixed in advance, for the result of a run."""
        return {
            "kind": "scattering",
            "shape": list(self.shape),
            "columns": self.columns,
            "scales": _SCALES,
            "directions": _DIRECTIONS,
            "length": self.length,
        }


_PAD = 2 ** (_SCALES + 1)


def scattering(shape: tuple[int, ...], length: float = 1.0) -> Scattering:
    """First-order scattering for pictures of a shape, with rows of a length.

    Raises:
        InputError: The pictures are too small, or there is no such length.
    """
    return Scattering(shape, length)


def _morlet(size: tuple[int, int], width: float, wave: float, angle: float) -> Tensor:
    """The spectrum of a Morlet wavelet: a plane wave under a Gaussian, with mean zero."""
    bell = _gauss(size, width, wave, angle, 4 / _DIRECTIONS)
    still = _gauss(size, width, 0.0, angle, 4 / _DIRECTIONS)
    return bell - still * (bell[0, 0] / still[0, 0])


def _gauss(
    size: tuple[int, int], width: float, wave: float = 0.0, angle: float = 0.0, slant: float = 1.0
) -> Tensor:
    """The spectrum of a Gaussian, moved to the frequency ``wave`` in a direction.

    The spectrum repeats every 2π; the neighbours' shares are added.
    """
    cos, sin = math.cos(angle), math.sin(angle)
    total = torch.zeros(size, dtype=torch.float64)
    axes = [2 * math.pi * torch.fft.fftfreq(side, dtype=torch.float64) for side in size]
    for turn_y in (-1, 0, 1):
        for turn_x in (-1, 0, 1):
            y = (axes[0] + 2 * math.pi * turn_y)[:, None]
            x = (axes[1] + 2 * math.pi * turn_x)[None]
            along, across = x * cos + y * sin - wave, (y * cos - x * sin) / slant
            total += torch.exp(-0.5 * width**2 * (along.square() + across.square()))
    return total
