"""The source of logical batches: which records each one has, its keys and its numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..control.base import check_clip
from ..gradients import Layout
from ..ledger import Event
from ..mechanism import Draw, Mechanism, Room
from ..methods import Method, Plan, at
from ..randomness import drawn_and_next, subkey
from ._data_digest import digest_of
from ._group import Group
from ._open_batch import Drawn, OpenBatch
from ._order import OrderError
from ._settings import Settings
from ._state import RunState
from ._units import Units


class Batches:
    """Opens logical batches from the secret streams of a ``RunState``.

    **Guarantee.** ``draw`` is the only code that draws: what workers read ahead is what will be
    handed out. It moves nothing; a run moves on when the batch is released. Every batch takes one
    draw of the noise stream, however often it is tried. C, σ, q and L are read once per try, into
    one frozen ``Draw``.
    """

    def __init__(
        self,
        dataset: Any,
        settings: Settings,
        method: Method,
        plan: Plan,
        planned_steps: int | None,
        group: Group,
        units: Units,
        digest: str | None = None,
    ) -> None:
        self.dataset, self.group, self.units = dataset, group, units
        self._settings, self._method, self._plan = settings, method, plan
        self._maps, self._counts = method.rule.maps, method.rule.counts
        # That the noise was chosen for: a plan may refuse any further one, other methods only warn.
        self.planned_steps = planned_steps if plan.steps is None else plan.steps
        self._digest = digest

    def open(self, state: RunState, layout: Layout, room: Room) -> OpenBatch:
        """The batch that follows a state: its records are drawn and its numbers are read."""
        self._check_planned(state)
        drawn = self.draw(state)
        mechanism = self.mechanism(state, drawn, layout, room)
        chunks = self.chunks(drawn.key)
        if layout.shards is not None:  # forward is a meeting of all ranks: as many for each of them
            what = f"the start of update {state.step + 1}"
            most = max(self.group.gather(len(chunks), what))
            chunks += [chunks[0][:0]] * (most - len(chunks))
        return OpenBatch(drawn, chunks, mechanism, self._moved(state))

    def draw(self, state: RunState) -> Drawn:
        """The keys of the batch that follows a state."""
        fresh = self._method.passes[state.phase].batch == "fresh"
        key, sampling = state.same_batch, state.sampling
        if fresh or key is None:
            key, sampling = drawn_and_next(sampling)
        noise_key, noise = (None, None) if state.noise is None else drawn_and_next(state.noise)
        number = state.batch if fresh else state.batch - 1
        return Drawn(state.phase, number, key, noise_key, sampling, noise)

    def after(self, state: RunState, drawn: Drawn) -> RunState:
        """The state once that batch is released: its draws are used up, and the next pass comes."""
        phase = (drawn.phase + 1) % len(self._method.passes)
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

    def workers_key(self, state: RunState) -> bytes:
        """For what workers draw that read ahead from here to the end of the epoch."""
        return subkey(state.sampling, f"workers{self.group.suffix}")

    def chunks(self, key: bytes) -> list[Tensor]:
        """The records of a batch, in parts of at most ``physical_batch_size``.

        One empty part if there are no records.
        """
        drawn = self.group.own_rows(key, self._settings.sample_rate)
        size = self._settings.physical_batch_size
        if not self.units.trivial:
            rows = self.units.rows_of(drawn, subkey(key, f"units{self.group.suffix}"))
            return self.units.split(rows, size)
        return [drawn] if size is None or len(drawn) <= size else list(drawn.split(size))

    # -- numbers

    def _check_planned(self, state: RunState) -> None:
        if self.planned_steps is None or state.step < self.planned_steps:
            return
        if self._plan.steps is not None:
            raise OrderError(
                f"the noise of method {self._method.name!r} was planned for {self.planned_steps} "
                "updates, and they are done; a further one would cost more than the plan. Call "
                "make_private with more epochs="
            )
        warnings.warn(
            f"the {self.planned_steps} updates that the noise was chosen for are done; every "
            "further one costs more than was planned (engine.get_epsilon says what)",
            stacklevel=5,
        )
        self.planned_steps = None

    def _moved(self, state: RunState) -> tuple[Tensor, float] | None:
        """Where the pass that follows a state takes its gradient: direction and distance."""
        perturb = self._method.passes[state.phase].perturb
        moved = None if perturb is None else perturb(state.releases, state.memory)
        if moved is not None and not isinstance(moved, tuple):
            raise TypeError(
                f"perturb of method {self._method.name!r} must give (vector, distance) or None, "
                f"not {type(moved).__name__}"
            )
        return moved

    def noise_multiplier(self, state: RunState) -> float:
        """σ of the sum that follows a state."""
        schedule = self._plan.noise_multipliers[state.phase]
        return schedule if isinstance(schedule, float) else at(schedule, state.step)

    def mechanism(
        self, state: RunState, drawn: Drawn, layout: Layout, room: Room | None = None
    ) -> Mechanism:
        """For one try of a batch; it has summed nothing yet."""
        settings, passes = self._settings, self._method.passes
        query = "sum" if len(passes) == 1 else f"{passes[state.phase].name} sum"
        if state.tries:
            query = f"{query}, try {state.tries + 1}"
        draw = Draw(
            step=state.step,
            phase=state.phase,
            query=query,
            batch=drawn.number,
            clip=check_clip(state.control.clip),
            noise_multiplier=self.noise_multiplier(state),
            sample_rate=settings.sample_rate,
            divisor=settings.expected_batch_size,
            noise_key=self._key_of_try(drawn, state.tries),
            stream=state.stream,
            owner="" if layout.shards is None else self.group.suffix,
        )
        rule = self._method.rule
        affine = rule.transform(state.rule) if self._maps else None
        return Mechanism(layout, rule, draw, affine, room, self._counts)

    def _key_of_try(self, drawn: Drawn, tries: int) -> bytes:
        """The key of this try's noise and coins; a process without noise has coins of its own.

        It is derived from the one draw of the batch. If each try took a draw of the stream, a
        replay with fewer tries would put noise that was released with one batch on the sum of
        another.
        """
        if drawn.noise_key is None:
            own = f"coins of pass {drawn.phase}, try {tries}{self.group.suffix}"
            return subkey(drawn.key, own)
        return subkey(drawn.noise_key, f"try {tries}") if tries else drawn.noise_key

    def planned_events(self, start: int, stop: int) -> list[Event]:
        """What updates will release."""
        rate, method = self._plan.sample_rate, self._method
        rate = self._settings.sample_rate if rate is None else rate
        return self._plan.events(method.passes, method.beside(), rate, start, stop)

    def digest(self) -> str:
        """Of the records, computed once. Secret."""
        if self._digest is None:
            self._digest = digest_of(self.dataset) + self.units.digest()
        return self._digest
