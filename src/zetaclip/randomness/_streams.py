"""Secret streams of keys, from which batches and noise are drawn.

A stream is a 256-bit key. Every draw gets its own key, by a one-way function, and the stream's key
is then replaced, also by a one-way function: a saved state does not reveal earlier draws. (A plain
torch generator can be run backwards, and its ``manual_seed`` keeps 32 bits, which can be guessed by
trying all of them.)

**Guarantee.** Keys come from the operating system unless the user fixes a seed, and no key is used
twice.
"""

from __future__ import annotations

import hashlib
import os


def _derive(key: bytes, label: bytes) -> bytes:
    return hashlib.shake_256(label + b"\0" + key).digest(32)


class Stream:
    """A secret key that is replaced after every draw.

    A stream must be used only by the process that created it: a fork has a copy of the key and
    would draw the same keys as its parent.

    Args:
        key: 32 secret bytes.

    Examples:
        >>> stream = Stream.fresh()
        >>> stream.draw() == stream.draw()
        False
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise ValueError("a stream's key has 32 bytes")
        self._key = key
        self._process = os.getpid()

    @property
    def at_home(self) -> bool:
        """Whether this is the process that created the stream, not a fork of it."""
        return os.getpid() == self._process

    @staticmethod
    def fresh() -> Stream:
        """A stream with a key from the operating system."""
        return Stream(os.urandom(32))

    @staticmethod
    def seeded(seed: int, name: str) -> Stream:
        """A stream for tests and public data: anyone who knows the seed can repeat all draws."""
        return Stream(hashlib.shake_256(f"zetaclip {name} {seed}".encode()).digest(32))

    def draw(self) -> bytes:
        """A key for one use; the stream's own key is then replaced."""
        drawn, self._key = drawn_and_next(self._key)
        return drawn

    def copy(self) -> Stream:
        """A stream that draws the same keys: for looking ahead, never for a second release."""
        return Stream(self._key)

    @property
    def state(self) -> bytes:
        """The current key. It is secret, but reveals nothing about earlier draws."""
        return self._key


def drawn_and_next(state: bytes) -> tuple[bytes, bytes]:
    """A key for one use, and the state of the stream after it."""
    return _derive(state, b"draw"), _derive(state, b"next")


def subkey(key: bytes, label: str) -> bytes:
    """A further key, derived from a drawn one, for the purpose that ``label`` names."""
    return _derive(key, label.encode())
