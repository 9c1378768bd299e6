"""The secret streams: which records are drawn, and what noise hides them.

A stream is a 256-bit key. Every draw gets a key of its own, derived one way, and the stream's key is then
replaced, again one way: whoever sees a saved state can't recover an earlier draw. (A plain torch generator
can be run backwards, and its ``manual_seed`` keeps 32 bits, which anyone can try out.)

**Guarantee.** Keys come from the operating system unless the user fixes a seed, and no key is used twice.
"""

from __future__ import annotations

import functools
import hashlib
import os

import numpy as np
import torch
from torch import Tensor

_WORDS = 624  # of the Mersenne Twister's state
_HEADER = (
    3  # 64-bit words before them in torch's serialised state: the seed, two flags, the position
)


def _derive(key: bytes, label: bytes) -> bytes:
    return hashlib.shake_256(label + b"\0" + key).digest(32)


class Stream:
    """A secret key that moves one way.

    It belongs to the process that made it: a fork has a copy of the key and would draw what its parent draws.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise ValueError("a stream's key has 32 bytes")
        self._key = key
        self._process = os.getpid()

    @property
    def at_home(self) -> bool:
        """Whether this is the process that made the stream, and not a fork of it."""
        return os.getpid() == self._process

    @staticmethod
    def fresh() -> Stream:
        """A stream that nobody can draw again."""
        return Stream(os.urandom(32))

    @staticmethod
    def seeded(seed: int, name: str) -> Stream:
        """For tests and public data: whoever knows the seed can draw everything again."""
        return Stream(hashlib.shake_256(f"zetaclip {name} {seed}".encode()).digest(32))

    def draw(self) -> bytes:
        """A key for one use; the stream moves on."""
        drawn, self._key = drawn_and_next(self._key)
        return drawn

    def copy(self) -> Stream:
        """A stream that will draw the same keys: to look ahead, never to release twice."""
        return Stream(self._key)

    @property
    def state(self) -> bytes:
        """Secret. Tells nothing of what was drawn before."""
        return self._key


def drawn_and_next(state: bytes) -> tuple[bytes, bytes]:
    """A key for one use, and the state of the stream after it."""
    return _derive(state, b"draw"), _derive(state, b"next")


def subkey(key: bytes, label: str) -> bytes:
    """Another key from a drawn one, for another purpose of the same batch."""
    return _derive(key, label.encode())


def generator(key: bytes) -> torch.Generator:
    """A CPU generator of torch whose whole state, not only a 32-bit seed, comes from the key."""
    made = torch.Generator()
    made.set_state(generator_state(key))
    return made


def generator_state(key: bytes) -> Tensor:
    """The same, for a generator that is there already."""
    digest = hashlib.shake_256(b"state\0" + key).digest(4 * (_WORDS + 1))
    numbers = np.frombuffer(digest, dtype=np.uint32)
    # torch keeps each 32-bit word in 64 bits, of which it reads the lower half. numpy's calls are a few
    # times cheaper than torch's here.
    words = _blank_state().copy()
    words[_HEADER : _HEADER + _WORDS] = numbers[:_WORDS]
    words[0] = numbers[_WORDS]  # what initial_seed() says; no number is drawn from it
    return torch.from_numpy(words.view(np.uint8))


@functools.cache
def _blank_state() -> np.ndarray:
    """A state whose counters say that the words are fresh."""
    return torch.Generator().manual_seed(0).get_state().numpy().view(np.int64)
