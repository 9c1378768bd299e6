"""The write-ahead journal: steps that were executed after a checkpoint.

A checkpoint contains the ledger at the time of saving. What the run released after that stays
released, even if the process dies and the next one starts from the checkpoint again. So each step
writes its rows here *before* it draws its noise. In the worst case a step is counted that never
happened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from filelock import lock_descriptor, unlock_descriptor

from ..errors import LedgerError
from ._ledger import Ledger
from ._rows import Key, Row

# Marks a line that a killed writer left unfinished, so that the next row starts on its own line.
_SEAL = "(the line above was never finished)"
# How lines that are not rows begin.
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
    """The file ``<name>.journal`` beside the checkpoints of a run. Lines are only ever added.

    All checkpoints of a run in one folder share one journal: each checkpoint contains some of the
    rows itself, and all others were executed after it. A run that saves into several folders has a
    journal in each. The first of them is the home journal: every process that continues from any of
    the run's checkpoints writes there, so it is the complete one.

    Args:
        name: Path of the checkpoints, without ``.journal``.

    **Guarantee.** After ``append`` has returned, the rows survive the death of the process. All
    rows of a call are written by one write to a descriptor opened for appending, so processes that
    train from the same checkpoint do not mix their lines. Readers get each (stream, batch, query)
    once, however often it was replayed.

    **Edge cases.** The file is not synced to the disk at every step, because that would cost more
    than the step. So it does not survive a power failure or a crash of the operating system. A full
    disk raises an error before the noise is drawn. A missing file is an empty journal. A copy of
    the file is recognized by its inode, which the first line contains. A disk that was restored to
    an earlier state, or a copy that got the old inode, is not recognized.
    """

    _descriptor: int | None = None

    def __init__(self, name: str | os.PathLike[str]) -> None:
        self.path = Path(os.fspath(name) + ".journal")
        # Fingerprints of releases, from the part of the file before ``_read_to``.
        self._known: dict[Key, str] = {}
        self._read_to = 0

    def begin(self, whole: bool) -> None:
        """Creates the file, if there is none.

        Args:
            whole: Whether nothing was executed before that the journal should contain.
        """
        if not self.path.exists():
            # Without the device number, which changes when a disk is mounted again.
            inode = os.fstat(self._open()).st_ino
            self._write(
                json.dumps({"journal": "whole" if whole else "part", "inode": inode}) + "\n"
            )

    @property
    def whole(self) -> bool:
        """Whether every step since the run's first checkpoint is in this journal."""
        return self.path.exists() and self.path.read_bytes()[: len(_WHOLE)] == _WHOLE.encode()

    def covers(self, stream: str) -> bool:
        """Whether the journal existed before the first draw from ``stream``."""
        return self.whole or bool(self._adopted(stream))

    def at_home(self, stream: str) -> bool:
        """Whether this is the original file that records every draw from ``stream``, not a copy.

        The run may continue beside the original. A copy misses these releases.
        """
        begun: list[int] = []
        for number, line in self._lines():
            if number == 1 and line.startswith((_WHOLE, _PART)):
                begun = [inode for key, inode in json.loads(line).items() if key == "inode"]
        places = self._adopted(stream) or begun
        # No inode: the journal is from a version that did not write one.
        return not places or os.stat(self.path).st_ino in places

    def adopt(self, stream: str) -> None:
        """Makes this file the home journal of ``stream``, from which nothing has been drawn yet.

        This is for a copy, or a journal that is not whole. It does not become the home journal of
        the streams that it already contains.
        """
        if self.path.exists() and not (self.covers(stream) and self.at_home(stream)):
            self._write(
                json.dumps({"adopted": stream, "inode": os.fstat(self._open()).st_ino}) + "\n"
            )

    def _adopted(self, stream: str) -> list[int]:
        """The inodes of the files that were made the home journal of ``stream``."""
        lines = [json.loads(line) for _, line in self._lines() if line.startswith(_ADOPTED)]
        return [line["inode"] for line in lines if line["adopted"] == stream]

    def append(self, rows: Iterable[Row]) -> None:
        """Writes the rows of a step that is about to be executed."""
        self._write("".join(row.to_json() + "\n" for row in rows))

    def confirm(self, key: Key, fingerprint: str) -> bool:
        """Records the result of a release whose row was appended before.

        It reads what other processes have written meanwhile, under a lock: two runs that replay one
        checkpoint at the same time cannot publish two results with the same draw of noise.

        Args:
            key: The release.
            fingerprint: Of its result.

        Returns:
            False if another result was recorded earlier; it must then not be released.
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

        Raises:
            LedgerError: The file is damaged, or has two different rows for one release: one draw of
                noise would have covered two different sums.

        **Guarantee.** Every step whose noise was drawn is in the result, or an error is raised.

        **Edge cases.** An unreadable line is skipped only if it is the last one, or if a later
        writer marked it as unfinished. Its write never ended, so the step did not draw its noise.
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
        """Every completely written line, with its number."""
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
        """Closes the file descriptor; a later ``append`` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.close()

    @staticmethod
    def _ends_a_line(descriptor: int) -> bool:
        os.lseek(descriptor, -1, os.SEEK_END)  # does not change where an appending write goes
        return os.read(descriptor, 1) == b"\n"

    def _open(self) -> int:
        if self._descriptor is not None:
            try:
                if os.path.samestat(os.fstat(self._descriptor), os.stat(self.path)):
                    return self._descriptor
            except FileNotFoundError:
                pass
            # The file was replaced or removed: nobody would read what the old descriptor writes.
            self.close()
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        self._descriptor = os.open(self.path, flags, 0o666)
        return self._descriptor


def read_all(journals: Iterable[Journal]) -> list[Row]:
    """The rows in several journals of one run, each release once.

    Raises:
        LedgerError: A journal is damaged, or two journals have different rows for one release.
    """
    found: dict[Key, Row] = {}
    for journal in journals:
        for row in journal.read():
            if found.setdefault(row.key, row) != row:
                raise LedgerError(
                    f"{journal.path}: {row.key} was released with other numbers by another journal"
                )
    return list(found.values())


def executed_after(rows: Iterable[Row], ledger: Ledger) -> list[Row]:
    """The rows that are not in a checkpoint's ledger: they were executed after it.

    They count when the checkpoint is loaded.

    **Guarantee.** This includes an exact replay, which makes the same releases again. An observer
    learns nothing new from the second time, so they count once, but they do count, even if the
    replay ends before it reaches them.
    """
    present = ledger.keys()
    return [row for row in rows if row.key not in present]
