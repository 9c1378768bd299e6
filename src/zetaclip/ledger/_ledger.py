"""The ledger: everything that left the data, in the order in which it left.

Every release is one row. Privacy is accounted from these rows and from nothing else, so the ledger is
what a reviewer reads. A run of a million steps is a million rows; in memory each takes 72 bytes.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ..errors import LedgerError
from ..files import replace_file
from ..grid import on_grid, widened

Key = tuple[str, int, str]
"""What makes a release unique: (stream, batch, query)."""

_FORMAT = 2
_WITHOUT_GRID = 1  # an older format, whose rows name no clip and no grid
_NO_DIGEST = "0" * 64
# Relative slack between a row's noise std and multiplier * sensitivity: room for float32, not for a mistake.
_SLACK = 1e-6
# The multiplier is drawn as std / sensitivity, and with a moving clipping norm that quotient moves in its
# last bits. Twelve digits make such steps equal again; no accountant is exact to more than seven.
_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Row:
    """One release: a sum over one batch to which Gaussian noise was added.

    ``batch`` counts the batches of one ``stream``, the public name of the key lineage that drew the noise.
    A run that takes fresh keys takes a new stream name, so its batch 7 is not the old batch 7.

    ``clip`` is what the clip rule bounds one record's length by. ``sensitivity`` has 2^-9 of it more, for rounding
    and arithmetic. What was released is a whole number of ``grid``, a power of two, over the declared batch size.

    **Guarantee.** A row that exists is consistent: ``noise_std = noise_multiplier * sensitivity``,
    ``sensitivity = clip * (1 + 2^-9)``, the grid is fine enough for both, and every number is finite and has
    the right sign.

    **Edge cases.** A multiplier of 0 is allowed (no noise, no grid, ε is infinite); a sensitivity of 0 is not, for
    its multiplier means nothing. A sampling rate of 1 is allowed, one of 0 is not. Rows of versions without a grid
    have ``grid = 0`` and ``clip = sensitivity``; ``exact`` is False for them.
    """

    step: int
    batch: int
    query: str
    sensitivity: float
    noise_multiplier: float
    noise_std: float
    sample_rate: float
    stream: str
    clip: float
    grid: float

    @property
    def exact(self) -> bool:
        """Whether this release lies on a grid, so that its last digits tell nothing."""
        return self.grid > 0

    def __post_init__(self) -> None:
        # Written so that nan fails every comparison.
        multiplier, sensitivity, std = self.noise_multiplier, self.sensitivity, self.noise_std
        if not (isinstance(self.step, int) and 0 <= self.step < 2**63):
            raise LedgerError(f"step is {self.step!r}, not a count")
        if not (isinstance(self.batch, int) and 0 <= self.batch < 2**63):
            raise LedgerError(f"batch is {self.batch!r}, not a count")
        if not (
            0 < sensitivity < math.inf
            and 0 <= multiplier < math.inf
            and abs(std - multiplier * sensitivity) <= _SLACK * std
            and 0 < self.sample_rate <= 1
        ):
            raise LedgerError(
                f"{self} is not a release: sensitivity must be positive and finite, the noise multiplier "
                "finite and not negative, noise_std their product, and 0 < sample_rate <= 1"
            )
        if self.grid == 0 and self.clip == sensitivity:
            return  # of a version without a grid
        if not (
            abs(sensitivity - widened(self.clip)) <= _SLACK * sensitivity
            and on_grid(self.grid, self.clip, multiplier)
        ):
            raise LedgerError(
                f"{self} is not a release: sensitivity must be clip * (1 + 2^-9), and grid a power of two that is fine "
                "enough for clip and noise"
            )

    @property
    def key(self) -> Key:
        return (self.stream, self.batch, self.query)

    def to_json(self) -> str:
        """One line of JSON; floats come back bit for bit."""
        numbers = (self.sensitivity, self.noise_multiplier, self.noise_std, self.sample_rate)
        query, stream = json.dumps(self.query), json.dumps(self.stream)
        return _LINE % (
            self.step,
            self.batch,
            query,
            *map(float, numbers),
            stream,
            float(self.clip),
            float(self.grid),
        )

    @classmethod
    def from_json(cls, line: str) -> Row:
        """The row of one line, or a ``LedgerError`` that says why it isn't one."""
        try:
            values = json.loads(line)
        except ValueError as error:
            raise LedgerError(f"not JSON: {error}") from None
        if isinstance(values, dict) and values.keys() == _FIELDS.keys() - {"clip", "grid"}:
            values |= {"clip": values["sensitivity"], "grid": 0.0}
        if not isinstance(values, dict) or values.keys() != _FIELDS.keys():
            raise LedgerError(f"a row has the fields {', '.join(_FIELDS)}")
        for name, kind in _FIELDS.items():
            if type(values[name]) not in ((float, int) if kind is float else (kind,)):
                raise LedgerError(f"{name} can't be {values[name]!r}")
        return cls(**values)


