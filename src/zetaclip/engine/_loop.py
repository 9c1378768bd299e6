"""The private loop: the loader opens a batch and hands out its chunks, ``step()`` closes them.

``step()`` closes a chunk, and with the last one the batch is released and the weights move.
Anything out of that order is an error, because out of order means that a batch is counted wrongly.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..control import Released
from ..control.base import check_clip
from ..errors import PrivacyLeakWarning
from ..gradients.capture import exact
from ..ledger import Event
from ..mechanism import Draw, Mechanism
from ..methods import Method, Plan, at
from ..randomness._forward import users_streams
from ._batches import Batches, Drawn
from ._configuration import configuration
from ._control_loop import ControlLoop
from ._group import Group
from ._guard import FORKED, OrderError
from ._open_batch import OpenBatch, Stage
from ._private_module import PrivateModule
from ._release_log import ReleaseLog
from ._settings import Settings
from ._state import RunState
from ._update import Update

_SHORT_NOTE = (
    "not covered: means over a batch in half precision, whose rounding depends on the "
    "number of records"
)
_SHORT_MEAN = (
    "gradients come back in half precision, of a loss that is a mean over the batch: how each one "
    "is rounded depends on the number of "
    'records, which the ledger does not cover. Use reduction="sum" in the loss, and '
    'loss_reduction="sum" in make_private'
)


class PrivateLoop:
    """The order of calls in one private run; the objects that it coordinates hold the rest.

    **Guarantee.** C, σ, q and L are read once per logical batch, into one ``Draw``. Between
    ``open_batch`` and the last ``step()`` nothing is released and ``state`` does not move.
    """

    def __init__(
        self,
        *,
        model: PrivateModule,
        batches: Batches,
        log: ReleaseLog,
        update: Update,
        control: ControlLoop,
        settings: Settings,
        method: Method,
        plan: Plan,
        state: RunState,
        planned_steps: int | None = None,
    ) -> None:
        self.model, self.batches, self.log = model, batches, log
        self.update, self.control = update, control
        self.settings, self.method, self.plan = settings, method, plan
        self.state = state
        self.planned_steps = planned_steps
        self.batch: OpenBatch | None = None
        self.stepped = False  # whether the last step() moved the weights
        self.detached = False
        self._ticket = 0  # of the iterator that is valid
        self._resumed = False

    @property
    def group(self) -> Group:
        return self.batches.group

    @property
    def clip(self) -> float:
        """C of the batch that is open, or of the next one."""
        return float(self.state.control.clip) if self.batch is None else self._draw.clip

    @property
    def _draw(self) -> Draw:
        assert self.batch is not None
        return self.batch.mechanism.draw

    @property
    def noise_multiplier(self) -> float:
        """σ of the next sum."""
        return at(self.plan.noise_multipliers[self.state.phase], self.state.step)

    # -- the loader's side

    def start_epoch(self) -> int:
        """A new iterator: earlier ones are void.

        A batch that was not stepped will be handed out again.
        """
        self._ticket += 1
        if not self._resumed or self.state.position >= self.settings.steps_per_epoch:
            self.state = replace(self.state, position=0)
        self._resumed = False
        return self._ticket

    def upcoming(self) -> Iterator[Tensor]:
        """The non-empty chunks that will be handed out from here to the end of the epoch."""
        return self.batches.upcoming(self.state)

    def open_batch(self) -> list[Tensor]:
        """Opens the next logical batch, or the one that is still waiting, and gives its chunks."""
        self._check_attached()
        if not self.batches.at_home:
            raise OrderError(FORKED)
        if self.batch is not None:
            self._begin_again(self.batch)
            return self.batch.chunks
        self._check_planned()
        self.model.guard.before_batch()
        drawn = self.batches.draw(self.state)
        chunks = self.batches.chunks(drawn.key)
        mechanism = self._mechanism(drawn)
        opened = OpenBatch(drawn, chunks, mechanism, users_streams(self.model.layout.device))
        try:
            self._perturb(drawn.phase)
            self.batch = opened
        except BaseException:
            self.batch = None
            self.model.rest()
            raise
        return chunks

    def _check_planned(self) -> None:
        if self.plan.steps is not None and self.state.step >= self.plan.steps:
            raise OrderError(
                f"the noise of method {self.method.name!r} was planned for {self.plan.steps} "
                "updates, and they are done; a further one would cost more than the plan. Call "
                "make_private with more epochs="
            )
        if self.state.step == self.planned_steps and not self.state.phase:
            warnings.warn(
                f"the {self.planned_steps} updates that the noise was chosen for are done; every "
                "further one costs more than was planned (engine.get_epsilon says what)",
                stacklevel=4,
            )
            self.planned_steps = None

    def _mechanism(self, drawn: Drawn) -> Mechanism:
        state, settings, rule = self.state, self.settings, self.method.rule
        query = "sum"
        if len(self.method.passes) > 1:
            query = f"{self.method.passes[state.phase].name} sum"
        if state.tries:
            query = f"{query}, try {state.tries + 1}"
        draw = Draw(
            step=state.step,
            phase=state.phase,
            query=query,
            batch=drawn.number,
            clip=check_clip(state.control.clip),
            noise_multiplier=self.noise_multiplier,
            sample_rate=settings.sample_rate,
            divisor=settings.expected_batch_size,
            noise_key=self.batches.key_of_try(drawn, state.tries),
            stream=state.stream,
        )
        affine = rule.transform(state.rule)
        return Mechanism(self.model.layout, rule, draw, affine, self.model.room)

    def _perturb(self, phase: int) -> None:
        """Moves the weights to where this pass takes its gradient."""
        perturb = self.method.passes[phase].perturb
        moved = None if perturb is None else perturb(self.state.releases, self.state.memory)
        if moved is None:
            return
        if not isinstance(moved, tuple):
            raise TypeError(
                f"perturb of method {self.method.name!r} must give (vector, distance) or None, not "
                f"{type(moved).__name__}"
            )
        self.model.weights.move(*moved)

    def _begin_again(self, batch: OpenBatch) -> None:
        """Starts the same records again from the first chunk.

        With other noise wherever the sum could be another one.

        That is so if a release was begun and cut off, or if torch's own streams have moved on, from
        which the user's code may have drawn: one draw of noise must never cover two different sums.
        (Dropout draws the same masks again.) The records are the same, so the batch number is, too,
        and whatever was released from them composes as one Gaussian.
        """
        self.model.take_back()
        self.model.guard.before_batch()
        public = users_streams(self.model.layout.device)
        moved = any(not torch.equal(public[name], old) for name, old in batch.public.items())
        what = f"a batch of update {self.state.step + 1} that is begun again"
        if any(self.group.gather(batch.used or moved, what)):  # noise covers the sum of all
            self.state = replace(self.state, tries=self.state.tries + 1)
        else:
            public = batch.public
        batch.begin_again(self._mechanism(batch.drawn), public)

    def hand_out(self, rows: Tensor, ticket: int) -> None:
        """A chunk goes to the user; what is drawn in its forward follows a key of the batch."""
        batch = self.batch
        if batch is None or ticket != self._ticket:
            raise OrderError(
                "this loader iterator is void: a later one was started, or the engine was loaded. "
                "Iterate the loader anew"
            )
        batch.stage = Stage.OUT
        purpose = f"forward of pass {batch.drawn.phase}, chunk {batch.done}"
        self.model.lend(rows.shape[0], self.group.own_key(batch.drawn.key, purpose))

    def check_stepped(self, ticket: int) -> None:
        """The user asks for more: the chunk before must have been stepped."""
        if ticket == self._ticket and self.batch is not None and self.batch.waits:
            raise OrderError(
                "the next batch was asked for, but optimizer.step() was not called for the one "
                "that is out. Call step() after every backward: it takes the update when the "
                "logical batch is complete. To accumulate gradients over smaller batches, set "
                "physical_batch_size= in make_private; accumulating by hand would double what one "
                "record can do"
            )

    def fetching_key(self) -> bytes:
        """For what is drawn while the records of the next chunk are read."""
        batch = self.batch
        assert batch is not None
        purpose = f"reading for pass {batch.drawn.phase}, chunk {batch.done}"
        return self.group.own_key(batch.drawn.key, purpose)

    def workers_key(self) -> bytes:
        """For what workers draw that read ahead from here to the end of the epoch."""
        return self.group.own_key(self.state.sampling, "workers")

    # -- the optimizer's side

    def step(self) -> None:
        """Takes the chunk that is out into the sum; with the last one, releases and updates."""
        before = torch.is_grad_enabled()
        # The decorator does the same, and takes longer than some layers.
        torch.set_grad_enabled(False)
        try:
            self.stepped = False
            batch = self._batch_to_step()
            with exact(self.model.layout.device):
                if self._absorb(batch):
                    self._release(batch)
        finally:
            torch.set_grad_enabled(before)

    def _batch_to_step(self) -> OpenBatch:
        self._check_attached()
        batch = self.batch
        if batch is None or not batch.waits:
            raise OrderError(
                "step() without a private batch: every step takes a batch from the loader that "
                "make_private returned, then forward, backward, step"
            )
        if batch.stage is Stage.SPOILED:
            raise OrderError(
                "step() after one that failed while it added the records of this batch: some of "
                "them may be in the sum already, and would count twice. Leave the loop over the "
                "loader and begin it again: the batch then starts afresh"
            )
        if not self.model.recorder.received:
            raise OrderError(
                "step() without a backward: no gradient of a private layer came back for the "
                "batch that is out. Call loss.backward() between zero_grad() and step(), without "
                "inputs=: a backward that asks for some tensors only leaves nothing here"
            )
        return batch

    def _absorb(self, batch: OpenBatch) -> bool:
        """Adds the chunk that is out to the sum; whether it was the last one."""
        try:
            chunk = self.model.take(batch.chunks[batch.done].shape[0])
            if chunk is not None:
                if self.model.rounds_by_rows and self.log.note(_SHORT_NOTE):
                    warnings.warn(_SHORT_MEAN, PrivacyLeakWarning, stacklevel=4)
                batch.absorb(chunk)
        except Exception as error:
            if self.group.count > 1:
                batch.stage = Stage.SPOILED  # what was refused is never released
            if self._counts:
                self.group.total(0, f"update {self.state.step + 1}")
            self._refuse(batch, error)
            raise
        self.model.take_back()
        return batch.close_chunk()

    def _refuse(self, batch: OpenBatch, error: Exception) -> None:
        """Meets the other processes where they wait, with nothing but the reason."""
        if self.group.count > 1:
            batch.used = True
            batch.mechanism.refuse(self.group, str(error))

    @property
    def _counts(self) -> bool:
        """Whether this is a literal form, for which the size of the whole batch must be known."""
        return self.settings.normalize == "realized" or self.settings.empty == "skip"

    def _release(self, batch: OpenBatch) -> None:
        mechanism, divisor = batch.mechanism, self._draw.divisor
        if self._counts:
            records = self.group.total(mechanism.records, f"update {self.state.step + 1}")
            if records == 0 and self.settings.empty == "skip":
                self._close(batch)
                self._advance()  # the other passes of this update are skipped, too
                return
            if self.settings.normalize == "realized":
                divisor = float(max(1, records))
        try:
            receipt = self.log.write(batch.declare())
        except Exception as error:
            self._refuse(batch, error)
            raise
        released = mechanism.release(receipt, self.group, divisor)
        told = self.group.conclude(
            lambda: self._use(batch, released),
            self._said,
            f"the end of update {self._draw.step + 1}",
        )
        if told is not None:
            self.state = replace(self.state, control=told)
        if self.stepped and self.state.position == self.settings.steps_per_epoch:
            self.group.check_equal(self._shared, f"after {self.state.step} updates")

    def _said(self) -> tuple[float, float]:
        """What other processes must know of the controller."""
        control = self.state.control
        return float(control.clip), float(self.control.controller.rate(control))

    def _shared(self) -> dict[str, Tensor]:
        """What all processes must have alike."""
        tensors = self.model.tensors()
        tensors |= {f"memory of {name}": value for name, value in self.state.memory.items()}
        rule = self.state.rule if isinstance(self.state.rule, dict) else {}
        tensors |= {f"rule's {name}": t for name, t in rule.items() if isinstance(t, Tensor)}
        return tensors

    def _use(self, batch: OpenBatch, released: Released) -> None:
        self.log.confirm(batch.mechanism.draw, released)
        self._close(batch)
        if self.state.phase:
            self.state = replace(self.state, releases=(*self.state.releases, released))
            return
        self.update.apply(
            self.model.layout, released, self.control.controller.rate(self.state.control)
        )
        self.model.power.iterate()
        self.stepped = True
        self._advance()
        self._learn(released)

    def _learn(self, released: Released) -> None:
        """The method, the clip rule and the controller read what was released."""
        state, remember = self.state, self.method.remember
        memory = state.memory if remember is None else remember(released)
        rule = self.method.rule.update(released, state.rule)
        control = state.control
        if self.group.first:  # the others are told
            control = self.control.move(
                self.model.module, released, state.step, control, state.clip_history
            )
        self.state = replace(state, memory=memory, rule=rule, control=control)

    def _close(self, batch: OpenBatch) -> None:
        """The batch is released: its draws are used up."""
        self.model.rest()
        # In one statement, without a call in between: if an interrupt came after the batch is
        # closed
        # and before the state moves on, the next batch would draw the same noise again.
        self.state, self.batch = self.batches.after(self.state, batch.drawn), None

    def _advance(self) -> None:
        """The update is done."""
        state = self.state
        self.state = replace(
            state, step=state.step + 1, position=state.position + 1, phase=0, releases=()
        )

    # -- between batches

    def public_streams(self) -> dict[str, Tensor]:
        """The states of torch's own streams, as the user left them.

        If a batch is open, as they were at its start.
        """
        return users_streams(self.model.layout.device) if self.batch is None else self.batch.public

    def configuration(self) -> dict[str, Any]:
        """What must be equal for an exact replay, and the name of the run."""
        terms = configuration(
            self.settings, self.method, self.plan, self.update.optimizer, self.model.layout
        )
        return {"run": self.log.name, **terms}

    def planned_events(self, start: int, stop: int) -> list[Event]:
        """What updates will release."""
        rate = self.settings.sample_rate if self.plan.sample_rate is None else self.plan.sample_rate
        return self.plan.events(self.method.passes, self.method.beside(), rate, start, stop)

    def abandon(self) -> None:
        """Puts the open batch back, unreleased.

        If its records come again, they get other noise.
        """
        if self.batch is not None:
            self.model.take_back()
            self.model.rest()
            self.state, self.batch = replace(self.state, tries=self.state.tries + 1), None
        self._ticket += 1

    def go_on(self, state: RunState) -> None:
        """Continues from a state whose streams this process owns.

        The next iterator continues inside the epoch.
        """
        self.state = state
        self.batches.settle()
        self._resumed = True

    def detach(self) -> None:
        """Ends private training. The ledger stays, and so does what was spent."""
        self.abandon()
        self.detached = True
        self.update.remove()
        self.model.detach()
        if self.group.first:  # warns of a probe that could never be read
            self.control.controller.finish(self.state.control)

    def check_may_grow(self) -> None:
        """Parameters can be added now, and to this method."""
        self._check_attached()
        if self.batch is not None or self.state.phase:
            raise OrderError(
                "parameters can't be added while a private batch is out; finish it with step() "
                "first"
            )
        if self.method.rule.remembers or self.state.memory:
            raise OrderError(
                f"method {self.method.name!r} remembers something for every coordinate, so "
                "parameters can't be added to it"
            )

    def _check_attached(self) -> None:
        if self.detached:
            raise OrderError(
                "the engine was detached: this loader and this optimizer are private no more. Use "
                "your own"
            )
