"""What the layers for training frameworks share: the privacy terms, and updates as iterations."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..accounting import affordable, epsilon
from ..engine import CheckpointError, PoissonLoader, PrivacyEngine, PrivateOptimizer, Remedy
from ..engine._dataset_checks import check_loader
from ..engine._units import Units
from ..errors import AccountingError, NoGuarantee
from ..ledger import Ledger
from ..methods import _table as methods
from ..randomness import Stream

# The time between two computations of ε, in multiples of the time that one takes.
_SHARE = 20.0
# If a framework trains without an end, max_epsilon is searched up to this many updates.
_ENDLESS = 10**7


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The privacy of a run, in the terms of ``PrivacyEngine`` and its ``make_private``.

    Args:
        target_epsilon: The ε of the whole run. It determines σ, for the framework's number of
            steps.
        target_delta: The δ of ``target_epsilon`` and ``max_epsilon``.
        noise_multiplier: σ itself, instead of ``target_epsilon``.
        max_epsilon: Training ends before the update that would exceed it.
        method: A ``Method``, or the name of one.
        clipping: See ``make_private``.
        max_grad_norm: See ``make_private``.
        sample_rate: See ``make_private``.
        num_examples: See ``make_private``.
        physical_batch_size: See ``make_private``.
        loss_reduction: See ``make_private``.
        decouple_lr: See ``make_private``.
        normalize: See ``make_private``.
        empty: See ``make_private``.
        units: See ``make_private``.
        rows_per_unit: See ``make_private``.
        unit_reduction: See ``make_private``.
        accountant: See ``PrivacyEngine``.
        seed: See ``PrivacyEngine``.

    Raises:
        TypeError: Neither or both of ``target_epsilon`` and ``noise_multiplier`` are given, a δ is
            missing, or nothing says how to clip.
    """

    target_epsilon: float | None = None
    target_delta: float | None = None
    noise_multiplier: Any = None
    max_epsilon: float | None = None
    method: Any = None
    clipping: Any = None
    max_grad_norm: float | None = None
    sample_rate: float | None = None
    num_examples: int | None = None
    physical_batch_size: int | None = None
    loss_reduction: str = "mean"
    decouple_lr: bool = False
    normalize: str = "expected"
    empty: str = "noise"
    units: Any = field(default=None, compare=False, repr=False)
    rows_per_unit: int | None = None
    unit_reduction: str = "mean"
    accountant: str = "pld"
    seed: int | None = None

    def __post_init__(self) -> None:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise TypeError("give either target_epsilon= (which determines σ) or noise_multiplier=")
        for name in ("target_epsilon", "max_epsilon"):
            if getattr(self, name) is not None and self.target_delta is None:
                raise TypeError(f"{name}= needs target_delta=: an ε means nothing without its δ")
        if self.method is None and self.clipping is None and self.max_grad_norm is None:
            raise TypeError("give clipping= (a norm, a controller or a clip rule) or method=")
        if isinstance(self.method, str):
            object.__setattr__(self, "method", methods.get(self.method))

    def steps_per_epoch(self, loader: DataLoader) -> int:
        """Updates in an epoch: ceil(N/L)."""
        check_loader(loader)
        if self.sample_rate is not None:
            return max(1, math.ceil(1 / self.sample_rate - 1e-9))
        rows = len(loader.dataset)  # type: ignore[arg-type]
        size = self.num_examples or Units(self.units, rows, self.rows_per_unit).count
        assert loader.batch_size is not None
        return max(1, -(-size // loader.batch_size))

    def make_private(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        loader: DataLoader,
        steps: int | None,
        earlier: Ledger | None = None,
        **changes: Any,
    ) -> tuple[PrivacyEngine, PrivateOptimizer, PoissonLoader]:
        """Makes the engine of a run, its private optimizer and its loader.

        Args:
            module: The network.
            optimizer: The framework's optimizer.
            loader: The framework's loader.
            steps: The number of updates; None for training without an end.
            earlier: What an earlier run has released from the same data. The new run continues its
                ledger, and never uses its noise.
            **changes: Arguments of ``make_private`` that replace those of the terms.

        Returns:
            The engine, the optimizer and the loader.

        Raises:
            ValueError: ``target_epsilon`` is given, but training has no end.
        """
        engine = PrivacyEngine(accountant=self.accountant, seed=self._seed_after(earlier))
        own = ("target_epsilon", "noise_multiplier", "max_epsilon", "accountant", "seed")
        options: dict[str, Any] = {
            f.name: getattr(self, f.name) for f in fields(Terms) if f.name not in own
        }
        options |= {"module": module, "optimizer": optimizer, "data_loader": loader, **changes}
        if steps is not None:
            options["epochs"] = steps / self.steps_per_epoch(loader)
        if self.target_epsilon is None:
            made = engine.make_private(noise_multiplier=self.noise_multiplier, **options)
        elif steps is None:
            raise ValueError(
                "target_epsilon= needs a training with an end, because σ depends on its length: set"
                " a number of epochs or steps"
            )
        else:
            made = engine.make_private_with_epsilon(target_epsilon=self.target_epsilon, **options)
        if earlier is not None:
            engine.hooks.continue_ledger(earlier)
        return engine, made[1], made[2]

    def _seed_after(self, earlier: Ledger | None) -> int | None:
        runs = len({row.stream for row in earlier.rows()}) if earlier is not None else 0
        if self.seed is None or not runs:
            return self.seed
        return int.from_bytes(Stream.seeded(self.seed, f"run {runs + 1}").draw()[:8], "little")

    def allowed(self, engine: PrivacyEngine, steps: int | None) -> int | None:
        """How many updates in all ``max_epsilon`` allows; None if it is not given.

        Raises:
            ValueError: It does not allow a single update.
        """
        if self.max_epsilon is None:
            return None
        assert self.target_delta is not None
        spent, done = engine.ledger.events(), engine.updates
        found = affordable(
            lambda count: [*spent, *engine.planned_events(done, count)],
            done,
            max(done, _ENDLESS if steps is None else steps),
            self.max_epsilon,
            self.target_delta,
            self.accountant,
        )
        if found == 0:
            raise ValueError(
                f"max_epsilon={self.max_epsilon:g} does not allow a single update: raise"
                " max_epsilon or the noise multiplier"
            )
        return found


class Updates:
    """A loader each of whose items begins one update; ``rest`` gives the chunks that complete it.

    Frameworks count iterations. Here one iteration is one update, whatever the physical batches and
    the passes of the method are. The items have no end: the framework stops after ``len`` of them.
    ``limit`` is the largest number of updates in all.

    Args:
        loader: Draws the Poisson batches.
        engine: The engine of the run.
    """

    def __init__(self, loader: PoissonLoader, engine: PrivacyEngine) -> None:
        self.loader = loader
        self.limit: int | None = None
        # The state that torch's own generators are set to before the first item.
        self.rewind: dict[str, Tensor] | None = None
        self._engine, self._hooks = engine, engine.hooks
        self._chunks: Iterator[Any] = iter(())

    @property
    def dataset(self) -> Any:
        """The data set of the loader."""
        return self.loader.dataset

    @property
    def batch_size(self) -> int:
        """The batch size of the loader."""
        return self.loader.batch_size

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self.rewind is not None:
            self._hooks.rewind(self.rewind)
            self.rewind = None
        self._chunks = iter(self.loader)
        while self.limit is None or self._engine.updates < self.limit:
            try:
                chunk = next(self._chunks)
            except StopIteration:  # the end of the engine's epoch, not of the framework's
                self._chunks = iter(self.loader)
                continue
            yield chunk

    def resume(self, public: dict[str, Any], place: Path, hidden: Path) -> None:
        """Continues from a framework's checkpoint.

        With the secret streams in ``hidden`` the run is repeated bit for bit. Without them it
        continues with new noise, and warns.

        Args:
            public: The engine's state in the checkpoint.
            place: The folder of the checkpoint.
            hidden: The file of its secret streams.

        Raises:
            CheckpointError: The state does not fit this run.
        """
        found = hidden.exists()
        try:
            self._hooks.resume(public, place, hidden if found else None)
        except CheckpointError as problem:
            if problem.remedy is not Remedy.FRESH_STREAMS:
                raise
            raise CheckpointError(
                problem.reason,
                problem.remedy,
                f". To go on with fresh streams, resume without {hidden.name}",
            ) from None
        if found:
            # Frameworks draw from torch's generator before the first batch; the user's code must
            # find it as it was.
            self.rewind = public["public_streams"][0]
            return
        warnings.warn(
            f"{hidden.name} is not beside the checkpoint: training continues with fresh noise and"
            " batches, and steps executed after the checkpoint count as well. With the file they"
            " would be repeated bit for bit",
            stacklevel=3,
        )

    def rest(self) -> Iterator[Any]:
        """The chunks and passes that are still needed to complete the current update."""
        while self._hooks.inside_update:
            yield next(self._chunks)

    # The engine keeps the position in the epoch, so frameworks that ask get an empty state.
    def state_dict(self) -> dict[str, Any]:
        """Nothing: the engine keeps the state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: the engine keeps the state."""


class EpsilonEstimate:
    """ε for a progress bar and a log, computed only as often as that is cheap.

    **Guarantee.** The estimate is never below the ε that was spent. Between two computations it
    stays the same, so each computation counts the updates expected until the next one.

    Args:
        engine: The engine of the run.
        delta: The δ; None gives no estimate.
        limit: The largest number of updates in all.
    """

    def __init__(
        self, engine: PrivacyEngine, delta: float | None, limit: int | None = None
    ) -> None:
        self.engine, self.delta, self.limit = engine, delta, limit
        self._value: float | None = None
        self._covers = -1  # updates
        self._cost: float | None = None
        self._begun, self._first = time.perf_counter(), engine.updates

    def epsilon(self, exact: bool = False) -> float | None:
        """The ε after a few more updates, or so far if ``exact``; None if none is claimed."""
        if self.delta is None:
            return None
        updates = self.engine.updates
        if exact or updates > self._covers:
            if self._cost is None:
                self._at(updates)  # not timed: the first time is mostly imports
            now = time.perf_counter()
            pace = (updates - self._first) / max(now - self._begun, 1e-9)
            ahead = 0 if exact or self._cost is None else math.ceil(_SHARE * self._cost * pace)
            ends = [
                end
                for end in (self.limit, self.engine.planned_updates, updates + ahead)
                if end is not None
            ]
            self._covers = max(updates, min(ends))
            self._value = self._at(self._covers)
            self._cost = time.perf_counter() - now
        return self._value

    def _at(self, updates: int) -> float | None:
        try:
            events = [
                *self.engine.ledger.events(),
                *self.engine.planned_events(self.engine.updates, updates),
            ]
            if not self.engine.ledger.header.claims_privacy:
                return None
            assert self.delta is not None
            return epsilon(events, self.delta, self.engine.accountant)
        except (NoGuarantee, AccountingError):  # training need not end because of this
            return None


def released_before(engine: PrivacyEngine | None) -> Ledger | None:
    """The ledger of an earlier run of the same trainer; its engine is detached from the module."""
    if engine is None:
        return None
    if not engine.hooks.detached:
        engine.detach()
    return engine.ledger


def secret_path(path: Path) -> Path:
    """Where the secret streams of a checkpoint are: beside it, never in it."""
    return path.with_name(path.name + ".private")
