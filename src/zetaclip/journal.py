"""The write-ahead journal: steps that were executed after the last checkpoint.

A checkpoint holds the ledger as it was when it was saved. Whatever the run released after that is
released, also when the process dies and the next one starts from the checkpoint again. So each step
writes its rows here *before* it draws its noise; at worst a step is counted that never happened.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from zetaclip.errors import LedgerError
from zetaclip.ledger import Key, Ledger, Row, replace_file

# Closes a line that a killed writer left unfinished, so that the next row isn't glued to it.
_SEAL = "(the line above was never finished)"


class Journal:
    """The file ``<checkpoint>.journal``, beside a checkpoint.

    **Guarantee.** When ``append`` has returned, the rows survive the end of the process by any signal. All
    rows of a call go out in one write to a descriptor opened for appending, so several processes that
    train from one checkpoint don't write into each other's lines. Readers see each (stream, batch, query)
    once, however often it was replayed.

    **Edge cases.** The file is not synced to the disk at every step, which would cost more than the step:
    it doesn't survive a power cut or a crash of the operating system. A full disk raises, before the noise
    is drawn. No file is an empty journal.
    """

    _descriptor: int | None = None

    def __init__(self, checkpoint: str | os.PathLike[str]) -> None:
        self.path = Path(os.fspath(checkpoint) + ".journal")

    def append(self, rows: Iterable[Row]) -> None:
        """Writes the rows of a step that is about to be executed."""
        text = "".join(row.to_json() + "\n" for row in rows)
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
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().decode(errors="replace").split("\n")
        while lines and not lines[-1]:
            lines.pop()
        found: dict[Key, Row] = {}
        for number, line in enumerate(lines, start=1):
            if line in ("", _SEAL):
                continue
            try:
                row = Row.from_json(line)
            except LedgerError as error:
                unfinished = number == len(lines) or lines[number] == _SEAL
                if unfinished:
                    continue
                raise LedgerError(f"{self.path.name}, line {number}: {error}") from None
            if found.setdefault(row.key, row) != row:
                raise LedgerError(f"{self.path.name}, line {number}: {row.key} was released with other numbers")
        return list(found.values())

    def reset(self, saved: Ledger | None = None) -> None:
        """Forgets, in one atomic step, what the checkpoint just saved knows.

        Call it after the checkpoint is in place: between the two a row may stand in both, never in neither.

        **Guarantee.** With ``saved``, the ledger of that checkpoint, only rows that it holds are dropped. The
        others stay: steps that a run executed before it was cut off and that its exact replay has not reached
        yet, and steps of another process that trains from the same checkpoint.

        **Edge cases.** Without ``saved`` everything goes; that is right only for a checkpoint that starts a
        new history. A row that another process writes during the call can be lost.
        """
        kept = executed_after(self.read(), saved, stream="", replay=False) if saved is not None else []
        with replace_file(self.path) as file:
            file.write("".join(row.to_json() + "\n" for row in kept).encode())
        self.close()

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


def executed_after(rows: Iterable[Row], ledger: Ledger | Iterable[Row], stream: str, replay: bool) -> list[Row]:
    """Which journal rows must join the checkpoint's ledger when it is loaded.

    ``stream`` names the key lineage that the checkpoint was saved from.

    **Guarantee.** Without ``replay`` the run takes fresh keys, so every row that the ledger doesn't hold was
    a release of its own and is returned. With ``replay`` the run continues ``stream`` and will make the same
    releases again, bit for bit, which tells an observer nothing new: rows of that stream are left out
    because the replay appends them itself. Rows of other streams are returned in both cases.
    """
    present = ledger.keys() if isinstance(ledger, Ledger) else {row.key for row in ledger}
    return [row for row in rows if row.key not in present and not (replay and row.stream == stream)]