_FIELDS = dict(
    zip([field.name for field in fields(Row)], (int, int, str, *[float] * 4, str, float, float))
)
# json.dumps would take most of the time that a million rows take to write.
_LINE = ", ".join(
    f'"{name}": %{"r" if kind is float else "s"}' for name, kind in _FIELDS.items()
).join("{}")
# A row in memory, field by field: the names are stored once, the rows hold their positions.
_RECORD = struct.Struct("<qqiddddidd")
_DTYPE = np.dtype(
    {"names": list(_FIELDS), "formats": ["<i8", "<i8", "<i4", *["<f8"] * 4, "<i4", "<f8", "<f8"]}
)


@dataclass(frozen=True)
class Header:
    """What holds for the whole run and what the rows can't say.

    ``claim`` is ``"differential privacy"`` or ``"none: <reason>"``. ``noise_seed_known`` is true for a run
    with a user's seed: whoever knows it can subtract the noise.
    """

    num_examples: int
    num_examples_source: Literal["declared", "taken from the data"]
    expected_batch_size: float
    accountant: str
    method: str
    claim: str = "differential privacy"
    noise_seed_known: bool = False
    notes: tuple[str, ...] = ()
    adjacency: str = "add/remove one record"

    def __post_init__(self) -> None:
        object.__setattr__(self, "notes", tuple(self.notes))
        if self.num_examples_source not in ("declared", "taken from the data"):
            raise LedgerError(f"num_examples_source is {self.num_examples_source!r}")
        if self.claim != "differential privacy" and not self.claim.startswith("none: "):
            raise LedgerError(
                f"claim is {self.claim!r}: say 'differential privacy' or 'none: <reason>'"
            )

    @property
    def claims_privacy(self) -> bool:
        return self.claim == "differential privacy"

    @classmethod
    def from_plain(cls, values: Any) -> Header:
        """A header from a dict as ``asdict`` makes it; anything else is a ``LedgerError``."""
        if not isinstance(values, dict) or values.keys() != {field.name for field in fields(cls)}:
            raise LedgerError("the header doesn't have the fields of a ledger's header")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Event:
    """``count`` steps that each released one Gaussian on a fresh Poisson batch."""

    sample_rate: float
    noise_multiplier: float
    count: int


