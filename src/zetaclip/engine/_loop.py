"""The private loop: the loader opens a batch and hands out its chunks, ``step()`` closes them.

``step()`` closes a chunk, and with the last one the batch is released and the weights move.
Anything out of that order is an error, because out of order means that a batch is counted wrongly.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..control import Released
from ..errors import PrivacyLeakWarning
from ..gradients.capture import exact
from ..methods import Method, Plan
from ..randomness import subkey
from ..randomness._forward import users_streams
from . import _order as order
from ._batches import Batches
from ._configuration import configuration
from ._control_loop import ControlLoop
from ._group import Group
from ._open_batch import OpenBatch, Stage
from ._order import OrderError
from ._private_module import PrivateModule
from ._release_log import ReleaseLog, fingerprint
from ._settings import Settings
from ._state import RunState
from ._terms import HALF_MEAN, HALF_MEAN_NOTE
from ._update import Update

# Before the next chunk, ``step()`` must be called or the batch begun again.
_OUT = (Stage.OUT, Stage.SPOILED)


class PrivateLoop:
    """The order of calls in one private run; the objects that it coordinates hold the rest.

    **Guarantee.** Between ``open_batch`` and the last ``step()`` nothing is released and ``state``
    does not move.
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
    ) -> None:
        self.model, self.batches, self.log = model, batches, log
        self.update, self.control = update, control
        self.settings, self.method, self.plan = settings, method, plan
        self.state = state
        self.batch: OpenBatch | None = None
        self.stepped = False  # whether the last step() moved the weights
        self.detached = False
        # In a literal form the size of the whole batch must be known.
        self._counts = settings.normalize == "realized" or settings.empty == "skip"
        self._learns = method.rule.remembers
        perturbs = any(one.perturb is not None for one in method.passes)
        self._moves = perturbs or model.power is not None  # whether a batch leaves things to undo
        self._ticket = 0  # of the iterator that is valid
        self._resumed = False
        self._process = os.getpid()  # which owns the streams

    @property
    def group(self) -> Group:
        """The processes that train together."""
        return self.batches.group

    @property
    def clip(self) -> float:
        """C of the batch that is open, or of the next one."""
        batch = self.batch
        return float(self.state.control.clip) if batch is None else batch.mechanism.draw.clip

    @property
    def noise_multiplier(self) -> float:
        """σ of the next sum."""
        return self.batches.noise_multiplier(self.state)

    # -- the loader's side

    def iterate(self, begin: Callable[[], Callable[[Tensor], Any]]) -> Iterator[Any]:
        """The chunks of an epoch, one after the other; earlier iterators are void from now on.

        A batch that was not stepped is handed out again.

        Args:
            begin: Called when the epoch is begun; gives the function that fetches rows.
        """
        self._ticket += 1
        ticket = self._ticket
        if not self._resumed or self.state.position >= self.settings.steps_per_epoch:
            self.state = replace(self.state, position=0)
        self._resumed = False
        fetch = begin()
        while self.state.position < self.settings.steps_per_epoch:
            for rows in self.open_batch():
                data = fetch(rows)
                self._hand_out(rows, ticket)
                yield data
                # The user asks for more.
                if ticket == self._ticket and self.batch is not None and self.batch.stage in _OUT:
                    raise OrderError(order.NOT_STEPPED)

    def open_batch(self) -> list[Tensor]:
        """Opens the next logical batch, or the one that is still waiting, and gives its chunks."""
        self._check_ours()
        if self.batch is not None:
            self._begin_again(self.batch)
            return self.batch.chunks
        self.model.guard.before_batch()
        opened = self.batches.open(self.state, self.model.layout, self.model.room)
        try:
            if opened.moved is not None:
                self.model.weights.move(*opened.moved)
            self.batch = opened
        except BaseException:
            self.batch = None
            self.model.rest()
            raise
        return opened.chunks

    def _begin_again(self, batch: OpenBatch) -> None:
        """Starts the same records again from the first chunk, with new noise if the sum may differ.

        The sum may differ if a release was begun and cut off, or if torch's own streams have moved
        on, because the user's code may draw from them. One draw of noise must never cover two
        different sums. (Dropout draws the same masks again.) Records and batch number are the same,
        so everything that was released from them composes as one Gaussian.
        """
        self.model.take_back()
        self.model.guard.before_batch()
        public = users_streams(self.model.layout.device)
        moved = any(not torch.equal(public[name], old) for name, old in batch.public.items())
        what = f"a batch of update {self.state.step + 1} that is begun again"
        if any(self.group.gather(batch.used or moved, what)):  # noise covers the sum of all
            self.state = self.state.tried()
        batch.begin_again(
            self.batches.mechanism(self.state, batch.drawn, self.model.layout, self.model.room)
        )

    def _hand_out(self, rows: Tensor, ticket: int) -> None:
        """A chunk goes to the user; what is drawn in its forward follows a key of the batch."""
        batch = self.batch
        if batch is None or ticket != self._ticket:
            raise OrderError(order.VOID)
        batch.stage = Stage.OUT
        public = self.model.lend(rows.shape[0], self.chunk_key("forward of"))
        if batch.done == 0:
            batch.public = public

    def chunk_key(self, doing: str) -> bytes:
        """For what is drawn while the next chunk is read, augmented or run forward."""
        batch = self.batch
        assert batch is not None
        purpose = f"{doing} pass {batch.drawn.phase}, chunk {batch.done}{self.group.suffix}"
        return subkey(batch.drawn.key, purpose)

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
        self._check_ours()
        batch = self.batch
        if batch is None or batch.stage not in _OUT:
            raise OrderError(order.NO_BATCH)
        if batch.stage is Stage.SPOILED:
            raise OrderError(order.SPOILED)
        if not self.model.recorder.received:
            raise OrderError(order.NO_BACKWARD)
        return batch

    def _absorb(self, batch: OpenBatch) -> bool:
        """Adds the chunk that is out to the sum; whether it was the last one."""
        try:
            rows = batch.chunks[batch.done]
            units = self.batches.units
            counts = None if units.trivial else units.counts(rows)
            for chunk in self.model.take(counts, rows.shape[0]):
                if self.model.rounds_by_rows and self.log.note(HALF_MEAN_NOTE):
                    warnings.warn(HALF_MEAN, PrivacyLeakWarning, stacklevel=4)
                # If this is cut off, no record may be added a second time.
                batch.stage = Stage.SPOILED
                batch.mechanism.absorb(chunk)
        except Exception as error:
            if self.group.count > 1:
                batch.stage = Stage.SPOILED  # what was refused is never released
            if self._counts and self.model.sharding is None:
                self.group.total(0, f"update {self.state.step + 1}")
            self._refuse(batch, error)
            raise
        if self.model.sharding is not None:
            batch.stage = Stage.SPOILED
            batch.mechanism.deliver(self.group)
        batch.stage, batch.done = Stage.ABSORBED, batch.done + 1
        return batch.done == len(batch.chunks)

    def _refuse(self, batch: OpenBatch, error: Exception) -> None:
        """Meets the other processes where they wait, with nothing but the reason."""
        if self.group.count > 1:
            batch.used = True
            batch.mechanism.refuse(self.group, str(error))

    def _release(self, batch: OpenBatch) -> None:
        mechanism, divisor = batch.mechanism, batch.mechanism.draw.divisor
        if self._counts:
            records = self.group.total(mechanism.records, f"update {self.state.step + 1}")
            if records == 0 and self.settings.empty == "skip":
                self._close(batch)
                self._count_update()  # its other passes are skipped, too
                return
            if self.settings.normalize == "realized":
                divisor = float(max(1, records))
        batch.stage, batch.used = Stage.RELEASED, True
        try:
            receipt = self.log.write(mechanism.declare())
        except Exception as error:
            self._refuse(batch, error)
            raise
        released = mechanism.release(receipt, self.group, divisor)
        if self.group.count == 1:
            self._use(batch, released)
        else:
            what = f"the end of update {mechanism.draw.step + 1}"
            spread = self.model.sharding is not None
            if spread:
                self._confirm_parts(batch, released, what)
            told = self.group.conclude(
                lambda: self._use(batch, released, confirmed=spread),
                lambda: (self.clip, self.control.rate(self.state.control)),
                what,
                together=spread,
            )
            if told is not None:
                self.state = replace(self.state, control=told)
        if self.stepped and self.state.position == self.settings.steps_per_epoch:
            self.group.check_equal(
                lambda: self.model.tensors() | self.state.tensors(),
                f"after {self.state.step} updates",
            )

    def _confirm_parts(self, batch: OpenBatch, released: Released, what: str) -> None:
        """Rank 0 confirms every rank's part of a release; then all of them use it, or none."""
        draw, marks = batch.mechanism.draw, self.group.gather(fingerprint(released), what)
        self.group.once(lambda: self.log.confirm(draw, released, " ".join(marks)), what)

    def _use(self, batch: OpenBatch, released: Released, confirmed: bool = False) -> None:
        if self.log.home is not None and not confirmed:  # else nothing was saved to be replayed
            self.log.confirm(batch.mechanism.draw, released)
        self._close(batch)
        if self.state.phase:
            self.state = replace(self.state, releases=(*self.state.releases, released))
            return
        rate = self.control.rate(self.state.control) if self.control.steers else 1.0
        self.update.apply(self.model.layout, released, rate)
        if self.model.power is not None:
            self.model.power.iterate()
        self.stepped = True
        self._count_update()
        self._learn(released)

    def _count_update(self) -> None:
        """An update is done: the first pass of the next one comes."""
        state = self.state
        self.state = replace(
            state, step=state.step + 1, position=state.position + 1, phase=0, releases=()
        )

    def _learn(self, released: Released) -> None:
        """The method, the clip rule and the controller read what was released."""
        state, remember = self.state, self.method.remember
        memory = state.memory if remember is None else remember(released)
        rule = self.method.rule.update(released, state.rule) if self._learns else state.rule
        control, sharding = state.control, self.model.sharding
        layers = [] if sharding is None else self.control.layers(state.step)
        with nullcontext() if sharding is None or layers == [] else sharding.whole(layers):
            if self.group.first:  # the others are told
                control = self.control.move(
                    self.model.module, released, state.step, control, state.clip_history
                )
        self.state = replace(state, memory=memory, rule=rule, control=control)

    def _close(self, batch: OpenBatch) -> None:
        """The batch is released: its draws are used up."""
        if self._moves:
            self.model.rest()
        # In one statement, without a call in between: if an interrupt came after the batch is
        # closed and before the state moves on, the next batch would draw the same noise again.
        self.state, self.batch = self.batches.after(self.state, batch.drawn), None

    # -- between batches

    def public_streams(self) -> dict[str, Tensor]:
        """The states of torch's own streams, as the user left them.

        If a batch is open, as they were at its start.
        """
        public = {} if self.batch is None else self.batch.public
        return public or users_streams(self.model.layout.device)

    def configuration(self) -> dict[str, Any]:
        """What must be equal for an exact replay, and the name of the run."""
        terms = configuration(
            self.settings, self.method, self.plan, self.update.optimizer, self.model.layout
        )
        return {"run": self.log.name, **terms}

    def abandon(self) -> None:
        """Gives the open batch up without a release.

        If its records come again, they get other noise.
        """
        if self.batch is not None:
            self.model.take_back()
            self.model.rest()
            self.state, self.batch = self.state.tried(), None
        self._ticket += 1

    def go_on(self, state: RunState) -> None:
        """Continues from a state whose streams this process owns.

        The next iterator continues inside the epoch.
        """
        self.state = state
        self._process = os.getpid()
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
        self._check_ours()
        if self.batch is not None or self.state.phase:
            raise OrderError(order.BATCH_OUT)
        if self.model.sharding is not None:
            raise OrderError(
                "parameters can't be added where they are spread over ranks (fully_shard); give "
                "all of them to the optimizer before make_private"
            )
        if self.method.rule.remembers or self.state.memory:
            raise OrderError(
                f"method {self.method.name!r} remembers something for every coordinate, so "
                "parameters can't be added to it"
            )

    def check_home(self) -> None:
        """This process owns the streams. A fork does not: it would draw the same numbers."""
        if os.getpid() != self._process:
            raise OrderError(order.FORKED)

    def _check_ours(self) -> None:
        if self.detached:
            raise OrderError(order.DETACHED)
        self.check_home()
