"""One private training run: whose turn it is, and the numbers that have one home.

The loader opens a logical batch and hands out its chunks; the user's loop runs forward and backward on each;
``optimizer.step()`` closes a chunk, and with the last one the batch is released and the weights move. Anything
out of that order is an error, because out of order means that a batch is counted wrongly.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..clipping import Affine
from ..control import Probe, Released
from ..control.base import check_clip
from ..errors import PrivacyLeakWarning
from ..gradients import CaptureBuffer, Chunk, LayerCapture, Layout
from ..gradients.capture import exact
from ..ledger import Event, Key, Ledger, Row
from ..ledger._journal import Journal
from ..mechanism import Draw, Mechanism, sum_room
from ..methods import Method, Plan, at
from ..methods._updates import scaled_rates
from ..randomness import Stream, subkey
from ..randomness._forward import ForwardRng, users_streams
from ._distributed import Ranks, check_equal
from ._guard import FORKED, Guard, OrderError
from ._loss_check import LossCheck
from ._optimizer import Gate
from ._power import PowerIterations
from ._sampling import poisson_indices
from ._settings import Settings
from ._turns import Position, Turn
from ._weights import Weights

_SHORT_NOTE = "not covered: means over a batch in half precision, whose rounding depends on the number of records"
_SHORT_MEAN = (
    "gradients come back in half precision, of a loss that is a mean over the batch: how each one is rounded depends on the number of "
    'records, which the ledger does not cover. Use reduction="sum" in the loss, and loss_reduction="sum" in make_private'
)


class Run:
    """The state machine behind the loader and the optimizer.

    **Guarantee.** C, σ, q and L are read once per logical batch, into one ``Draw``. Between ``open_batch`` and the last
    ``step()`` nothing is released and no C changes. Whenever no batch is out the module holds θ, unperturbed.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        named: dict[str, nn.Parameter],
        recorder: CaptureBuffer,
        shadows: list[LayerCapture],
        dataset: Any,
        settings: Settings,
        method: Method,
        probe: Probe | None,
        plan: Plan,
        ledger: Ledger,
        sampling: Stream,
        noise: Stream,
        stream: str | None = None,
        planned_steps: int | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.gate = Gate(optimizer)
        self.layout = Layout.of(named)
        self.recorder = recorder
        self.shadows = shadows
        self.guard = Guard(module, optimizer, self.layout, recorder, shadows)
        self.weights = Weights(self.layout, self.module)
        self.power = PowerIterations(module)
        self.dataset = dataset
        self.records = len(dataset)
        self.settings = settings
        self.losses = LossCheck(recorder, settings)
        self.method = method
        self.probe = probe  # the controller's, bound to this module
        self.plan = plan
        self.ledger = ledger
        self.ranks: Ranks | None = None  # the other processes of this run; None with one process
        self.expected: dict[Key, Row] = {}  # releases that an exact replay has yet to make again
        self.journals: list[Journal] = []  # one per folder that holds a checkpoint of this run
        # The one that hears of everything drawn from ``stream``, in whatever folder it was loaded; set when the stream is.
        self.home: Journal | None = None
        # Public name of this key lineage. The same seed draws the same keys, and so has the same name.
        self.stream = secrets.token_hex(8) if stream is None else stream
        self.name = (
            f"zetaclip-{secrets.token_hex(8)}"  # of the run, and of its journal; survives new keys
        )
        self.planned_steps = planned_steps
        self.observer: Callable[[Any, Any, Any], None] | None = None
        self.control_seconds = 0.0
        self.data_digest: str | None = None
        self.sampling = sampling
        self.noise: Stream | None = noise  # None on every rank but the one that owns the noise
        self.control = method.controller.init()
        self.rule_state: Any = None
        if hasattr(method.rule, "init"):
            self.rule_state = method.rule.init(self.layout.numel)
        self.memory: dict[str, Tensor] = {}
        # Whether somebody reads a released gradient after the optimizer has had it.
        own = method.controller
        self._rereads = (
            method.remember is not None
            or hasattr(method.rule, "update")
            or (own.probe is None and getattr(own, "reads_gradient", True))
        )
        self.clip_history: list[tuple] = []
        self.step_count = 0
        self.batch_count = 0
        self.phase = 0
        self.position = 0  # updates done in this epoch
        self.releases: list[Released] = []
        self.stepped = False
        self.detached = False
        self._turn: Turn | None = None
        self._start: Position | None = None  # of the turn that is out
        self._same_batch: bytes | None = None
        self._drawn = self._noise_key = b""  # for the turn's batch, and for this try of it
        self.tries = 0  # of the next batch, where a checkpoint says so
        self._ticket = 0
        self._resumed = False
        self.refresh_requested: Callable[[], None] = lambda: None
        self._tape = ForwardRng(self.layout.device)
        self._room = sum_room(self.layout)

    # -- what is read once per batch ------------------------------------------------------------------

    @property
    def clip(self) -> float:
        turn = self._turn
        if turn is not None and turn.mechanism is not None:
            return turn.mechanism.draw.clip
        return float(self.control.clip)

    @property
    def noise_multiplier(self) -> float:
        return at(self.plan.noise_multipliers[self.phase], self.step_count)

    # -- the loader's side ----------------------------------------------------------------------------

    def start_epoch(self) -> int:
        """A new iterator: earlier ones are void, and a batch that was not stepped will be handed out again."""
        self._ticket += 1
        if not self._resumed or self.position >= self.settings.steps_per_epoch:
            self.position = 0
        self._resumed = False
        return self._ticket

    def open_batch(self) -> list[Tensor]:
        """Opens the next logical batch, or the one that is still waiting, and gives its chunks."""
        self._check_attached()
        if not self.sampling.at_home:
            raise OrderError(FORKED)
        if self._turn is not None:
            self._reopen(self._turn)
            return self._turn.chunks
        if self.plan.steps is not None and self.step_count >= self.plan.steps:
            raise OrderError(
                f"the noise of method {self.method.name!r} was planned for {self.plan.steps} updates, and they are done; a "
                "further one would cost more than the plan. Call make_private with more epochs="
            )
        if self.step_count == self.planned_steps and not self.phase:
            warnings.warn(
                f"the {self.planned_steps} updates that the noise was chosen for are done; every further one costs more than was "
                "planned (engine.get_epsilon says what)",
                stacklevel=3,
            )
            self.planned_steps = None
        self.guard.before_batch()
        self._start = self.standing()
        fresh = self.method.passes[self.phase].batch == "fresh"
        key = self.sampling.draw() if fresh or self._same_batch is None else self._same_batch
        turn = Turn(self._chunks(key), key, self.batch_count if fresh else self.batch_count - 1)
        self._drawn = b"" if self.noise is None else self.noise.draw()
        self._noise_key = self._key_of_try(key)
        turn.mechanism = self._mechanism(turn)
        self._turn = turn
        perturb = self.method.passes[self.phase].perturb
        moved = None if perturb is None else perturb(self.releases, self.memory)
        if moved is not None:
            if not isinstance(moved, tuple):
                raise TypeError(
                    f"perturb of method {self.method.name!r} must give (vector, distance) or None, not {type(moved).__name__}"
                )
            self.weights.move(*moved)
        return turn.chunks

    def _reopen(self, turn: Turn) -> None:
        """The same records again, from the first chunk; with other noise wherever the sum could be another one.

        That is so if a release was begun and cut off, or if torch's own streams have moved on, from which the user's code may have
        drawn: one draw of noise must never cover two different sums. (Dropout draws the same masks again, see ``tape.py``.)
        The records are the same, so the batch id is, too, and whatever was released from them composes as one Gaussian.
        """
        assert self._start is not None and turn.mechanism is not None
        self._abandon_chunk()
        self.guard.before_batch()
        public = users_streams(self.layout.device)
        moved = any(
            not torch.equal(public[name], state) for name, state in self._start.public.items()
        )
        other = turn.mechanism.begun or moved
        if self.ranks is not None:  # the noise covers the sum of all ranks
            other = any(
                self.ranks.gather(
                    other, f"a batch of update {self.step_count + 1} that is begun again"
                )
            )
        if other:
            self._start = replace(self._start, public=public, tries=self._start.tries + 1)
            self._noise_key = self._key_of_try(turn.key)
        turn.done = 0
        turn.spoiled = False
        turn.mechanism = self._mechanism(turn)

    def _key_of_try(self, key: bytes) -> bytes:
        """The key of this batch's noise and coins. Other ranks than the first toss coins of their own and draw no noise.

        A batch takes one draw of the stream, however often it is tried. If each try took one, a replay that needs fewer tries would
        be a draw ahead ever after, and put noise that was released with one batch on the sum of another.
        """
        assert self._start is not None
        tries = self._start.tries
        if self.noise is not None:
            return subkey(self._drawn, f"try {tries}") if tries else self._drawn
        assert self.ranks is not None
        return self.ranks.own_key(key, f"coins of pass {self.phase}, try {tries}")

    def _chunks(self, key: bytes) -> list[Tensor]:
        if self.ranks is None:
            rows = poisson_indices(key, self.records, self.settings.sample_rate)
        else:
            rows = self.ranks.own_rows(key, self.settings.sample_rate)
        size = self.settings.physical_batch_size
        if size is None or len(rows) <= size:
            return [rows]
        return list(rows.split(size))

    def _own_key(self, key: bytes, purpose: str) -> bytes:
        """Another secret from one that all ranks know, for this process alone."""
        return subkey(key, purpose) if self.ranks is None else self.ranks.own_key(key, purpose)

    def fetching_key(self) -> bytes:
        """For what is drawn while the records of the next chunk are read."""
        turn = self._turn
        assert turn is not None
        return self._own_key(turn.key, f"reading for pass {self.phase}, chunk {turn.done}")

    def workers_key(self) -> bytes:
        """For what workers draw that read ahead from here to the end of the epoch."""
        return self._own_key(self.sampling.state, "workers")

    def upcoming(self, start: int) -> Iterator[Tensor]:
        """The non-empty chunks that will be handed out from here to the end of the epoch; draws nothing."""
        sampling, same, phase = self.sampling.copy(), self._same_batch, self.phase
        waiting = self._turn
        for position in itertools.count(start):
            if position >= self.settings.steps_per_epoch:
                return
            while phase < len(self.method.passes):
                if waiting is not None:
                    key, waiting = waiting.key, None
                elif self.method.passes[phase].batch == "fresh" or same is None:
                    key = sampling.draw()
                else:
                    key = same
                same, phase = key, phase + 1
                yield from (rows for rows in self._chunks(key) if len(rows))
            phase = 0

    def _mechanism(self, turn: Turn) -> Mechanism:
        rule = self.method.rule
        clip = check_clip(self.control.clip)
        name = self.method.passes[self.phase].name
        query = "sum" if len(self.method.passes) == 1 else f"{name} sum"
        tries = 0 if self._start is None else self._start.tries
        draw = Draw(
            step=self.step_count,
            phase=self.phase,
            query=f"{query}, try {tries + 1}" if tries else query,
            batch=turn.batch,
            clip=clip,
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.settings.sample_rate,
            divisor=self.settings.expected_batch_size,
            noise_key=self._noise_key,
        )
        affine: Affine | None = (
            rule.transform(self.rule_state) if hasattr(rule, "transform") else None
        )
        return Mechanism(self.layout, rule, draw, affine, self._write, self._room)

    def hand_out(self, rows: Tensor, ticket: int) -> None:
        turn = self._turn
        if turn is None or ticket != self._ticket:
            raise OrderError(
                "this loader iterator is void: a later one was started, or the engine was loaded. Iterate the loader anew"
            )
        self.guard.hand_out()
        self.power.hold()
        turn.out = True
        self._tape.lend(self._own_key(turn.key, f"forward of pass {self.phase}, chunk {turn.done}"))
        self.recorder.open(max(1, rows.shape[0]))
        self.losses.open(rows.shape[0])

    def check_stepped(self, ticket: int) -> None:
        """The user asks for more: the chunk before must have been stepped."""
        if ticket == self._ticket and self._turn is not None and self._turn.out:
            raise OrderError(
                "the next batch was asked for, but optimizer.step() was not called for the one that is out. Call step() after "
                "every backward: it takes the update when the logical batch is complete. To accumulate gradients over "
                "smaller batches, set physical_batch_size= in make_private; accumulating by hand would double what one "
                "record can do"
            )

    # -- the optimizer's side -------------------------------------------------------------------------

    def forget_chunk(self) -> None:
        self.recorder.clear()

    def step(self) -> None:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(
            False
        )  # the decorator does the same, and takes longer than some layers
        try:
            self._step()
        finally:
            torch.set_grad_enabled(before)

    def _step(self) -> None:
        turn = self._turn
        self.stepped = False
        self._check_attached()
        if turn is None or not turn.out:
            raise OrderError(
                "step() without a private batch: every step takes a batch from the loader that make_private returned, then "
                "forward, backward, step"
            )
        if turn.spoiled:
            raise OrderError(
                "step() after one that failed while it added the records of this batch: some of them may be in the sum already, "
                "and would count twice. Leave the loop over the loader and begin it again: the batch then starts afresh"
            )
        if not self.recorder.received:
            raise OrderError(
                "step() without a backward: no gradient of a private layer came back for the "
                "batch that is out. Call loss.backward() between zero_grad() and step(), without "
                "inputs=: a backward that asks for some tensors only leaves nothing here"
            )
        try:
            self._absorb(turn)
        except Exception as error:
            if self.ranks is not None:
                self._refuse(self.ranks, turn, str(error))
            raise
        turn.out = False
        self._tape.take_back()
        turn.done += 1
        self.recorder.close()
        if turn.done == len(turn.chunks):
            with exact(self.layout.device):
                self._release(turn)

    def _absorb(self, turn: Turn) -> None:
        """Takes the chunk that is out into the batch's sum, after the last look at what must not have happened."""
        self.guard.before_release()
        self.losses.close()
        rows = self.recorder.rows
        received = self.recorder.take()
        assert turn.mechanism is not None
        if turn.chunks[turn.done].shape[0]:  # an empty batch's row of zeros is nobody's record
            scale = 1.0
            if self.settings.loss_reduction == "mean":
                scale = float(rows)
                if self.recorder.short:
                    self._tell_short()
            turn.spoiled = True  # until it is in as a whole
            with exact(self.layout.device):
                turn.mechanism.absorb(Chunk(received, self.layout, rows, scale))
            turn.spoiled = False

    def _tell_short(self) -> None:
        header = self.ledger.header
        if _SHORT_NOTE not in header.notes:
            self.ledger.header = replace(header, notes=(*header.notes, _SHORT_NOTE))
            warnings.warn(_SHORT_MEAN, PrivacyLeakWarning, stacklevel=5)

    def _refuse(self, ranks: Ranks, turn: Turn, why: str) -> None:
        """Meets the other ranks where they wait, with nothing but the reason."""
        assert turn.mechanism is not None
        if self._counts:
            ranks.total(0, f"update {self.step_count + 1}")
        turn.mechanism.refuse(ranks, why)

    @property
    def _counts(self) -> bool:
        """Whether this is a literal form, for which the size of the whole batch must be known."""
        return self.settings.normalize == "realized" or self.settings.empty == "skip"

    def _release(self, turn: Turn) -> None:
        mechanism = turn.mechanism
        assert mechanism is not None
        records, literal = mechanism.records, self.settings.normalize == "realized"
        if self.ranks is not None and self._counts:
            records = self.ranks.total(records, f"update {self.step_count + 1}")
        if records == 0 and self.settings.empty == "skip":
            self._close(turn)
            self.phase, self.releases = 0, []
            self._advance()
            return
        divisor = float(max(1, records)) if literal else mechanism.draw.divisor
        released = mechanism.release(self.ranks, divisor)
        if self.ranks is None:
            self._use(turn, released)
        else:
            self._use_together(self.ranks, turn, released)

    def _use_together(self, ranks: Ranks, turn: Turn, released: Released) -> None:
        """Rank 0 first, which then says that the release stands, and what C comes next; only then the others.

        Rank 0 alone has journals. Were the others not to wait for its word, a release that it refuses would have moved their weights.
        It is the message that they need for the next batch anyway, so nothing more is sent.
        """
        what = f"the end of update {self.step_count + 1}"
        if ranks.first:
            try:
                self._use(turn, released)
            except Exception:
                ranks.close(None, what)
                raise
            ranks.close((float(self.control.clip), float(getattr(self.control, "rate", 1.0))), what)
        else:
            told = ranks.close(None, what)
            self._use(turn, released)  # by the rate of this update; what was told is for the next
            self.control = told
        if self.stepped and self.position == self.settings.steps_per_epoch:
            check_equal(self, ranks)

    def _use(self, turn: Turn, released: Released) -> None:
        assert turn.mechanism is not None
        self._confirm(turn, turn.mechanism.draw.query, released)
        self._close(turn)
        self.releases.append(released)
        if self.phase + 1 < len(self.method.passes):
            self.phase += 1
            return
        self.phase, self.releases = 0, []
        self._update(released)

    def _update(self, released: Released) -> None:
        """Hands the private gradient to the user's optimizer and lets the controller read what was released."""
        gradient, std = released.gradient, released.noise_std
        if self.settings.decouple_lr:
            gradient, std = gradient / released.sensitivity, std / released.sensitivity
        elif self._rereads:
            gradient = (
                gradient.clone()
            )  # whoever writes into .grad, as some optimizers do, must not change what was released
        for parameter, view in zip(
            self.layout.parameters, self.layout.views(gradient), strict=True
        ):
            parameter.grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
        if hasattr(self.optimizer, "set_noise_std"):
            self.optimizer.set_noise_std(std)
        rate = getattr(self.control, "rate", 1.0)  # a controller may also pace the learning rate
        self.gate.open = True
        try:
            if rate == 1.0:
                self.optimizer.step()
            else:
                with scaled_rates(self.optimizer, rate):
                    self.optimizer.step()
        finally:
            self.gate.open = False
        self.power.iterate()
        self.stepped = True
        self._advance()
        if self.method.remember is not None:
            self.memory = self.method.remember(released)
        if hasattr(self.method.rule, "update"):
            self.rule_state = self.method.rule.update(released, self.rule_state)
        if self.ranks is not None and not self.ranks.first:
            return  # the controller lives on rank 0, which sends what it says
        controller = self.method.controller
        begun = time.perf_counter()
        reading = released if self.probe is None else self.probe.read(self.module, self.step_count)
        if reading is not None:
            before = self.control
            self.control = controller.update(reading, before)
            if self.observer is not None:
                self.observer(reading, before, self.control)
            entry = controller.entry(self.control)
            if entry is not None:
                self.clip_history.append(entry)
            self.control_seconds += time.perf_counter() - begun

    def _advance(self) -> None:
        self.step_count += 1
        self.position += 1

    def _close(self, turn: Turn) -> None:
        self.weights.restore()
        self.power.let_go()
        self._same_batch = turn.key
        self._turn = self._start = None
        self.tries = 0
        self.batch_count = turn.batch + 1

    def _write(self, rows: list[dict[str, Any]]) -> None:
        """To the journal first, then to the ledger; both before any noise is drawn."""
        made = [Row(stream=self.stream, **row) for row in rows]
        for row in made if self.expected else ():
            # An exact replay makes releases again that stand in the ledger already. Not exact: not released.
            if self.expected.get(row.key, row) != row:
                raise OrderError(
                    f"the replay of step {row.step} is not exact: {row} instead of {self.expected[row.key]}"
                )
        for journal in self.journals:
            journal.append(made)
        for row in made:
            if not self.expected or self.expected.pop(row.key, None) is None:
                self.ledger.append(row)

    def _confirm(self, turn: Turn, query: str, released: Released) -> None:
        """Lets a release out only if it is the one that was made before, where it was; and notes it for a next time.

        That is asked at home alone: what was loaded elsewhere does not get into the other journals.
        """
        if self.home is None:
            return
        key = (self.stream, turn.batch, query)
        gradient = released.gradient
        numbers = [
            torch.linalg.vector_norm(gradient, dtype=torch.float64),
            gradient.sum(dtype=torch.float64),
        ]
        numbers += [value.sum() for value in released.extras.values()]
        fingerprint = " ".join(float(number).hex() for number in numbers)
        if not self.home.confirm(key, fingerprint):
            raise OrderError(
                f"the replay of step {released.step} gives another gradient than the run that it replays: the loss, the "
                "learning rate or the loop has changed. The same noise on another sum would cancel by subtraction, so nothing "
                "is released; engine.load(path) goes on with fresh noise"
            )

    # -- saving and loading ---------------------------------------------------------------------------

    def standing(self) -> Position:
        """Where the run stands, at the start of the batch that is out if one is."""
        if self._turn is not None and self._start is not None:
            return self._start
        public = users_streams(self.layout.device)
        noise = b"" if self.noise is None else self.noise.state
        return Position(self.sampling.state, noise, self._same_batch, public, self.tries)

    def planned_events(self, start: int, stop: int) -> list[Event]:
        """What updates will release."""
        rate = self.settings.sample_rate if self.plan.sample_rate is None else self.plan.sample_rate
        return self.plan.events(self.method.passes, self.method.beside(), rate, start, stop)

    def _check_attached(self) -> None:
        if self.detached:
            raise OrderError(
                "the engine was detached: this loader and this optimizer are private no more. Use your own"
            )

    def abandon(self) -> None:
        """Puts the batch that is out back, unreleased."""
        if self._turn is not None:
            self._abandon_chunk()
            self.weights.restore()
            self.power.let_go()
            self._turn = self._start = None
        self._ticket += 1

    def _abandon_chunk(self) -> None:
        assert self._turn is not None
        self._turn.out = False
        self._tape.take_back()
        self.recorder.close()

    def rekey(
        self, sampling: Stream, noise: Stream | None, stream: str, same_batch: bytes | None
    ) -> None:
        """Other secret streams, under the public name that rows drawn from them will carry."""
        self.sampling, self.noise, self.stream = sampling, noise, stream
        self._same_batch = same_batch

    def watch(self, folder: Path) -> None:
        """From now on every step is journaled in this folder, where a checkpoint of the run was saved.

        The journal in the first folder holds all that is executed from now on, here and by whoever loads a checkpoint, and is the run's
        home. Others may miss what is loaded elsewhere.
        """
        journal = self.journal_in(folder, self.name, whole=self.home is None)
        self.home = self.home or journal

    def journal_in(self, folder: Path, name: str, whole: bool = False) -> Journal:
        """The journal of the run ``name`` in a folder, which from now on hears of every step; begun if it is not there."""
        # Not as the user gave it: after a change of the working folder that would be another file.
        journal = Journal(Path(os.path.realpath(folder)) / name)
        for other in self.journals:
            if other.path == journal.path:
                return other
        journal.begin(whole)
        self.journals.append(journal)
        return journal

    def resume(self) -> None:
        """The next iterator goes on inside the epoch."""
        self._resumed = True

    def relayout(self, named: dict[str, nn.Parameter], shadows: list[LayerCapture]) -> None:
        """Other trained parameters from now on."""
        self.layout, self.shadows = Layout.of(named), shadows
        self.guard = Guard(self.module, self.optimizer, self.layout, self.recorder, shadows)
        self.weights = Weights(self.layout, self.module)
        self._room = sum_room(self.layout)

    @property
    def between_batches(self) -> bool:
        return self._turn is None

    # -- checks ---------------------------------------------------------------------------------------

    def check_may_grow(self) -> None:
        """Parameters can be added now, and to this method."""
        self._check_attached()
        if not self.between_batches or self.phase:
            raise OrderError(
                "parameters can't be added while a private batch is out; finish it with step() first"
            )
        if hasattr(self.method.rule, "init") or self.memory:
            raise OrderError(
                f"method {self.method.name!r} remembers something for every coordinate, so parameters can't be added to it"
            )
