"""The journal: what a killed process leaves behind must count, once."""

from __future__ import annotations

import os
import signal
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from zetaclip.errors import LedgerError
from zetaclip.ledger import Header, Ledger, Row
from zetaclip.ledger._journal import Journal, executed_after


def row(batch: int, stream: str = "a", query: str = "gradient") -> Row:
    return Row(batch, batch, query, 1.0, 1.1, 1.1, 0.01, stream, 1.0, 0.0)


def ledger_of(*rows: Row) -> Ledger:
    ledger = Ledger(Header(1000, "declared", 10.0, "prv", "DP-SGD"))
    for each in rows:
        ledger.append(each)
    return ledger


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "run.pt")


def test_no_file_is_an_empty_journal(journal: Journal, tmp_path: Path) -> None:
    assert journal.read() == []
    journal.append([])
    assert list(tmp_path.iterdir()) == []


def test_rows_come_back_in_order(journal: Journal, tmp_path: Path) -> None:
    rows = [
        row(0),
        row(0, query="norms"),
        row(1),
        replace(row(2), noise_multiplier=1 / 3, noise_std=1 / 3),
    ]
    journal.append(rows[:2])
    journal.append(rows[2:])
    assert journal.path == tmp_path / "run.pt.journal"
    assert journal.read() == rows
    assert Journal(tmp_path / "run.pt").read() == rows


def test_a_step_is_one_write(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: (writes.append(data), real(fd, data))[1])
    journal.append([row(0), row(0, query="norms")])
    assert len(writes) == 1 and writes[0].count(b"\n") == 2


def test_a_write_lands_behind_what_came_between(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, real = Journal(tmp_path / "run.pt"), os.write

    def interrupted(descriptor: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", real)
        other.append([row(0, "b")])
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", interrupted)
    journal.append([row(0)])
    assert journal.read() == [row(0, "b"), row(0)]


def test_a_replayed_step_counts_once(journal: Journal) -> None:
    for batch in (0, 1, 2, 1, 2, 3):
        journal.append([row(batch)])
    assert [each.batch for each in journal.read()] == [0, 1, 2, 3]


def test_one_draw_for_two_releases_is_an_error(journal: Journal) -> None:
    journal.append([row(0)])
    journal.append([replace(row(0), sensitivity=2.0, clip=2.0, noise_std=2.2)])
    with pytest.raises(LedgerError, match="other numbers"):
        journal.read()


def cut(journal: Journal, bytes_left_of_last_line: int) -> None:
    data = journal.path.read_bytes()
    start = data[:-1].rfind(b"\n") + 1
    journal.path.write_bytes(data[: start + bytes_left_of_last_line])


@pytest.mark.parametrize("left", [1, 30, 100])
def test_a_torn_last_line_is_no_step(journal: Journal, left: int) -> None:
    journal.append([row(0)])
    journal.append([row(1)])
    cut(journal, left)
    assert journal.read() == [row(0)]


def test_a_line_that_lacks_only_its_end_counts(journal: Journal) -> None:
    journal.append([row(0)])
    journal.append([row(1)])
    journal.path.write_bytes(journal.path.read_bytes()[:-1])
    assert journal.read() == [row(0), row(1)]


@pytest.mark.parametrize("left", [1, 60])
def test_writing_goes_on_after_a_torn_line(journal: Journal, left: int) -> None:
    journal.append([row(0)])
    journal.append([row(1)])
    cut(journal, left)
    journal.append([row(2)])
    journal.append([row(3)])
    assert journal.read() == [row(0), row(2), row(3)]


def test_writing_goes_on_after_a_line_without_its_end(journal: Journal) -> None:
    journal.append([row(0)])
    journal.path.write_bytes(journal.path.read_bytes()[:-1])
    journal.append([row(1)])
    assert journal.read() == [row(0), row(1)]


def test_damage_in_the_middle_is_not_passed_over(journal: Journal) -> None:
    journal.append([row(0)])
    journal.append([row(1)])
    journal.append([row(2)])
    lines = journal.path.read_text().splitlines(keepends=True)
    journal.path.write_text(lines[0] + lines[1][:50] + "\n" + lines[2])
    with pytest.raises(LedgerError, match="line 2"):
        journal.read()


def test_a_short_write_raises_and_is_healed(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.append([row(0)])
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[:25]))
        with pytest.raises(OSError, match="25 of"):
            journal.append([row(1)])
    journal.append([row(2)])
    assert journal.read() == [row(0), row(2)]


def test_a_writer_notices_that_the_file_was_replaced(journal: Journal, tmp_path: Path) -> None:
    other = Journal(tmp_path / "run.pt")
    other.append([row(0, "b")])
    journal.append([row(0)])
    journal.path.rename(tmp_path / "moved")
    other.append([row(2, "b")])  # its descriptor is of the file that was moved away
    assert journal.read() == [row(2, "b")]


def test_what_must_join_the_ledger() -> None:
    ledger = ledger_of(row(0), row(1))
    written = [row(1), row(2), row(3), row(0, "b"), row(2, query="norms")]
    assert executed_after(written, ledger) == [row(2), row(3), row(0, "b"), row(2, query="norms")]


def start_writer(checkpoint: Path, stream: str, count: int, *, killed: bool) -> int:
    """A process that journals ``count`` steps of two queries and then ends, or is killed."""
    with warnings.catch_warnings():
        # Newer Pythons mention threads, of which torch has some; the child only writes a file.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    try:
        journal = Journal(checkpoint)
        for batch in range(count):
            journal.append([row(batch, stream), row(batch, stream, "norms")])
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_killed_and_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run.pt"
    children = [start_writer(checkpoint, stream, 400, killed=stream == "a") for stream in "abc"]
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ends == [-signal.SIGKILL, 0, 0]
    rows = Journal(checkpoint).read()
    assert len(rows) == 3 * 2 * 400
    assert ledger_of(*rows).steps == 1200
