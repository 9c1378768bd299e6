"""What stands in a ledger: a row for each release, the header of a run, and events to account."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..errors import LedgerError
from ..grid import ROUNDED, fits

Key = tuple[str, int, str]
"""The unique key of a release: (stream, batch, query)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One release: a sum over one batch to which Gaussian noise was added.

    Args:
        step: Number of the update.
        batch: Number of the batch within its stream.
        query: What was summed.
        sensitivity: ``clip * (1 + 2^-9)``; the excess covers rounding and arithmetic.
        noise_multiplier: Noise std divided by sensitivity.
        noise_std: Standard deviation of the noise.
        sample_rate: Probability with which each record joined the batch.
        stream: Public name of the sequence of keys that drew the noise. A run with fresh keys gets
            a new name, so that its batch 7 is not the old batch 7.
        clip: The clip rule's bound on the norm of one record.
        grid: A power of two; the release is a multiple of it, divided by the declared batch size.

    Raises:
        LedgerError: The values are not consistent.

    **Guarantee.** A row that exists is consistent: ``noise_std = noise_multiplier * sensitivity``,
    ``sensitivity = clip * (1 + 2^-9)``, the grid is fine enough for both, and every number is
    finite and has the right sign.

    **Edge cases.** A multiplier of 0 is allowed (no noise, no grid, ε is infinite). A sensitivity
    of 0 is not, because its multiplier would be undefined. A sampling rate of 1 is allowed, 0 is
    not. Rows of versions without a grid have ``grid = 0`` and ``clip = sensitivity``; ``exact`` is
    False for them.
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
        """Whether this release lies on a grid, so that its last digits reveal nothing."""
        return self.grid > 0

    def __post_init__(self) -> None:
        # Each comparison is written so that NaN fails it.
        multiplier, sensitivity, std = self.noise_multiplier, self.sensitivity, self.noise_std
        if not (isinstance(self.step, int) and 0 <= self.step < 2**63):
            raise LedgerError(f"step is {self.step!r}, not a count")
        if not (isinstance(self.batch, int) and 0 <= self.batch < 2**63):
            raise LedgerError(f"batch is {self.batch!r}, not a count")
        if not (
            0 < sensitivity < math.inf
            and 0 <= multiplier < math.inf
            and abs(std - multiplier * sensitivity) <= ROUNDED * std
            and 0 < self.sample_rate <= 1
        ):
            raise LedgerError(
                f"{self} is not a release: sensitivity must be positive and finite, the noise "
                "multiplier finite and not negative, noise_std their product, "
                "and 0 < sample_rate <= 1"
            )
        if self.grid == 0 and self.clip == sensitivity:
            return  # from a version without a grid
        if not fits(sensitivity, self.grid, self.clip, multiplier):
            raise LedgerError(
                f"{self} is not a release: sensitivity must be clip * (1 + 2^-9), and grid a power "
                "of two that is fine enough for clip and noise"
            )

    @property
    def key(self) -> Key:
        """(stream, batch, query)."""
        return (self.stream, self.batch, self.query)

    def to_json(self) -> str:
        """One line of JSON, from which floats are restored bit for bit."""
        numbers = (self.sensitivity, self.noise_multiplier, self.noise_std, self.sample_rate)
        query, stream = json.dumps(self.query), json.dumps(self.stream)
        return LINE % (
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
        """Parses one line of JSON.

        Raises:
            LedgerError: The line is not a consistent row; the message explains why.
        """
        try:
            values = json.loads(line)
        except ValueError as error:
            raise LedgerError(f"not JSON: {error}") from None
        if isinstance(values, dict) and values.keys() == FIELDS.keys() - {"clip", "grid"}:
            values |= {"clip": values["sensitivity"], "grid": 0.0}
        if not isinstance(values, dict) or values.keys() != FIELDS.keys():
            raise LedgerError(f"a row has the fields {', '.join(FIELDS)}")
        for name, kind in FIELDS.items():
            if type(values[name]) not in ((float, int) if kind is float else (kind,)):
                raise LedgerError(f"{name} cannot be {values[name]!r}")
        return cls(**values)


FIELDS = dict(
    zip([field.name for field in fields(Row)], (int, int, str, *[float] * 4, str, float, float))
)
# json.dumps would take most of the time of writing a million rows.
LINE = ", ".join(
    f'"{name}": %{"r" if kind is float else "s"}' for name, kind in FIELDS.items()
).join("{}")


@dataclass(frozen=True)
class Header:
    """Facts about the whole run that are not in the rows.

    Args:
        num_examples: N, the number of training records.
        num_examples_source: "declared", or "taken from the data".
        expected_batch_size: L.
        accountant: Accountant of the run's ε.
        method: Name of the method.
        claim: "differential privacy", or "none: <reason>".
        noise_seed_known: True if the user chose the seed: anyone who knows it can subtract the
            noise.
        notes: Further facts for the reader.
        adjacency: The neighbouring relation that ε is for.

    Raises:
        LedgerError: The source or the claim is not one of the allowed values.
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
        """Whether the run claims differential privacy."""
        return self.claim == "differential privacy"

    @classmethod
    def from_plain(cls, values: Any) -> Header:
        """A header from the dict that ``asdict`` returns.

        Raises:
            LedgerError: The values are not those of a header.
        """
        if not isinstance(values, dict) or values.keys() != {field.name for field in fields(cls)}:
            raise LedgerError("the header does not have the fields of a ledger's header")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Event:
    """``count`` equal steps, each of which released one Gaussian sum of a fresh Poisson batch.

    Attributes:
        sample_rate: Probability with which each record joins a batch.
        noise_multiplier: Noise std divided by sensitivity.
        count: Number of steps.
    """

    sample_rate: float
    noise_multiplier: float
    count: int
