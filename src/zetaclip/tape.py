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
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .randomness import generator_state, subkey
from .turns import public_streams, set_public_streams


class Tape:
    """torch's generators, lent to a secret key and given back.

    The generators are the process's, and several engines may have a batch out: the first tape that is lent puts the user's states
    aside for all of them, and the last one gives them back.
    """

    _out: ClassVar[weakref.WeakSet[Tape]] = weakref.WeakSet()
    _aside: ClassVar[dict[torch.device, dict[str, Tensor]]] = {}  # the user's states
    _marks: ClassVar[set[int]] = set()  # what ``torch.initial_seed`` may say while nobody has seeded anew

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda", "mps"):
            raise ValueError(
                f"dropout on a device of type {device.type!r} would draw masks that are not secret: use cpu, cuda or mps"
            )
        self._device = device

    def lend(self, key: bytes) -> None:
        if torch.initial_seed() not in Tape._marks:
            Tape._out.clear()  # the user has seeded anew, and what was put aside before is nobody's any more
        if not Tape._out:
            _give_back()  # what an engine that is gone has left
        Tape._aside.setdefault(self._device, users_streams(self._device))
        Tape._out.add(self)
        torch.set_rng_state(generator_state(key))
        Tape._marks.add(torch.initial_seed())
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):  # manual_seed is for the current card
                torch.cuda.manual_seed(_number(key))
        elif self._device.type == "mps":
            torch.mps.manual_seed(_number(key))

    def take_back(self) -> None:
        """The user's states again, unless the user has seeded torch in the meantime, or another engine has a batch out."""
        if self in Tape._out:
            Tape._out.discard(self)
            if not Tape._out:
                _give_back()


def _give_back() -> None:
    if torch.initial_seed() in Tape._marks:
        for device, states in Tape._aside.items():
            set_public_streams(states, device)
    Tape._aside.clear()
    Tape._marks.clear()


def users_streams(device: torch.device) -> dict[str, Tensor]:
    """``public_streams`` as the user left them, also while they are put aside: what is there then is secret."""
    streams = public_streams(device)
    if torch.initial_seed() in Tape._marks:
        for states in Tape._aside.values():
            streams["cpu"] = states["cpu"]
        streams |= Tape._aside.get(device, {})
    return streams


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
