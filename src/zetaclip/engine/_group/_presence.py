"""Who of the processes that train together is alive, and what each of them waits for.

gloo notices at once that a connection is gone, but names a port. So every rank tells the store of
the process group twice a second that it is there. Whoever waits for longer than a moment looks
around: a rank that has fallen silent, has ended, or waits for something else is named.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from ...errors import RankError

BEAT = 0.5  # seconds between two signs of life
POLL = 1.0  # seconds of waiting after which a rank looks around, again and again
GONE = 5.0  # silent for so long after a connection broke: that rank is the one that broke it
SILENT = 60.0  # silent for so long with no broken connection: stopped, or its machine is gone
# Not here yet after so long, which is gloo's own limit: one that still loads its data gives no sign
# of life.
START = 1800.0
_STABLE = 3  # looks in a row that must see two ranks wait for different things


class Presence:
    """This process's sign of life, and its view of the others.

    **Guarantee.** While a rank waits for the others, the end of one of them becomes a ``RankError``
    that names it: within about ``GONE`` seconds where its connection broke (it was killed, or
    ended), within about ``SILENT`` seconds where it only fell silent. A rank that is slow and alive
    is waited for; one that has not reached its first run yet, for ``START`` seconds.
    **Edge cases.** A store that is gone took the rank or launcher that held it along; the message
    says which.
    """

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.world = dist.group.WORLD
        default = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore("zetaclip", default)
        # Small messages lie in ordinary memory; a group of graphics cards alone needs a second one
        # for them.
        self.messages = None if _sends_from_memory() else dist.new_group(backend="gloo")
        self.runs = 0  # how many runs this group has seen; every rank counts alike
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._different = 0
        self._end = threading.Event()
        self._process = os.getpid()
        self.store.set(
            f"ended/{self.rank}", ""
        )  # a group before this one may have had the same store
        self.store.set(f"who/{self.rank}", f"process {os.getpid()} on {socket.gethostname()}")
        self._beat(0)
        self._thread = threading.Thread(target=self._beats, name="zetaclip-presence", daemon=True)
        self._thread.start()
        self._stuck = False  # whether a collective was given up that gloo still waits for
        atexit.register(self._at_exit)

    # -- signs of life

    def _beat(self, number: int) -> None:
        self.store.set(f"beat/{self.rank}", str(number))

    def _beats(self) -> None:
        number = 0
        while not self._end.wait(BEAT):
            number += 1
            try:
                self._beat(number)
            except Exception:  # the store is gone, and whoever waits will find that out
                return

    def leave(self) -> None:
        """The process ends, or the group does: ranks that still wait for it are told."""
        if not self._end.is_set():
            self._end.set()
            self._thread.join(5.0)
            with suppress(Exception):  # the others may be gone already, and the store with them
                self.store.set(f"ended/{self.rank}", "yes")

    def _at_exit(self) -> None:
        if os.getpid() != self._process:  # a copy of the process that the user has forked off
            return
        self.leave()
        if self._stuck:
            # gloo can't be told to give up, and would hold the process for its own half hour. The
            # error was raised long ago.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    # -- waiting

    def wait(self, works: list[Any], what: str, serial: int, on_card: bool = False) -> None:
        """Until the collectives are done; ``what`` says to people what they are for."""
        started = time.monotonic()
        try:
            for work in works:
                while not self._done(work, what, on_card):
                    self._look(what, serial)
        except RankError:
            self._stuck = True
            raise
        self._waited(started)

    def _done(self, work: Any, what: str, on_card: bool) -> bool:
        """Whether a collective has come to its end within ``POLL`` seconds."""
        end = time.monotonic() + POLL
        if on_card:  # nccl's wait would give the group up after that time
            while not work.is_completed():
                if time.monotonic() > end:
                    return False
                time.sleep(0.0005)
        else:
            try:
                work.wait(timedelta(seconds=POLL))
                return True
            except RuntimeError:
                if not work.is_completed():
                    return False
        try:
            work.wait()
        except RuntimeError as error:
            self._broken(what, error)
        return True

    def _waited(self, started: float) -> None:
        self._different = 0
        if time.monotonic() - started > POLL:
            try:
                self.store.set(f"at/{self.rank}", "")
            except Exception as error:
                self._broken("the store", error)

    def _look(self, what: str, serial: int) -> None:
        """After a moment of waiting: has a rank ended, or does it wait for something else?"""
        try:
            self.store.set(f"at/{self.rank}", f"{serial}\n{what}")
            ended, silent = self._watch()
            places = {rank: self.read(f"at/{rank}") for rank in self._others()}
            begun = {rank: bool(self.read(f"who/{rank}")) for rank in self._others()}
        except RankError:
            raise
        except Exception as error:
            self._broken(what, error)
        if ended:
            self._lose(ended, what, "has ended")
        gone = [rank for rank, seconds in silent.items() if seconds > SILENT and begun[rank]]
        if gone:
            self._lose(gone, what, f"has been silent for {SILENT:.0f} s")
        absent = [rank for rank, seconds in silent.items() if seconds > START and not begun[rank]]
        if absent:
            self._lose(absent, what, f"has not come for {START / 60:.0f} min")
        own = f"{serial}\n{what}"
        others = {
            rank: place.split("\n", 1)[1]
            for rank, place in places.items()
            if place and place != own
        }
        # One that waits for nothing is only slow, and what it has yet to send may be what the
        # others wait for in turn.
        self._different = self._different + 1 if others and all(places.values()) else 0
        if self._different >= _STABLE:
            rank, place = next(iter(others.items()))
            raise RankError(
                f"rank {self.rank} waits in {what}, and rank {rank} in {place}: every rank must "
                "run the same loop, with the same calls of step(), save() and load() in the same "
                "order"
            )

    def _others(self) -> list[int]:
        return [rank for rank in range(self.count) if rank != self.rank]

    def read(self, key: str) -> str:
        """What was left in the store under a key; empty if nothing was. Never waits."""
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _watch(self) -> tuple[list[int], dict[int, float]]:
        """Which ranks have ended, and for how many seconds each other rank was silent.

        Silence is counted from when this rank began to watch.
        """
        found = self.read("lost")
        if found:
            raise RankError(found, told=True)
        ended = [rank for rank in self._others() if self.read(f"ended/{rank}")]
        now = time.monotonic()
        for rank in self._others():
            beat = self.read(f"beat/{rank}").encode()
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = (beat, now)
        return ended, {rank: now - since for rank, (_, since) in self._seen.items()}

    # -- verdicts

    def _broken(self, what: str, error: Exception) -> NoReturn:
        """A connection broke: finds the rank at its other end, and raises."""
        self._seen.clear()  # silence counts from now on
        started = time.monotonic()
        while time.monotonic() - started < 2 * GONE:
            try:
                ended, silent = self._watch()
            except RankError:
                raise
            except Exception as problem:
                self._store_is_gone(what, problem)
            if ended:
                self._lose(ended, what, "has ended")
            gone = [rank for rank, seconds in silent.items() if seconds > GONE]
            if gone:
                self._lose(gone, what, "was killed, or its machine is gone")
            time.sleep(BEAT / 2)
        raise RankError(
            f"a connection between the ranks broke during {what}, though all of them are alive: "
            f"{error}"
        )

    def _lose(self, ranks: list[int], what: str, how: str) -> NoReturn:
        names = ", ".join(
            f"rank {rank} ({self.read(f'who/{rank}') or 'never started'})" for rank in ranks
        )
        text = (
            f"{names} {how}: lost during {what}. Nothing of an unfinished batch was "
            "released; what was executed is in the ledger"
        )
        # The first to find out tells the others, who would otherwise name each other as they stop.
        raise RankError(self.store.compare_set("lost", "", text).decode() or text)

    def _store_is_gone(self, what: str, problem: Exception) -> NoReturn:
        launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        who = "the launcher" if launcher or self.rank == 0 else "rank 0"
        raise RankError(
            f"{who}, which holds the ranks' store, is gone: lost during {what} ({problem})"
        ) from None


def _sends_from_memory() -> bool:
    return "cpu:gloo" in str(dist.get_backend_config()) or dist.get_backend() == "gloo"


_CURRENT: Presence | None = None


def current() -> Presence:
    """The presence of this process in its default group; made with the first run in it."""
    global _CURRENT
    if _CURRENT is None or _CURRENT.world is not dist.group.WORLD:
        if _CURRENT is not None:
            _CURRENT.leave()
        _CURRENT = Presence()
    return _CURRENT
