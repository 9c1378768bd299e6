"""The ledger: everything that was released, in the order of release.

Every release is one row. Privacy is computed from these rows only, so a reviewer of a run reads the
ledger. A run of a million steps has a million rows; each takes 72 bytes of memory.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import LedgerError
from ..files import replace_file
from ..words import counted
from ._rows import FIELDS, LINE, Event, Header, Key, Row

_FORMAT = 2
_WITHOUT_GRID = 1  # an older format, whose rows have no clip and no grid
_NO_DIGEST = "0" * 64
# The multiplier is computed as std / sensitivity. If the clipping norm changes, the last bits of
# the quotient change. Rounding to twelve digits makes such steps equal again; no accountant is
# exact to more than seven.
_DIGITS = 12


# A row in memory. Names of queries and streams are stored once; rows contain their positions.
_RECORD = struct.Struct("<qqiddddidd")
_DTYPE = np.dtype(
    {"names": list(FIELDS), "formats": ["<i8", "<i8", "<i4", *["<f8"] * 4, "<i4", "<f8", "<f8"]}
)


class Ledger:
    """The header and the rows of a run.

    Args:
        header: Facts about the whole run.

    **Guarantee.** ``events()`` counts every row exactly once. Rows of one (stream, batch) used the
    same batch and compose as one Gaussian with multiplier (Σ s_k^-2)^(-1/2), in any order of
    arrival. Other rows are separate steps.

    **Edge cases.** One row without noise makes the cost of its whole batch infinite. A batch with
    different sampling rates, or with the same query twice, is a ``LedgerError``: immediately if its
    rows arrive together, otherwise from ``events()``.
    """

    def __init__(self, header: Header) -> None:
        self.header = header
        self._names: dict[str, int] = {}  # queries and streams -> their positions
        self._records = bytearray()
        self._open_batch, self._open_stream = -1, ""
        self._open_queries: set[str] = set()
        self._open_rate = 0.0
        self._last_batch: dict[str, int] = {}
        self._batches = 0
        self._scattered = False  # the rows of some batch may not be adjacent
        self._events: tuple[int, list[Event]] | None = None  # (number of rows, their events)

    def __repr__(self) -> str:
        return (
            f"Ledger({self.header.method}: {counted(self.steps, 'step')},"
            f" {counted(len(self), 'release')}, claim: {self.header.claim})"
        )

    def append(self, row: Row) -> None:
        """Adds one release, in about a microsecond.

        Raises:
            LedgerError: The row contradicts the rows of the same batch just before it.
        """
        query, stream, batch, names = row.query, row.stream, row.batch, self._names
        if batch != self._open_batch or stream != self._open_stream:
            if batch > self._last_batch.get(stream, -1):
                self._batches += 1
                self._last_batch[stream] = batch
            else:
                self._scattered = True
            self._open_batch, self._open_stream, self._open_rate = batch, stream, row.sample_rate
            self._open_queries = {query}
        elif query in self._open_queries:
            raise LedgerError(
                f"query {query!r} was already released from batch {batch} of {stream!r}"
            )
        elif row.sample_rate != self._open_rate:
            raise LedgerError(f"batch {batch} of {stream!r} has two sampling rates")
        else:
            self._open_queries.add(query)
        names.setdefault(query, len(names))
        names.setdefault(stream, len(names))
        numbers = (row.sensitivity, row.noise_multiplier, row.noise_std, row.sample_rate)
        self._records += _RECORD.pack(
            row.step, batch, names[query], *numbers, names[stream], row.clip, row.grid
        )

    def merge(self, rows: Iterable[Row]) -> int:
        """Adds the rows whose (stream, batch, query) is new; returns how many there were."""
        present = self.keys()
        added = 0
        for row in rows:
            if row.key not in present:
                present.add(row.key)
                self.append(row)
                added += 1
        return added

    def __len__(self) -> int:
        return len(self._records) // _RECORD.size

    def rows(self) -> Iterator[Row]:
        """Every row, in the order of arrival."""
        names = dict(enumerate(self._names))
        return (_row(record, names) for record in self._tuples())

    def keys(self) -> set[Key]:
        """Every row's (stream, batch, query)."""
        names = list(self._names)
        return {(names[record[7]], record[1], names[record[2]]) for record in self._tuples()}

    def _tuples(self) -> Iterator[tuple[Any, ...]]:
        # A copy: a bytearray cannot grow while it is iterated over.
        return _RECORD.iter_unpack(bytes(self._records))

    def _columns(self) -> dict[str, np.ndarray]:
        records = np.frombuffer(bytes(self._records), dtype=_DTYPE)
        return {name: records[name].copy() for name in FIELDS}

    @property
    def steps(self) -> int:
        """Number of batches with a release: the number of steps that privacy is computed for."""
        return sum(event.count for event in self.events()) if self._scattered else self._batches

    def events(self) -> list[Event]:
        """The input of the accountants: steps of equal sampling rate and effective multiplier.

        Returns:
            Events sorted by sampling rate and multiplier. Multipliers are rounded to 12 significant
            digits, which is far finer than the precision of any accountant.

        Raises:
            LedgerError: A batch has two sampling rates, or the same query twice.
        """
        if self._events is None or self._events[0] != len(self):
            self._events = (len(self), self._count_events())
        return list(self._events[1])

    def _count_events(self) -> list[Event]:
        if not len(self):
            return []
        columns = self._columns()
        stream, batch, query = columns["stream"], columns["batch"], columns["query"]
        rate, multiplier = columns["sample_rate"], columns["noise_multiplier"]
        ascending = (stream[1:] > stream[:-1]) | (stream[1:] == stream[:-1]) & (
            batch[1:] > batch[:-1]
        )
        if not np.all(ascending):
            # Batches are not in order or have several rows. Sorting by query as well makes the sums
            # below add equal batches in equal order, so that the results are bit-identical.
            order = np.lexsort((query, batch, stream))
            stream, batch, query = stream[order], batch[order], query[order]
            rate, multiplier = rate[order], multiplier[order]
        same = (stream[1:] == stream[:-1]) & (batch[1:] == batch[:-1])  # as the previous row
        if np.any(same & (query[1:] == query[:-1])):
            raise LedgerError("a batch has the same query twice")
        if np.any(same & (rate[1:] != rate[:-1])):
            raise LedgerError("a batch has rows with different sampling rates")
        starts = np.flatnonzero(np.concatenate(([True], ~same)))
        sizes = np.diff(np.append(starts, len(stream)))
        # Without noise, 1/0 is an infinite cost, and 1/inf is an effective multiplier of 0.
        with np.errstate(divide="ignore", over="ignore"):
            together = 1.0 / np.sqrt(np.add.reduceat(multiplier**-2.0, starts))
        effective = _round(np.where(sizes == 1, multiplier[starts], together))
        rates, rate_of = np.unique(rate[starts], return_inverse=True)
        noises, noise_of = np.unique(effective, return_inverse=True)
        pairs, counts = np.unique(rate_of * len(noises) + noise_of, return_counts=True)
        return [
            Event(float(rates[pair // len(noises)]), float(noises[pair % len(noises)]), int(count))
            for pair, count in zip(pairs, counts)
        ]

    def summary(self) -> str:
        """A few lines of text: header, notes, and kinds of step."""
        head = self.header
        events = self.events()
        lines = [
            f"{head.method}: {counted(self.steps, 'step')}, {counted(len(self), 'release')}, "
            f"accountant {head.accountant}",
            f"claim: {head.claim}; adjacency: {head.adjacency}",
            f"N = {head.num_examples} ({head.num_examples_source}), "
            f"L = {head.expected_batch_size:g}",
        ]
        if head.noise_seed_known:
            lines.append("the noise seed is known: anyone who has it can remove the noise")
        lines += [f"note: {note}" for note in head.notes]
        shown = events if len(events) <= 8 else events[:7]
        for event in shown:
            lines.append(
                f"  {event.count} x q = {event.sample_rate:.6g}, σ = {event.noise_multiplier:.6g}"
            )
        if len(shown) < len(events):
            lines.append(f"  ... and {len(events) - len(shown)} more kinds of step")
        return "\n".join(lines)

    def to_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Writes the header and then one line per row; an existing file is replaced atomically.

        The header line contains the number of rows and a digest of everything, so that a truncated
        or edited file is noticed. This protects against accidents, not against a person who
        recomputes the digest.
        """
        with replace_file(path) as file:
            opening = self._opening(_NO_DIGEST)
            digest = sha256(opening)
            file.write(opening)
            names = [json.dumps(name) for name in self._names]
            for step, batch, query, *numbers, stream, clip, grid in self._tuples():
                line = (
                    LINE % (step, batch, names[query], *numbers, names[stream], clip, grid)
                ).encode() + b"\n"
                digest.update(line)
                file.write(line)
            file.seek(0)
            file.write(self._opening(digest.hexdigest()))  # same length: only the digest differs

    def _opening(self, digest: str, version: int = _FORMAT) -> bytes:
        values = {"zetaclip_ledger": version, "rows": len(self), "sha256": digest}
        return json.dumps(values | {"header": asdict(self.header)}).encode() + b"\n"

    @classmethod
    def from_jsonl(cls, path: str | os.PathLike[str]) -> Ledger:
        """Reads a file that ``to_jsonl`` wrote.

        Raises:
            LedgerError: The file is not a ledger, or was truncated or edited.
        """
        name = Path(path).name
        with open(path, "rb") as file:
            try:
                opening = json.loads(file.readline())
                version, promised, digest = (
                    opening[key] for key in ("zetaclip_ledger", "rows", "sha256")
                )
                ledger = cls(Header.from_plain(opening["header"]))
            except (ValueError, TypeError, KeyError) as error:
                raise LedgerError(
                    f"{name} does not begin with a ledger's header: {error}"
                ) from None
            if version not in (_FORMAT, _WITHOUT_GRID):
                raise LedgerError(
                    f"{name} has ledger format {version!r}; this version reads {_FORMAT}"
                )
            lines = file.readlines()
        for number, line in enumerate(lines, start=2):
            try:
                ledger.append(Row.from_json(line.decode()))
            except ValueError as error:  # a LedgerError or a UnicodeDecodeError
                raise LedgerError(f"{name}, line {number}: {error}") from None
        if len(ledger) != promised:
            raise LedgerError(
                f"{name} should have {promised} rows and has {len(ledger)}: truncated or edited"
            )
        if sha256(b"".join([ledger._opening(_NO_DIGEST, version), *lines])).hexdigest() != digest:
            raise LedgerError(f"{name} was edited: its content does not match its digest")
        return ledger

    def state_dict(self) -> dict[str, Any]:
        """Plain values and one tensor per column, for ``torch.load(weights_only=True)``."""
        import torch  # here: a ledger is read and accounted without it

        return {
            "format": _FORMAT,
            "header": asdict(self.header),
            "names": list(self._names),
            "columns": {name: torch.from_numpy(column) for name, column in self._columns().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces header and rows by those of a ``state_dict``.

        Raises:
            LedgerError: It is not the state of a ledger; the ledger is then unchanged.
        """
        try:
            if state["format"] not in (_FORMAT, _WITHOUT_GRID):
                raise LedgerError(
                    f"ledger format {state['format']!r}; this version reads {_FORMAT}"
                )
            fresh = Ledger(Header.from_plain(state["header"]))
            names = dict(enumerate(state["names"]))  # unlike a list, a dict has no position -1
            found = dict(state["columns"])
            if state["format"] == _WITHOUT_GRID:
                found |= {
                    "clip": found["sensitivity"],
                    "grid": 0 * found["sensitivity"],
                }
            columns = [found[name].tolist() for name in FIELDS]
            if len({len(column) for column in columns}) != 1:
                raise LedgerError("the ledger's columns have different lengths")
            for record in zip(*columns):
                fresh.append(_row(record, names))
        except (KeyError, TypeError, AttributeError) as error:
            raise LedgerError(f"not the state of a ledger: {error!r}") from None
        self.__dict__.update(fresh.__dict__)


def _row(record: tuple[Any, ...], names: dict[int, str]) -> Row:
    step, batch, query, sensitivity, multiplier, std, rate, stream, clip, grid = record
    return Row(
        step, batch, names[query], sensitivity, multiplier, std, rate, names[stream], clip, grid
    )


def _round(values: np.ndarray) -> np.ndarray:
    """Rounds to ``_DIGITS`` significant digits, values below 1e-200 to 0; 1.1 stays 1.1."""
    exponent = np.floor(np.log10(np.maximum(values, 1e-200)))
    scale = 10.0 ** (_DIGITS - 1 - exponent)
    return np.where(values < 1e-200, 0.0, np.rint(values * scale) / scale)
