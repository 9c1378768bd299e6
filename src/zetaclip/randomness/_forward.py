"""The random numbers that a gradient depends on: dropout masks, augmentation. They must be secret.

Masks are drawn row by row. Suppose they came from a public stream (``torch.manual_seed(0)``, or a
state in a published checkpoint). Then one more record in the batch would shift the masks of all
rows after it, and change the sum by far more than one clipped gradient. The position of the stream
would also reveal how many records were drawn. A secret key solves both problems: whatever the
batch, each row's mask is an independent secret draw.

So torch's generators use a key of the batch while one of its chunks is out, and are restored
afterwards: the user's seed is for initial weights and other public choices.

**Edge cases.** If the user seeds torch while a chunk is out, the masks are public
(docs/sharp-edges.md), and that seed stays. Generators of devices other than the CPU use 63 bits of
the key, and are not tested here.

**Threads.** The generators belong to the process, so engines in several threads share them. The
state in this module is changed under one lock, and records are read under it. While two threads
have a chunk out, the masks of one can come from the key of the other. They are still independent
draws from a secret key, each used once, so the guarantee holds. But an exact replay would draw
other masks. ``ReleaseLog.confirm`` detects this by the fingerprint in the journal, and the run
releases nothing.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ._streams import subkey

_WORDS = 624  # words of the Mersenne Twister's state
# 64-bit words before them in torch's serialised state: the seed, two flags, the position.
_HEADER = 3
# Protects the process-wide streams and the state of ``ForwardRng``. It is reentrant.
_streams = threading.Condition(threading.RLock())
# How long ``alone`` waits for the chunks of other threads, in seconds.
PATIENCE = 600.0


def _renew_lock() -> None:
    global _streams
    # A fork has no thread that would release the old lock.
    _streams = threading.Condition(threading.RLock())


os.register_at_fork(after_in_child=_renew_lock)


class ForwardRng:
    """Sets torch's generators to a secret key, and restores the user's states afterwards.

    The generators belong to the process, and several engines may have a batch out. The first
    ``lend`` saves the user's states for all of them, and the last ``take_back`` restores them.

    Args:
        device: The device of the model; its generator is set as well as the CPU's.

    Raises:
        ValueError: The device is not of type cpu, cuda or mps.

    **Guarantee.** Also with engines in several threads: while any chunk is out, torch draws from
    secret keys, and after the last one it continues from the user's state. ``users_streams`` never
    returns a secret state.
    """

    _out: ClassVar[weakref.WeakSet[ForwardRng]] = weakref.WeakSet()
    _aside: ClassVar[dict[torch.device, dict[str, Tensor]]] = {}  # the user's saved states
    # Values of ``torch.initial_seed`` that our keys set; another value means that the user seeded.
    _marks: ClassVar[set[int]] = set()

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda", "mps"):
            raise ValueError(
                f"dropout on a device of type {device.type!r} would draw masks that are not "
                "secret: use cpu, cuda or mps"
            )
        self._device = device
        self._thread = threading.get_ident()  # the thread that has the chunk

    def lend(self, key: bytes) -> dict[str, Tensor]:
        """Sets torch's generators to ``key``; returns the user's states, as they were."""
        with _streams:
            if torch.initial_seed() not in ForwardRng._marks:
                # the user has seeded torch, so the saved states are obsolete
                ForwardRng._out.clear()
            if not ForwardRng._out:
                _give_back()  # states left by an engine that no longer exists
            public = users_streams(self._device)
            ForwardRng._aside.setdefault(self._device, public)
            ForwardRng._out.add(self)
            self._thread = threading.get_ident()
            _follow(key)
            if self._device.type == "cuda":
                with torch.cuda.device(self._device):  # manual_seed acts on the current device
                    torch.cuda.manual_seed(_number(key))
            elif self._device.type == "mps":
                torch.mps.manual_seed(_number(key))
            return public

    def take_back(self) -> None:
        """Restores the user's states, unless the user has seeded torch or another chunk is out."""
        with _streams:
            if self in ForwardRng._out:
                ForwardRng._out.discard(self)
                if not ForwardRng._out:
                    _give_back()
                _streams.notify_all()


def _follow(key: bytes) -> None:
    """Sets torch's CPU generator to a secret key, and marks its seed as one of ours."""
    torch.set_rng_state(generator_state(key))
    ForwardRng._marks.add(torch.initial_seed())


def _give_back() -> None:
    if torch.initial_seed() in ForwardRng._marks:
        for device, states in ForwardRng._aside.items():
            set_public_streams(states, device)
    ForwardRng._aside.clear()
    ForwardRng._marks.clear()


def _others_out() -> bool:
    """Whether another thread may be drawing masks."""
    where = {tape._thread for tape in ForwardRng._out} - {threading.get_ident()}
    # Threads that have ended do not count.
    return bool(where) and any(thread.ident in where for thread in threading.enumerate())


