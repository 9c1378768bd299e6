"""The randomness that a record meets on its way to its gradient: dropout masks, augmentation. Secret, as the batches are.

Masks are drawn row by row. If they came from a stream that everybody knows (``torch.manual_seed(0)``, or a state that a checkpoint
publishes), one more record in the batch would shift the masks of all rows after it, and move the sum by far more than one clipped
gradient; and how far the stream has moved would tell how many records were drawn. From a secret key both are gone: whatever
the batch, each row's mask is a fresh draw that nobody knows.

So torch's generators follow a key of the batch while one of its chunks is out, and are put back afterwards: what the user seeded is
for initial weights and whatever else is public.

**Edge cases.** A user who seeds torch while a chunk is out has chosen masks that everybody knows (docs/sharp-edges.md); that seed
then stays. Device generators other than the CPU's take 63 bits of the key, and are not tested here.

**Threads.** The generators are the process's, so engines in several threads share them. What is noted here is changed under one lock,
and records are read under it. While two threads have a chunk out, the masks of one can come from the key of the other. They are still
fresh draws from a secret key, each used once, so the guarantee holds. But an exact replay would draw others: ``ReleaseLog.confirm`` notices
it, where there is something to replay, by the fingerprint in the journal, and releases nothing.
"""

from __future__ import annotations

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

from . import generator_state, subkey

# Held by whoever changes a process-wide stream, or what ``ForwardRng`` notes of them. A thread may take it again inside.
_streams = threading.Condition(threading.RLock())
# How long ``alone`` waits for the chunks of other threads, in seconds.
PATIENCE = 600.0


def _renew_lock() -> None:
    global _streams
    _streams = threading.Condition(
        threading.RLock()
    )  # a fork has no thread that would free the old one


os.register_at_fork(after_in_child=_renew_lock)


class ForwardRng:
    """torch's generators, lent to a secret key and given back.

    The generators are the process's, and several engines may have a batch out: the first one that is lent puts the user's states
    aside for all of them, and the last one gives them back.

    **Guarantee.** Also with engines in several threads: while any chunk is out, torch draws from secret keys, and after the last one
    it goes on where the user was. ``users_streams`` never tells a secret state.
    """

    _out: ClassVar[weakref.WeakSet[ForwardRng]] = weakref.WeakSet()
    _aside: ClassVar[dict[torch.device, dict[str, Tensor]]] = {}  # the user's states
    _marks: ClassVar[set[int]] = (
        set()
    )  # what ``torch.initial_seed`` may say while nobody has seeded anew

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda", "mps"):
            raise ValueError(
                f"dropout on a device of type {device.type!r} would draw masks that are not secret: use cpu, cuda or mps"
            )
        self._device = device
        self._thread = threading.get_ident()  # where the chunk is out

    def lend(self, key: bytes) -> None:
        with _streams:
            if torch.initial_seed() not in ForwardRng._marks:
                ForwardRng._out.clear()  # the user has seeded anew, and what was put aside before is nobody's any more
            if not ForwardRng._out:
                _give_back()  # what an engine that is gone has left
            ForwardRng._aside.setdefault(self._device, users_streams(self._device))
            ForwardRng._out.add(self)
            self._thread = threading.get_ident()
            _follow(key)
            if self._device.type == "cuda":
                with torch.cuda.device(self._device):  # manual_seed is for the current card
                    torch.cuda.manual_seed(_number(key))
            elif self._device.type == "mps":
                torch.mps.manual_seed(_number(key))

    def take_back(self) -> None:
        """The user's states again, unless the user has seeded torch in the meantime, or another engine has a batch out."""
        with _streams:
            if self in ForwardRng._out:
                ForwardRng._out.discard(self)
                if not ForwardRng._out:
                    _give_back()
                _streams.notify_all()


def _follow(key: bytes) -> None:
    """torch's CPU generator follows a secret key from here, and ``ForwardRng`` knows it for one of its own."""
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
    where = {rng._thread for rng in ForwardRng._out} - {threading.get_ident()}
    return bool(where) and any(
        thread.ident in where for thread in threading.enumerate()
    )  # others have ended


def users_streams(device: torch.device) -> dict[str, Tensor]:
    """``public_streams`` as the user left them, also while they are put aside: what is there then is secret."""
    with _streams:
        streams = public_streams(device)
        if torch.initial_seed() in ForwardRng._marks:
            for states in ForwardRng._aside.values():
                streams["cpu"] = states["cpu"]
            streams |= ForwardRng._aside.get(device, {})
        return streams


def set_users_streams(states: dict[str, Tensor], device: torch.device) -> None:
    """Sets the user's states, as a checkpoint has them. While another engine has a chunk out, what is put aside for later is set."""
    with _streams:
        if ForwardRng._out and torch.initial_seed() in ForwardRng._marks:
            for aside in ForwardRng._aside.values():
                aside["cpu"] = states["cpu"]
            ForwardRng._aside[device] = {**ForwardRng._aside.get(device, {}), **states}
        else:
            ForwardRng._aside.clear()
            set_public_streams(states, device)


def rewind(state: Tensor) -> None:
    """Sets torch back to where this thread found it, unless another thread may have drawn since: that would draw the same again."""
    with _streams:
        if not _others_out():
            torch.set_rng_state(state)


@contextmanager
def untouched() -> Iterator[None]:
    """What is drawn inside, by torch on the CPU, numpy or Python, leaves no trace: afterwards all three are as they were.

    **Edge cases.** If another thread has a chunk out then, torch goes on with a fresh secret key instead: to set a stream back that the
    other thread may have drawn from would give it the same masks twice.
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
    """What is drawn inside, by torch on the CPU, numpy or Python, follows the key; afterwards all three are as they were.

    Args:
        key: a secret one. A thread that has a chunk out draws from it, too.
    """
    with untouched():
        torch.set_rng_state(generator_state(key))
        np.random.seed(np.frombuffer(subkey(key, "numpy"), dtype=np.uint32))
        random.seed(subkey(key, "python"))
        yield


@contextmanager
def alone() -> Iterator[None]:
    """As ``untouched``, for who sets a public seed inside: no other thread has a chunk out, whose masks would follow that seed.

    Raises:
        RuntimeError: if another thread keeps its chunk out for longer than ``PATIENCE``.
    """
    with _streams:
        if not _streams.wait_for(lambda: not _others_out(), PATIENCE):
            raise RuntimeError(
                f"another thread has taken a private batch and not stepped it for {PATIENCE:g} s. A public seed that is set now would "
                "decide its dropout masks. Call step() there, or detach() that engine, or train in processes instead of threads"
            )
        with untouched():
            yield


def _number(key: bytes) -> int:
    return int.from_bytes(hashlib.shake_256(b"device\0" + key).digest(8), "little") >> 1


def public_streams(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's own generators, as the user left them. Not secret: masks are drawn elsewhere, see ``ForwardRng``."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_public_streams(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"].cpu())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)
    elif device.type == "mps" and "mps" in states:
        torch.mps.set_rng_state(states["mps"].cpu())
