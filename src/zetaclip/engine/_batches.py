"""The source of logical batches: which records each one has, and the keys that belong to it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..methods import Pass
from ..randomness import drawn_and_next, subkey
from ._data_digest import digest_of
from ._group import Group
from ._settings import Settings
from ._state import RunState


@dataclass(frozen=True)
class Drawn:
    """The keys of one logical batch, and where the two secret streams stand after it."""

    phase: int
    number: int  # passes over the same records share it, and compose as one Gaussian
    key: bytes = field(repr=False)  # a second pass on the same records draws them again from it
    noise_key: bytes | None = field(repr=False)
    sampling: bytes = field(repr=False)
    noise: bytes | None = field(repr=False)


class Batches:
    """Draws logical batches from the secret streams of a ``RunState``.

    **Guarantee.** ``draw`` is the only code that draws: what workers read ahead is what will be
    handed out. It moves nothing; a run moves on when the batch is released. Every batch takes one
    draw of the noise stream, however often it is tried.
    """

    def __init__(
        self,
        dataset: Any,
        settings: Settings,
        passes: Sequence[Pass],
        group: Group,
        digest: str | None = None,
    ) -> None:
        self.dataset, self.group = dataset, group
        self._settings, self._passes = settings, passes
        self._digest = digest
        self._process = os.getpid()

    @property
    def at_home(self) -> bool:
        """Whether this process owns the streams.

        A fork does not: it would draw the same numbers.
        """
        return os.getpid() == self._process

    def settle(self) -> None:
        """This process owns the streams from now on: they were made here."""
        self._process = os.getpid()

    def draw(self, state: RunState) -> Drawn:
        """The batch that follows a state."""
        fresh = self._passes[state.phase].batch == "fresh"
        key, sampling = state.same_batch, state.sampling
        if fresh or key is None:
            key, sampling = drawn_and_next(sampling)
        noise_key, noise = (None, None) if state.noise is None else drawn_and_next(state.noise)
        number = state.batch if fresh else state.batch - 1
        return Drawn(state.phase, number, key, noise_key, sampling, noise)

    def after(self, state: RunState, drawn: Drawn) -> RunState:
        """The state once that batch is released: its draws are used up, and the next pass comes."""
        phase = (drawn.phase + 1) % len(self._passes)
        return replace(
            state,
            sampling=drawn.sampling,
            noise=drawn.noise,
            same_batch=drawn.key,
            batch=drawn.number + 1,
            phase=phase,
            releases=state.releases if phase else (),
            tries=0,
        )

    def upcoming(self, state: RunState) -> Iterator[Tensor]:
        """The non-empty chunks from here to the end of the epoch."""
        left = self._settings.steps_per_epoch - state.position
        while left > 0:
            drawn = self.draw(state)
            yield from (rows for rows in self.chunks(drawn.key) if len(rows))
            state = self.after(state, drawn)
            left -= state.phase == 0

    def chunks(self, key: bytes) -> list[Tensor]:
        """The records of a batch, in parts of at most ``physical_batch_size``.

        One empty part if there are no records.
        """
        rows = self.group.own_rows(key, self._settings.sample_rate)
        size = self._settings.physical_batch_size
        return [rows] if size is None or len(rows) <= size else list(rows.split(size))

    def key_of_try(self, drawn: Drawn, tries: int) -> bytes:
        """The key of this try's noise and coins.

        Processes without noise toss coins of their own.

        It is derived from the batch's one draw. If each try took a draw, a replay that needs fewer
        tries would be a draw ahead ever after, and put noise that was released with one batch on
        the sum of another.
        """
        if drawn.noise_key is None:
            return self.group.own_key(drawn.key, f"coins of pass {drawn.phase}, try {tries}")
        return subkey(drawn.noise_key, f"try {tries}") if tries else drawn.noise_key

    def digest(self) -> str:
        """Of the records, computed once. Secret."""
        if self._digest is None:
            self._digest = digest_of(self.dataset)
        return self._digest