class Ledger:
    """The rows of a run under their header.

    **Guarantee.** ``events()`` costs every row exactly once. Rows of one (stream, batch) saw the same batch
    and compose as one Gaussian with multiplier (Σ s_k^-2)^(-1/2), in whatever order they arrived; different
    ids are separate steps.

    **Edge cases.** One row of a batch without noise makes the whole batch cost infinity. A batch whose rows
    name different sampling rates, or the same query twice, is a ``LedgerError``: at once when its rows
    arrive together, otherwise from ``events()``.
    """

    def __init__(self, header: Header) -> None:
        self.header = header
        self._names: dict[str, int] = {}  # of queries and streams, with their positions
        self._records = bytearray()
        self._open_batch, self._open_stream = -1, ""
        self._open_queries: set[str] = set()
        self._open_rate = 0.0
        self._last_batch: dict[str, int] = {}
        self._batches = 0
        self._scattered = False  # some batch's rows may not be neighbours
        self._events: tuple[int, list[Event]] | None = None  # (rows it was computed from, result)

    def append(self, row: Row) -> None:
        """Adds one release; about a microsecond, and no copy of what is there."""
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
        """Adds the rows whose (stream, batch, query) isn't here yet; returns how many that were."""
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
        names = dict(enumerate(self._names))
        return (_row(record, names) for record in self._tuples())

    def keys(self) -> set[Key]:
        """Every row's (stream, batch, query)."""
        names = list(self._names)
        return {(names[record[7]], record[1], names[record[2]]) for record in self._tuples()}

    def _tuples(self) -> Iterator[tuple[Any, ...]]:
        # A copy: iterating over the bytearray itself would forbid appending meanwhile.
        return _RECORD.iter_unpack(bytes(self._records))

    def _columns(self) -> dict[str, np.ndarray]:
        records = np.frombuffer(bytes(self._records), dtype=_DTYPE)
        return {name: records[name].copy() for name in _FIELDS}

    @property
    def steps(self) -> int:
        """How many batches were released from: the number of steps that privacy is accounted for."""
        return sum(event.count for event in self.events()) if self._scattered else self._batches

    def events(self) -> list[Event]:
        """What the accountants take: equal (sampling rate, effective multiplier), counted.

        Sorted by sampling rate and multiplier. Multipliers are rounded to 12 significant digits, which is
        far below what any accountant resolves.
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
            # Not one row per batch in order. Sorting by query too makes the sum below see equal batches in
            # equal order, so that they come out equal to the last bit.
            order = np.lexsort((query, batch, stream))
            stream, batch, query = stream[order], batch[order], query[order]
            rate, multiplier = rate[order], multiplier[order]
        same = (stream[1:] == stream[:-1]) & (batch[1:] == batch[:-1])  # as the row before
        if np.any(same & (query[1:] == query[:-1])):
            raise LedgerError("a batch holds the same query twice")
        if np.any(same & (rate[1:] != rate[:-1])):
            raise LedgerError("a batch has rows with different sampling rates")
        starts = np.flatnonzero(np.concatenate(([True], ~same)))
        sizes = np.diff(np.append(starts, len(stream)))
        with np.errstate(
            divide="ignore", over="ignore"
        ):  # no noise: 1/0 is infinite cost, and 1/inf is 0 noise
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
        """A few lines for people."""
        head = self.header
        events = self.events()
        lines = [
            f"{head.method}: {self.steps} steps, {len(self)} releases, accountant {head.accountant}",
            f"claim: {head.claim}; adjacency: {head.adjacency}",
            f"N = {head.num_examples} ({head.num_examples_source}), L = {head.expected_batch_size:g}",
        ]
        if head.noise_seed_known:
            lines.append("the noise seed is known: whoever has it can remove the noise")
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
        """Writes the header and then a line per row; an existing file is replaced whole or not at all.

        The header line carries the number of rows and a digest of everything, so that a file that was cut
        or edited is noticed. It protects against accidents, not against someone who recomputes the digest.
        """
        with replace_file(path) as file:
            opening = self._opening(_NO_DIGEST)
            digest = sha256(opening)
            file.write(opening)
            names = [json.dumps(name) for name in self._names]
            for step, batch, query, *numbers, stream, clip, grid in self._tuples():
                line = (
                    _LINE % (step, batch, names[query], *numbers, names[stream], clip, grid)
                ).encode() + b"\n"
                digest.update(line)
                file.write(line)
            file.seek(0)
            file.write(
                self._opening(digest.hexdigest())
            )  # of the same length: only the digest differs

    def _opening(self, digest: str, version: int = _FORMAT) -> bytes:
        values = {"zetaclip_ledger": version, "rows": len(self), "sha256": digest}
        return json.dumps(values | {"header": asdict(self.header)}).encode() + b"\n"

    @classmethod
    def from_jsonl(cls, path: str | os.PathLike[str]) -> Ledger:
        """Reads what ``to_jsonl`` wrote, or raises a ``LedgerError`` that says what is wrong with it."""
        name = Path(path).name
        with open(path, "rb") as file:
            try:
                opening = json.loads(file.readline())
                version, promised, digest = (
                    opening[key] for key in ("zetaclip_ledger", "rows", "sha256")
                )
                ledger = cls(Header.from_plain(opening["header"]))
            except (ValueError, TypeError, KeyError) as error:
                raise LedgerError(f"{name} doesn't begin with a ledger's header: {error}") from None
            if version not in (_FORMAT, _WITHOUT_GRID):
                raise LedgerError(
                    f"{name} has ledger format {version!r}; this version reads {_FORMAT}"
                )
            lines = file.readlines()
        for number, line in enumerate(lines, start=2):
            try:
                ledger.append(Row.from_json(line.decode()))
            except ValueError as error:  # LedgerError and UnicodeDecodeError are both
                raise LedgerError(f"{name}, line {number}: {error}") from None
        if len(ledger) != promised:
            raise LedgerError(
                f"{name} should hold {promised} rows and holds {len(ledger)}: cut or edited"
            )
        if sha256(b"".join([ledger._opening(_NO_DIGEST, version), *lines])).hexdigest() != digest:
            raise LedgerError(f"{name} was edited: its digest is not the one it carries")
        return ledger

    def state_dict(self) -> dict[str, Any]:
        """Plain values and one tensor per column: ``torch.load(weights_only=True)`` accepts it."""
        return {
            "format": _FORMAT,
            "header": asdict(self.header),
            "names": list(self._names),
            "columns": {name: torch.from_numpy(column) for name, column in self._columns().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces header and rows by those of a ``state_dict``; on an error nothing has changed."""
        try:
            if state["format"] not in (_FORMAT, _WITHOUT_GRID):
                raise LedgerError(
                    f"ledger format {state['format']!r}; this version reads {_FORMAT}"
                )
            fresh = Ledger(Header.from_plain(state["header"]))
            names = dict(enumerate(state["names"]))  # unlike a list, a dict refuses position -1
            found = dict(state["columns"])
            if state["format"] == _WITHOUT_GRID:
                found |= {
                    "clip": found["sensitivity"],
                    "grid": torch.zeros_like(found["sensitivity"]),
                }
            columns = [found[name].tolist() for name in _FIELDS]
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
    """To ``_DIGITS`` significant digits; 1.1 stays 1.1, and what is below 1e-200 counts as no noise."""
    exponent = np.floor(np.log10(np.maximum(values, 1e-200)))
    scale = 10.0 ** (_DIGITS - 1 - exponent)
    return np.where(values < 1e-200, 0.0, np.rint(values * scale) / scale)
