"""Public random numbers that are the same everywhere and for good.

numpy promises the raw words of its bit generators, not the values of its distributions. So only
the words are taken from it.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor


class Draws:
    """A stream of public random numbers, in double precision.

    Args:
        *label: What the stream is for; equal labels give equal streams.
    """

    def __init__(self, *label: object) -> None:
        key = hashlib.sha256(repr(label).encode()).digest()[:16]
        self._words = np.random.Philox(key=np.frombuffer(key, "<u8"))

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Numbers from ``low`` to below ``high``."""
        count = int(np.prod(shape, dtype=np.int64))
        words = np.asarray(self._words.random_raw(count)) >> np.uint64(11)
        unit = torch.from_numpy(words.astype(np.float64) * 2.0**-53).reshape(shape)
        return low + (high - low) * unit

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers, by Box and Muller."""
        radius = torch.sqrt(-2.0 * torch.log1p(-self.uniform(*shape)))
        return radius * torch.cos(2.0 * torch.pi * self.uniform(*shape))

    def whole(self, *shape: int, low: int, high: int) -> Tensor:
        """Whole numbers from ``low`` to ``high`` - 1."""
        return self.uniform(*shape, low=low, high=high).floor().long()

    def order(self, count: int) -> Tensor:
        """A random order of the numbers below ``count``."""
        return self.uniform(count).argsort(stable=True)