def users_streams(device: torch.device) -> dict[str, Tensor]:
    """The user's states of torch's generators; while a chunk is out, the saved ones.

    **Guarantee.** The result is never a secret state.
    """
    with _streams:
        streams = public_streams(device)
        if torch.initial_seed() in ForwardRng._marks:
            for states in ForwardRng._aside.values():
                streams["cpu"] = states["cpu"]
            streams |= ForwardRng._aside.get(device, {})
        return streams


def set_users_streams(states: dict[str, Tensor], device: torch.device) -> None:
    """Sets the user's states, for example from a checkpoint.

    While another engine has a chunk out, only the saved states are replaced.

    Args:
        states: As ``users_streams`` returns them.
        device: The device of the model.
    """
    with _streams:
        if ForwardRng._out and torch.initial_seed() in ForwardRng._marks:
            for aside in ForwardRng._aside.values():
                aside["cpu"] = states["cpu"]
            ForwardRng._aside[device] = {**ForwardRng._aside.get(device, {}), **states}
        else:
            ForwardRng._aside.clear()
            set_public_streams(states, device)


def rewind(state: Tensor) -> None:
    """Sets torch's CPU generator back, unless another thread may have drawn from it since.

    That thread would otherwise draw the same masks again.
    """
    with _streams:
        if not _others_out():
            torch.set_rng_state(state)


@contextmanager
def untouched() -> Iterator[None]:
    """Restores the states of torch on the CPU, numpy and Python after the block.

    **Edge cases.** If another thread has a chunk out at that time, torch gets a fresh secret key
    instead: restoring a state that the other thread may have drawn from would repeat its masks.
    """
    with _streams:
        streams, numpys, pythons = torch.get_rng_state(), np.random.get_state(), random.getstate()
        try:
            yield
        finally:
            if _others_out():
                _follow(os.urandom(32))
            rewind(streams)
            np.random.set_state(numpys)
            random.setstate(pythons)


@contextmanager
def drawing_from(key: bytes) -> Iterator[None]:
    """Makes torch on the CPU, numpy and Python draw from ``key`` in the block, then restores them.

    Args:
        key: A secret key. Another thread that has a chunk out also draws from it.
    """
    with untouched():
        torch.set_rng_state(generator_state(key))
        np.random.seed(np.frombuffer(subkey(key, "numpy"), dtype=np.uint32))
        random.seed(subkey(key, "python"))
        yield


@contextmanager
def alone() -> Iterator[None]:
    """As ``untouched``, for a block that sets a public seed.

    It waits until no other thread has a chunk out, whose masks would come from that seed.

    Raises:
        RuntimeError: Another thread keeps its chunk out for longer than ``PATIENCE``.
    """
    with _streams:
        if not _streams.wait_for(lambda: not _others_out(), PATIENCE):
            raise RuntimeError(
                f"another thread has taken a private batch and not stepped it for {PATIENCE:g} s. "
                "A public seed that is set now would decide its dropout masks. Call step() there, "
                "or detach() that engine, or train in processes instead of threads"
            )
        with untouched():
            yield


def _number(key: bytes) -> int:
    return int.from_bytes(hashlib.shake_256(b"device\0" + key).digest(8), "little") >> 1


def public_streams(device: torch.device) -> dict[str, Tensor]:
    """The current states of torch's generators. They are public only while no chunk is out."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_public_streams(states: dict[str, Tensor], device: torch.device) -> None:
    """Sets torch's generators to states that ``public_streams`` returned."""
    torch.set_rng_state(states["cpu"].cpu())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)
    elif device.type == "mps" and "mps" in states:
        torch.mps.set_rng_state(states["mps"].cpu())


def generator(key: bytes) -> torch.Generator:
    """A CPU generator of torch whose whole state, not only a 32-bit seed, comes from the key."""
    made = torch.Generator()
    made.set_state(generator_state(key))
    return made


def generator_state(key: bytes) -> Tensor:
    """The state of ``generator(key)``, for an existing generator."""
    digest = hashlib.shake_256(b"state\0" + key).digest(4 * (_WORDS + 1))
    numbers = np.frombuffer(digest, dtype=np.uint32)
    # torch stores each 32-bit word in 64 bits, of which it reads the lower half. numpy's calls are
    # a few times cheaper than torch's here.
    words = _blank_state().copy()
    words[_HEADER : _HEADER + _WORDS] = numbers[:_WORDS]
    words[0] = numbers[_WORDS]  # the value of initial_seed(); no number is drawn from it
    return torch.from_numpy(words.view(np.uint8))


@functools.cache
def _blank_state() -> np.ndarray:
    """A state whose counters mark the words as unused."""
    return torch.Generator().manual_seed(0).get_state().numpy().view(np.int64)
