"""The write-ahead journal: steps that were executed after a checkpoint.

A checkpoint holds the ledger as it was when it was saved. Whatever the run released after that is
released, also when the process dies and the next one starts from the checkpoint again. So each step
writes its rows here *before* it draws its noise; at worst a step is counted that never happened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from filelock import lock_descriptor, unlock_descriptor

from ..errors import LedgerError
from ._ledger import Key, Ledger, Row

# Closes a line that a killed writer left unfinished, so that the next row isn't glued to it.
_SEAL = "(the line above was never finished)"


_CONFIRMED = '{"released"'
_ADOPTED = '{"adopted"'
_WHOLE = '{"journal": "whole"'
_PART = '{"journal": "part"'


def _whole(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


class Journal:
    """The file ``<name>.journal`` in a folder that holds checkpoints of a run; it only ever grows.

    One journal serves all checkpoints of a run in that folder: each knows which rows it holds itself, and
    whatever else stands here was executed after it. A run that saves into several folders has a journal in each. The first of
    them is its home: every process that goes on from any of its checkpoints writes there, so that is the one to ask.

    **Guarantee.** When ``append`` has returned, the rows survive the end of the process by any signal. All
    rows of a call go out in one write to a descriptor opened for appending, so several processes that
    train from one checkpoint don't write into each other's lines. Readers see each (stream, batch, query)
    once, however often it was replayed.

    **Edge cases.** The file is not synced to the disk at every step, which would cost more than the step:
    it doesn't survive a power cut or a crash of the operating system. A full disk raises, before the noise
    is drawn. No file is an empty journal. A copy of the file is known by its inode, which the first line names; a disk that was set
    back to an earlier state, or a copy that got the old number, is not.
    """

    _descriptor: int | None = None

    def __init__(self, name: str | os.PathLike[str]) -> None:
        self.path = Path(os.fspath(name) + ".journal")
        self._known: dict[
            Key, str
        ] = {}  # fingerprints of releases, as far as the file has been read
        self._read_to = 0

    def begin(self, whole: bool) -> None:
        """Starts the file, if there is none. ``whole`` says that nothing was executed that it should hold and doesn't."""
        if not self.path.exists():
            # Not the number of the device: that changes when a disk is mounted again.
            inode = os.fstat(self._open()).st_ino
            self._write(
                json.dumps({"journal": "whole" if whole else "part", "inode": inode}) + "\n"
            )

    @property
    def whole(self) -> bool:
        """Whether every step since the run's first checkpoint is here."""
        return self.path.exists() and self.path.read_bytes()[: len(_WHOLE)] == _WHOLE.encode()

    def covers(self, stream: str) -> bool:
        """Whether nothing was drawn from ``stream`` before this journal was there to note it."""
        return self.whole or bool(self._adopted(stream))

    def at_home(self, stream: str) -> bool:
        """Whether this is the file in which everything that was drawn from ``stream`` is noted, and not a copy of it.

        What the run does where it was copied from does not get here, so a copy can't tell what was released.
        """
        begun: list[int] = []
        for number, line in self._lines():
            if number == 1 and line.startswith((_WHOLE, _PART)):
                begun = [inode for key, inode in json.loads(line).items() if key == "inode"]
        places = self._adopted(stream) or begun
        return (
            not places or os.stat(self.path).st_ino in places
        )  # none: begun before journals knew their place

    def adopt(self, stream: str) -> None:
        """Makes a copy, or a journal that is not whole, the home of a stream that nobody has drawn from yet.

        The streams that came with it stay strangers.
        """
        if self.path.exists() and not (self.covers(stream) and self.at_home(stream)):
            self._write(
                json.dumps({"adopted": stream, "inode": os.fstat(self._open()).st_ino}) + "\n"
            )

    def _adopted(self, stream: str) -> list[int]:
        """The inodes of the files that were made the home of ``stream``."""
        lines = [json.loads(line) for _, line in self._lines() if line.startswith(_ADOPTED)]
        return [line["inode"] for line in lines if line["adopted"] == stream]

    def append(self, rows: Iterable[Row]) -> None:
        """Writes the rows of a step that is about to be executed."""
        self._write("".join(row.to_json() + "\n" for row in rows))

    def confirm(self, key: Key, fingerprint: str) -> bool:
        """Notes what came out of a release that was appended before; false if something else came out of it earlier.

        Looks at what other processes have written meanwhile, under a lock: two runs that replay one checkpoint at the
        same time can't both let something out under one draw of noise.
        """
        descriptor = self._open()
        lock_descriptor(descriptor)
        try:
            size = os.fstat(descriptor).st_size
            for line in (
                os.pread(descriptor, size - self._read_to, self._read_to)
                .decode(errors="replace")
                .split("\n")
            ):
                if line.startswith(_CONFIRMED) and _whole(line):
                    values = json.loads(line)
                    stream, batch, query = values["released"]
                    self._known[stream, batch, query] = values["fingerprint"]
            if self._known.get(key, fingerprint) != fingerprint:
                return False
            if key not in self._known:
                self._write(json.dumps({"released": list(key), "fingerprint": fingerprint}) + "\n")
                self._known[key] = fingerprint
            self._read_to = os.fstat(descriptor).st_size
            return True
        finally:
            unlock_descriptor(descriptor)

    def _write(self, text: str) -> None:
        if not text:
            return
        descriptor = self._open()
        if os.lseek(descriptor, 0, os.SEEK_END) and not self._ends_a_line(descriptor):
            text = f"\n{_SEAL}\n{text}"
        data = text.encode()
        written = os.write(descriptor, data)
        if written != len(data):
            raise OSError(f"{self.path.name}: only {written} of {len(data)} bytes could be written")

    def read(self) -> list[Row]:
        """The rows in the file, each release once, in the order of their first appearance.

        **Guarantee.** Every step whose noise was drawn is in the result, or a ``LedgerError`` is raised.

        **Edge cases.** A line that can't be read is passed over only if it is the last one, or was the last
        one when a later writer came and said so: then its write never ended, and neither did the step get to
        draw its noise. Anywhere else it is damage, and an error. Two rows for one release that disagree are
        an error as well: it would mean that one draw of noise covered two different sums.
        """
        found: dict[Key, Row] = {}
        for number, line in self._lines():
            if line.startswith((_CONFIRMED, _ADOPTED, _WHOLE, _PART)):
                continue
            try:
                row = Row.from_json(line)
            except LedgerError as error:
                raise LedgerError(f"{self.path.name}, line {number}: {error}") from None
            if found.setdefault(row.key, row) != row:
                raise LedgerError(
                    f"{self.path.name}, line {number}: {row.key} was released with other numbers"
                )
        return list(found.values())

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Every line whose write ended, with its number."""
        if not self.path.exists():
            return
        lines = self.path.read_bytes().decode(errors="replace").split("\n")
        while lines and not lines[-1]:
            lines.pop()
        for number, line in enumerate(lines, start=1):
            if line in ("", _SEAL):
                continue
            last = number == len(lines) or lines[number] == _SEAL
            if last and not _whole(line):
                continue
            yield number, line

    def close(self) -> None:
        """Gives back the file descriptor; a later ``append`` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.close()

    @staticmethod
    def _ends_a_line(descriptor: int) -> bool:
        os.lseek(descriptor, -1, os.SEEK_END)  # writes go to the end wherever this points
        return os.read(descriptor, 1) == b"\n"

    def _open(self) -> int:
        if self._descriptor is not None:
            try:
                if os.path.samestat(os.fstat(self._descriptor), os.stat(self.path)):
                    return self._descriptor
            except FileNotFoundError:
                pass
            # Somebody replaced or removed the file: what goes into the old descriptor nobody would read.
            self.close()
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(self.path, flags, 0o666)
        return self._descriptor


def read_all(journals: Iterable[Journal]) -> list[Row]:
    """The rows in several journals of one run, each release once. As ``Journal.read``, also where they disagree."""
    found: dict[Key, Row] = {}
    for journal in journals:
        for row in journal.read():
            if found.setdefault(row.key, row) != row:
                raise LedgerError(
                    f"{journal.path}: {row.key} was released with other numbers by another journal"
                )
    return list(found.values())


def executed_after(rows: Iterable[Row], ledger: Ledger) -> list[Row]:
    """The rows that a checkpoint's ledger doesn't hold: they were executed after it, and count when it is loaded.

    **Guarantee.** Also for an exact replay, which makes the same releases again: an observer learns nothing new
    from those, so they count once, but they do count, even if the replay ends before it reaches them.
    """
    present = ledger.keys()
    return [row for row in rows if row.key not in present]
