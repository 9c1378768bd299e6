"""The two secret streams: which records are drawn, and what noise hides them.

A stream is a 256-bit key. Every draw gets a key of its own, derived one way, and the stream's key is then
replaced, again one way: whoever sees a saved state can't recover an earlier draw. (A plain torch generator
can be run backwards, and its ``manual_seed`` keeps 32 bits, which anyone can try out.)

**Guarantee.** Keys come from the operating system unless the user fixes a seed, and no key is used twice.
**Edge cases.** float32 noise comes from a stream cipher (``_gaussian.c``) where that could be compiled, the few values beside a
sum from SHAKE-256. Batches, float64 noise, and all noise where there was no compiler come from torch's Mersenne Twister with all of its state set from the
key: good statistics, not cryptography. The arithmetic is floating point; see docs/sharp-edges.md.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import statistics
import struct

import numpy as np
import torch
from torch import Tensor

try:
    from . import _gaussian as _compiled
except ImportError:  # built where there was no C compiler
    _compiled = None  # type: ignore[assignment]

_WORDS = 624  # of the Mersenne Twister's state
_HEADER = 3  # 64-bit words before them in torch's serialised state: the seed, two flags, the position
# Beyond this many standard deviations torch's float32 normals are too coarse, and at 5.77 they end.
TAIL = 5.0
_POSITIVE = (1 << 63) - 1
_NORMAL = statistics.NormalDist()


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
        return Stream(os.urandom(32))

    @staticmethod
    def seeded(seed: int, name: str) -> Stream:
        """For tests and public data: everything that is drawn can be drawn again by whoever knows the seed."""
        return Stream(hashlib.shake_256(f"zetaclip {name} {seed}".encode()).digest(32))

    def draw(self) -> bytes:
        """A key for one use; the stream moves on."""
        drawn = _derive(self._key, b"draw")
        self._key = _derive(self._key, b"next")
        return drawn

    def copy(self) -> Stream:
        """A stream that will draw the same keys: to look ahead, never to release twice."""
        return Stream(self._key)

    @property
    def state(self) -> bytes:
        """Secret. Tells nothing of what was drawn before."""
        return self._key


def noise_source() -> str:
    """Where float32 noise comes from here: part of what an exact replay depends on."""
    return "mt19937" if _compiled is None else "chacha12"


def subkey(key: bytes, label: str) -> bytes:
    """Another key from a drawn one, for another purpose of the same batch."""
    return _derive(key, label.encode())


def generator(key: bytes) -> torch.Generator:
    """A CPU generator whose whole state, not only a 32-bit seed, comes from the key."""
    made = torch.Generator()
    made.set_state(generator_state(key))
    return made


def generator_state(key: bytes) -> Tensor:
    """The same, for a generator that is there already."""
    numbers = np.frombuffer(hashlib.shake_256(b"state\0" + key).digest(4 * (_WORDS + 1)), dtype=np.uint32)
    # torch keeps each 32-bit word in 64 bits, of which it reads the lower half. numpy's calls are a few times cheaper than torch's here.
    words = _blank_state().copy()
    words[_HEADER : _HEADER + _WORDS] = numbers[:_WORDS]
    words[0] = numbers[_WORDS]  # what initial_seed() says; no number is drawn from it
    return torch.from_numpy(words.view(np.uint8))


@functools.cache
def _blank_state() -> np.ndarray:
    """A state whose counters say that the words are fresh."""
    return torch.Generator().manual_seed(0).get_state().numpy().view(np.int64)


def few_gaussians(key: bytes, count: int) -> list[float]:
    """A handful of standard normal values in float64, for what is released beside a sum.

    Each is the normal quantile of 63 bits of SHAKE-256 with a sign of its own, so the tails reach 9.1 and no generator has to be set up,
    which would take longer than the query.
    """
    words = struct.unpack(f"<{count}q", hashlib.shake_256(b"few\0" + key).digest(8 * count))
    # In (0, 1/2]; float64 rounds the last of them up.
    lower = (((word & _POSITIVE) + 0.5) * 2.0**-64 for word in words)
    return [math.copysign(_NORMAL.inv_cdf(half), word) for half, word in zip(lower, words, strict=True)]


def gaussian(key: bytes, numel: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Standard normal values times ``scale``, with tails.

    torch makes float32 normals from uniforms of 24 bits: none lies beyond 5.77, and near there only a few values
    are possible. An output that one data set can give and its neighbour can't is a privacy failure, and at small
    noise multipliers this one is not small against δ (docs/sharp-edges.md has the figures). The compiled source places
    values beyond 5 with 64 bits; after torch's they are drawn again from the exact conditional law, in float64. They
    are about six in ten million.
    """
    if dtype == torch.float32 and _compiled is not None:
        values = torch.empty(numel)
        _compiled.fill(key, values.data_ptr(), numel, scale)
        return values
    source = generator(key)
    values = torch.randn(numel, generator=source, dtype=dtype)
    if dtype == torch.float32 and numel and max(-values.amin().item(), values.amax().item()) > TAIL:
        far = (values.abs() > TAIL).nonzero().flatten()
        beyond = torch.special.ndtr(torch.tensor(-TAIL, dtype=torch.float64))
        uniform = 1.0 - torch.rand(len(far), generator=source, dtype=torch.float64)
        exact = -torch.special.ndtri(uniform * beyond)
        values[far] = torch.copysign(exact, values[far].double()).float()
    return values.mul_(scale)
