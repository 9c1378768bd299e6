"""The randomness that a record meets on its way to its gradient: dropout masks, augmentation. Secret, as the batches are.

Masks are drawn row by row. If they came from a stream that everybody knows (``torch.manual_seed(0)``, or a state that a checkpoint
publishes), one more record in the batch would shift the masks of all rows after it, and move the sum by far more than one clipped
gradient; and how far the stream has moved would tell how many records were drawn. From a secret key both are gone: whatever
the batch, each row's mask is a fresh draw that nobody knows.

So torch's generators follow a key of the batch while one of its chunks is out, and are put back afterwards: what the user seeded is
for initial weights and whatever else is public.

**Edge cases.** A user who seeds torch while a chunk is out has chosen masks that everybody knows (docs/sharp-edges.md); that seed
then stays. Device generators other than the CPU's take 63 bits of the key, and are not tested here.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from .randomness import generator_state, subkey
from .turns import public_streams, set_public_streams


class Tape:
    """torch's generators, lent to a secret key and given back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own: dict[str, Tensor] | None = None  # the user's states, while they are put aside
        self._mark = 0  # what ``torch.initial_seed`` says while nobody has seeded anew

    def lend(self, key: bytes) -> None:
        if self._own is None:
            self._own = public_streams(self._device)
        torch.set_rng_state(generator_state(key))
        self._mark = torch.initial_seed()
        if self._device.type in ("cuda", "mps"):
            getattr(torch, self._device.type).manual_seed(_number(key))

    def take_back(self) -> None:
        """The user's states again, unless the user has seeded torch in the meantime."""
        own, self._own = self._own, None
        if own is not None and torch.initial_seed() == self._mark:
            set_public_streams(own, self._device)


@contextmanager
def drawing_from(key: bytes) -> Iterator[None]:
    """What is drawn inside, by torch on the CPU, numpy or Python, follows the key; afterwards all three are as they were."""
    streams, numpys, pythons = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.set_rng_state(generator_state(key))
    np.random.seed(np.frombuffer(subkey(key, "numpy"), dtype=np.uint32))
    random.seed(subkey(key, "python"))
    try:
        yield
    finally:
        torch.set_rng_state(streams)
        np.random.set_state(numpys)
        random.setstate(pythons)


def _number(key: bytes) -> int:
    return int.from_bytes(hashlib.shake_256(b"device\0" + key).digest(8), "little") >> 1
