"""What was released, and what a replay has yet to release again."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from ..control import Released
from ..ledger import Key, Ledger, Row
from ..ledger._journal import Journal
from ..mechanism import Draw, Receipt
from ._order import OrderError


class ReleaseLog:
    """The ledger of a run and its journals.

    **Guarantee.** Write-ahead: ``write`` gives a receipt only when the rows are in every journal
    and in the ledger, and without the receipt no noise is drawn. In a replay, a row or a gradient
    that differs from what was released before is an error, and nothing leaves.
    """

    def __init__(self, ledger: Ledger, name: str | None = None) -> None:
        self.ledger = ledger
        # Of the run and of its journal; it survives new keys.
        self.name = f"zetaclip-{secrets.token_hex(8)}" if name is None else name
        self.journals: list[Journal] = []  # one per folder that holds a checkpoint of this run
        self.home: Journal | None = None  # gets every release, wherever the run continues
        self.expected: dict[Key, Row] = {}  # what an exact replay has yet to release again

    def write(self, rows: tuple[Row, ...]) -> Receipt:
        """Writes the rows of a release before it is made: journals first, then the ledger."""
        for row in rows if self.expected else ():
            if self.expected.get(row.key, row) != row:
                raise OrderError(
                    f"the replay of step {row.step} is not exact: {row} instead of "
                    f"{self.expected[row.key]}"
                )
        for journal in self.journals:
            journal.append(rows)
        for row in rows:
            if not self.expected or self.expected.pop(row.key, None) is None:
                self.ledger.append(row)
        return Receipt(rows)

    def confirm(self, draw: Draw, released: Released, mark: str | None = None) -> None:
        """Notes a release for a later replay; in a replay, it must be the same as before.

        Only the home journal is asked. Other journals may lack releases of runs that continue
        elsewhere.

        Args:
            draw: the numbers of the batch.
            released: what was released, or this rank's part of it.
            mark: the fingerprints of all parts, where the ranks have one each.
        """
        if self.home is None:
            return
        mark = fingerprint(released) if mark is None else mark
        if not self.home.confirm((draw.stream, draw.batch, draw.query), mark):
            raise OrderError(
                f"the replay of step {released.step} gives another gradient than the run that it "
                "replays: the loss, the learning rate or the loop has changed. Two sums with the "
                "same noise would reveal their difference, so nothing is released; "
                "engine.load(path) goes on with fresh noise"
            )

    def note(self, text: str) -> bool:
        """Adds a note to the ledger's header; False if it is there already."""
        header = self.ledger.header
        if text in header.notes:
            return False
        self.ledger.header = replace(header, notes=(*header.notes, text))
        return True

    def watch(self, folder: Path) -> None:
        """From now on every release is also written to a journal in this folder.

        Call it when a checkpoint was saved there. The journal in the first such folder is the run's
        home: every run that continues from one of its checkpoints writes there, too.
        """
        journal = self.journal_in(folder, self.name, whole=self.home is None)
        self.home = self.home or journal

    def journal_in(self, folder: Path, name: str, whole: bool = False) -> Journal:
        """The journal of the run ``name`` in a folder, begun if it is not there.

        From now on every release is written to it.
        """
        # Not as the user gave it: after a change of the working folder that would be another file.
        journal = Journal(Path(os.path.realpath(folder)) / name)
        for other in self.journals:
            if other.path == journal.path:
                return other
        journal.begin(whole)
        self.journals.append(journal)
        return journal

    def home_from(self, folder: Path) -> str:
        """The folder of the home journal, as a path from a checkpoint's folder.

        The path is relative, so that a tree of folders can be moved as a whole. A run that was
        never saved gets its home in that folder: call ``watch`` when the checkpoint is written.
        """
        here = os.path.realpath(folder)
        return os.path.relpath(here if self.home is None else self.home.path.parent, here)

    def go_on_as(self, name: str, home: Journal | None, expected: Iterable[Row]) -> None:
        """Makes this the log of a run that was loaded: its name, its home, what it has to replay.

        Name and home change together, because only the home of a stream knows what it has released.
        """
        self.name, self.home = name, home
        self.expected = {row.key: row for row in expected}


def fingerprint(released: Released) -> str:
    """A few numbers of a release, by which a replay is told from another run."""
    gradient = released.gradient
    numbers = [
        torch.linalg.vector_norm(gradient, dtype=torch.float64),
        gradient.sum(dtype=torch.float64),
    ]
    numbers += [value.sum() for value in released.extras.values()]
    return " ".join(float(number).hex() for number in numbers)
