"""PrivacyEngine: turns an ordinary training loop into a private one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..accounting import ACCOUNTANTS, epsilon, noise_multiplier_for
from ..control.base import bound_probe
from ..errors import NoGuarantee, OwnerWarning
from ..gradients import CaptureBuffer, LayerCapture, make_shadows
from ..ledger import Event, Header, Ledger
from ..methods import Budget, Method, Schedule, at
from ..randomness import Stream
from . import _checkpoint as checkpoint
from ._distributed import Ranks, join, on_first_rank, ranks
from ._optimizer import PrivateOptimizer, check_optimizer
from ._parity import dry_run
from ._rehearsal import check_criterion
from ._run import Run
from ._sampling import PoissonLoader, check_loader, zero_row
from ._settings import Settings, settings_for
from ._validation import (
    check_module,
    claim,
    raise_refusals,
    release,
    structural_refusals,
    trained_parameters,
)


@dataclass(frozen=True)
class LayerPath:
    """Which path the per-example gradients of one parameter take."""

    parameter: str
    shape: tuple[int, ...]
    layer: str
    path: str


class Description(tuple[LayerPath, ...]):
    """The paths of all trained parameters; prints as a table."""

    def __str__(self) -> str:
        rows = [("parameter", "shape", "layer", "path")]
        rows += [
            (p.parameter, "x".join(map(str, p.shape)) or "scalar", p.layer, p.path) for p in self
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


class PrivacyEngine:
    """Makes (module, optimizer, loader) private, keeps the ledger, and tells ε from it.

    **Guarantee.** With the default settings, training with what ``make_private`` returns is (ε, δ)-differentially
    private with respect to adding or removing one record, for the ε that ``get_epsilon(delta)`` computes from the
    ledger. It covers the weights, the gradients that the optimizer sees, and every C_t; it does not cover what the
    user's own loop prints or stores of batches, losses or validation data.
    **Edge cases.** A noise multiplier of 0 gives ε = inf. ``normalize="realized"`` and ``empty="skip"`` are the paper's
    literal forms: they work, and ``get_epsilon`` raises ``NoGuarantee``. A ``seed`` makes sampling and noise known to
    whoever knows it: for tests and public data only.
    """

    def __init__(self, accountant: str = "prv", seed: int | None = None) -> None:
        if accountant not in ACCOUNTANTS:
            raise ValueError(
                f"unknown accountant {accountant!r}; there are: {', '.join(ACCOUNTANTS)}"
            )
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"seed must be an int or None, not {type(seed).__name__}")
        self.accountant = accountant
        self._seed = seed
        self._run: Run | None = None
        self._recorder = CaptureBuffer()
        self._said_delta = False

    # -- making private -------------------------------------------------------------------------------

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader,
        noise_multiplier: Schedule,
        clipping: Any = None,
        max_grad_norm: float | None = None,
        method: Method | None = None,
        sample_rate: float | None = None,
        num_examples: int | None = None,
        physical_batch_size: int | None = None,
        loss_reduction: str = "mean",
        decouple_lr: bool = False,
        normalize: str = "expected",
        empty: str = "noise",
        epochs: float | None = None,
        target_delta: float | None = None,
        poisson_sampling: bool = True,
        criterion: Callable[[Any, Any], Any] | None = None,
    ) -> tuple[Any, PrivateOptimizer, PoissonLoader]:
        """The same module, the optimizer behind a private step, and a Poisson loader; always these three.

        ``noise_multiplier`` is σ in DP-SGD's terms: a number, or a public function of the number of updates done.
        ``clipping`` is a norm, a controller or a clip rule (``max_grad_norm`` is accepted for a norm), ``method`` a whole
        composition. ``sample_rate`` and ``num_examples`` declare q and N; L = qN is the only divisor. Without them they are
        taken from the loader, with a warning, because N is then a function of the private data.

        ``physical_batch_size`` bounds memory and changes nothing else. ``loss_reduction`` says how the loss that is run
        backward reduces over the rows of a batch: "mean" over just these rows, or "sum". A weighted mean is neither
        (``F.cross_entropy(..., weight=...)``, ``ignore_index``, a mean over tokens): it divides by weights of the whole batch, so
        one record scales the gradients of all others before they are clipped, and ε does not hold. Use ``reduction="sum"`` in such
        a loss with ``loss_reduction="sum"`` here, or weigh each record's own loss and divide by the rows; ``validate`` tells.
        ``decouple_lr`` divides the private gradient by the step's sensitivity, so that moving C does not move the step size.
        ``epochs`` and ``target_delta`` are needed by methods whose noise depends on the number of steps.

        A loss whose graph shows another reduction than the declared one raises ``LossError`` at its first backward. ``criterion`` lets it
        be checked now, and more closely: ``criterion(outputs, targets)`` is computed on made-up rows, all together and each
        alone. Only the shapes of the first record are used. One that mixes records, or is not reduced as declared, is a ``LossError``.

        In a process group of several ranks every rank calls it, and they train one model together: q, N and L are those of
        all ranks, ``physical_batch_size`` is each rank's own.
        """
        if self._run is not None:
            raise RuntimeError(
                "this engine has made a module private already; use a new PrivacyEngine for another one"
            )
        check_module(module)
        check_optimizer(optimizer)
        check_loader(data_loader)
        if not poisson_sampling:
            raise ValueError(
                "poisson_sampling=False: shuffled fixed-size batches are not what the accountants assume, and their ε would be "
                "too small. Only Poisson sampling is offered"
            )
        chosen = _composition(method, clipping, max_grad_norm)
        chosen.check_update(optimizer)
        _check_multiplier(noise_multiplier)
        settings, declared = settings_for(
            data_loader,
            sample_rate,
            num_examples,
            physical_batch_size=physical_batch_size,
            loss_reduction=loss_reduction,
            decouple_lr=decouple_lr,
            normalize=normalize,
            empty=empty,
        )
        steps = None if epochs is None else settings.steps_in(epochs)
        self._warn_of_delta(target_delta, settings.num_examples)
        chosen, plan = chosen.planned(self._budget(noise_multiplier, settings, steps, target_delta))
        if plan.sample_rate is not None:
            settings = replace(
                settings,
                sample_rate=plan.sample_rate,
                expected_batch_size=plan.sample_rate * settings.num_examples,
            )

        named = trained_parameters(module, optimizer)
        shadows, refusals = make_shadows(module, set(named.values()), self._recorder)
        raise_refusals(list(structural_refusals(module)) + refusals)
        if criterion is not None:
            warn = partial(warnings.warn, stacklevel=3)
            check_criterion(module, criterion, zero_row(data_loader), settings.loss_reduction, warn)
        probe = bound_probe(chosen.controller, module, named)

        claim(named)
        try:
            self._recorder.anchor.data = self._recorder.anchor.data.to(
                next(iter(named.values())).device
            )
            self._run = Run(
                module=module,
                optimizer=optimizer,
                named=named,
                recorder=self._recorder,
                shadows=shadows,
                dataset=data_loader.dataset,
                settings=settings,
                method=chosen,
                probe=probe,
                plan=plan,
                ledger=Ledger(self._header(settings, declared, chosen)),
                sampling=self._stream("sampling"),
                noise=self._stream("noise"),
                stream=self._stream_name("name"),
                planned_steps=steps,
            )
            self._run.refresh_requested = self._refresh
            others = ranks()
            if others is not None:
                join(self._run, others)
        except BaseException:  # the user mends it and calls again
            release(named.values())
            self._run = None
            raise
        self._run.gate.install()
        self._run.power.iterate()  # for the first batch; later ones follow an update
        for shadow in shadows:
            shadow.attach()
        return module, PrivateOptimizer(optimizer, self._run), PoissonLoader(data_loader, self._run)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader,
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        sample_rate: float | None = None,
        num_examples: int | None = None,
        **options: Any,
    ) -> tuple[Any, PrivateOptimizer, PoissonLoader]:
        """``make_private`` with the smallest σ whose ε, by this engine's accountant, is at or below the target.

        The target is what ``epochs`` epochs cost; a run that goes on costs more, and ``get_epsilon`` says so. The other
        arguments are those of ``make_private``.
        """
        if "noise_multiplier" in options:
            raise TypeError(
                "make_private_with_epsilon finds noise_multiplier itself; use make_private to set it"
            )
        check_loader(data_loader)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # make_private says it again
            settings, _ = settings_for(data_loader, sample_rate, num_examples)
        steps = settings.steps_in(epochs)
        target = (target_epsilon, target_delta, settings.sample_rate, steps, self.accountant)
        sigma = on_first_rank(lambda: noise_multiplier_for(*target), "the search for the noise")
        chosen = _composition(
            *(options.get(name) for name in ("method", "clipping", "max_grad_norm"))
        )
        chosen.check_budgeted(self._budget(sigma, settings, steps, target_delta))
        return self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=sigma,
            sample_rate=sample_rate,
            num_examples=num_examples,
            epochs=epochs,
            target_delta=target_delta,
            **options,
        )

    def _budget(
        self, sigma: Schedule, settings: Settings, steps: int | None, delta: float | None
    ) -> Budget:
        batch, epoch = settings.expected_batch_size, settings.steps_per_epoch
        return Budget(sigma, settings.sample_rate, steps, delta, self.accountant, batch, epoch)

    def _stream(self, name: str) -> Stream:
        return Stream.fresh() if self._seed is None else Stream.seeded(self._seed, name)

    def _stream_name(self, label: str) -> str | None:
        """What the rows that are drawn from a seed's streams carry: other streams of it need another name."""
        return None if self._seed is None else Stream.seeded(self._seed, label).state.hex()[:16]

    def reseed(self, purpose: str) -> None:
        """Other streams from the same seed, for each purpose their own; before anything is released. Without a seed they differ anyway.

        **Guarantee.** They have a name of their own as well: rows of one name and number are taken for one release wherever
        ledgers are put together, and would count once.
        """
        run = self._private()
        if run.step_count or len(run.ledger):
            raise RuntimeError("reseed() comes before the first step")
        name = self._stream_name(f"name, {purpose}")
        if name is not None:
            run.abandon()
            noise = (
                None if run.noise is None else self._stream(f"noise, {purpose}")
            )  # one rank alone has any
            run.rekey(self._stream(f"sampling, {purpose}"), noise, name, None)

    def _header(self, settings: Settings, declared: bool, method: Method) -> Header:
        literal = []
        if settings.normalize == "realized":
            literal.append('normalize="realized" divides by the private size of the batch')
        if settings.empty == "skip":
            literal.append('empty="skip" shows which batches were empty')
        if method.unsound:
            literal.append(f"method {method.name}: {method.unsound}")
        chosen = ", ".join(
            f"{name}={value!r}"
            for name, value in method.chosen.items()
            if value != method.options[name][0]
        )
        return Header(
            num_examples=settings.num_examples,
            num_examples_source="declared" if declared else "taken from the data",
            expected_batch_size=settings.expected_batch_size,
            accountant=self.accountant,
            method=method.name,
            claim="none: " + "; ".join(literal) if literal else "differential privacy",
            noise_seed_known=self._seed is not None,
            notes=(
                f"clip rule {method.rule.name}; C by {checkpoint.described(method.controller)}",
                "noise by chacha12, on a public grid",
                *([f"method options {chosen}"] if chosen else []),
            ),
        )

    def _refresh(self) -> None:
        """The optimizer got further parameters: look at the module again, between two batches."""
        run = self._private()
        named = trained_parameters(run.module, run.optimizer)
        for shadow in run.shadows:
            shadow.detach()
        try:
            shadows, refusals = make_shadows(run.module, set(named.values()), self._recorder)
            raise_refusals(list(structural_refusals(run.module)) + refusals)
        except BaseException:
            for shadow in run.shadows:
                shadow.attach()
            raise
        for shadow in shadows:
            shadow.attach()
        release(run.layout.parameters)
        claim(named)
        run.relayout(named, shadows)

    # -- what it tells --------------------------------------------------------------------------------

    def _private(self) -> Run:
        if self._run is None:
            raise RuntimeError("nothing is private yet: call make_private first")
        return self._run

    @property
    def ledger(self) -> Ledger:
        """Everything that was released, and the terms it was released under."""
        return self._private().ledger

    def _warn_of_delta(self, delta: float | None, size: int) -> None:
        """Once: a δ of 1/N allows a mechanism that publishes one record as it is."""
        if delta is not None and delta * size >= 1 and not self._said_delta:
            self._said_delta = True
            warnings.warn(
                f"delta = {delta:g} is at least 1/N: with such a δ, publishing whole records at random would pass for private. Take one well "
                f"below {1 / size:.2g}",
                OwnerWarning,
                stacklevel=3,
            )

    def get_epsilon(self, delta: float, accountant: str | None = None) -> float:
        """ε of what has been released so far, from the ledger, by this engine's accountant or another one."""
        ledger = self.ledger
        if not ledger.header.claims_privacy:
            raise NoGuarantee(ledger.header.claim.removeprefix("none: "))
        self._warn_of_delta(delta, ledger.header.num_examples)
        return epsilon(ledger.events(), delta, accountant or self.accountant)

    @property
    def ranks(self) -> Ranks | None:
        """This process's side of the group that trains together; None with one process."""
        return self._private().ranks

    @property
    def updates(self) -> int:
        """How many updates have been taken."""
        return self._private().step_count

    @property
    def planned_updates(self) -> int | None:
        """How many updates the noise was chosen for; None if any number."""
        run = self._private()
        return run.plan.steps if run.plan.steps is not None else run.planned_steps

    @property
    def controller(self) -> Any:
        """What moves C."""
        return self._private().method.controller

    @property
    def control_seconds(self) -> float:
        """Time spent on reading what the controller reads and on moving C."""
        return self._private().control_seconds

    def planned_events(self, start: int, stop: int) -> list[Event]:
        """What the updates from number ``start`` up to, not including, ``stop`` will release, by the plan."""
        return self._private().planned_events(start, stop)

    def describe(self) -> Description:
        """Which path the per-example gradients of each parameter take."""
        run = self._private()
        found: dict[nn.Parameter, list[LayerCapture]] = {}
        for shadow in run.shadows:
            for parameter in shadow.parameters.values():
                found.setdefault(parameter, []).append(shadow)
        lines = []
        for name, parameter in zip(run.layout.names, run.layout.parameters, strict=True):
            shadows = found[parameter]
            layers = ", ".join(f"{s.name} ({type(s.module).__name__})" for s in shadows)
            lines.append(
                LayerPath(
                    name,
                    tuple(parameter.shape),
                    layers,
                    ", ".join(dict.fromkeys(s.path for s in shadows)),
                )
            )
        return Description(lines)

    def validate(
        self,
        batch: Any,
        loss_fn: Callable[[nn.Module, Any], Any],
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> list[str]:
        """Problems that training on such a batch would meet, by name; an empty list if none.

        Runs ``loss_fn(module, batch)`` forward and backward, on a number of records that equals no other dimension in sight,
        and on each of them alone. With ``collate_fn``, ``batch`` is a list of records, short and long, and each is collated
        alone, too, as in ``check_parity``: padding that reaches a loss is found then. Nothing is released and nothing changes.
        """
        run = self._private()
        if not run.between_batches:
            raise RuntimeError("validate() while a private batch is out; call it before training")
        return dry_run(
            run.module,
            run.layout,
            self._recorder,
            batch,
            loss_fn,
            run.settings.loss_reduction,
            collate_fn,
        )

    def observe(self, observer: Callable[[Any, Any, Any], None] | None) -> None:
        """Calls ``observer(reading, state before, state after)`` whenever the controller has updated C.

        **Guarantee.** It sees what the controller sees: released values and weights, never data.
        """
        self._private().observer = observer

    def detach(self) -> None:
        """Gives the module its own forward back. The ledger stays, and so does what was spent."""
        run = self._private()
        run.abandon()
        run.detached = True
        run.gate.remove()
        release(run.layout.parameters)
        for shadow in run.shadows:
            shadow.detach()
        if hasattr(run.method.controller, "finish") and (run.ranks is None or run.ranks.first):
            run.method.controller.finish(run.control)  # warns of a probe that could never be read

    # -- saving and loading ---------------------------------------------------------------------------

    def save(
        self,
        path: str | PathLike[str],
        *,
        extra: dict[str, Any] | None = None,
        private: str | PathLike[str] | None = None,
    ) -> None:
        """Writes a checkpoint to ``path`` and the secret streams to ``<path>.private`` (mode 0600), each atomically.

        Never publish the second file; ``private`` puts it elsewhere. ``extra`` (tensors and plain values, nothing of the
        data) goes into the checkpoint and comes back from ``load``. A checkpoint taken while a batch is out holds the state at that batch's start.
        From now on each step is also noted, before it is executed, in a journal beside the checkpoint. With several ranks every
        rank calls it, and rank 0 writes.
        """
        checkpoint.save(self._private(), path, extra, private)

    def load(
        self,
        path: str | PathLike[str],
        replay: bool = False,
        *,
        private: str | PathLike[str] | None = None,
    ) -> dict[str, Any] | None:
        """Goes on from a checkpoint, with fresh secret streams, or with the old ones (``replay=True``); returns its ``extra``.

        Fresh: steps that were executed after the checkpoint stay in the ledger and count. Replay: the same batches and
        noise come again bit for bit, so those steps count once; refused unless configuration, data, device, thread
        count and number of ranks are what they were. With several ranks every rank calls it, and rank 0 reads.
        """
        return checkpoint.load(self._private(), path, replay, private)


def _composition(method: Method | None, clipping: Any, max_grad_norm: float | None) -> Method:
    if max_grad_norm is not None:
        if clipping is not None:
            raise TypeError("clipping= and max_grad_norm= are the same thing; give one of them")
        clipping = max_grad_norm
    if method is None:
        if clipping is None:
            raise TypeError("give clipping= (a norm, a controller or a clip rule) or method=")
        method = Method()
    elif not isinstance(method, Method):
        raise TypeError(f"method must be a zetaclip Method, not {type(method).__name__}")
    if not method.private:
        raise ValueError(
            f"method {method.name!r} is not private: train with an ordinary loop, without make_private"
        )
    return method.with_clipping(clipping)


def _check_multiplier(noise_multiplier: Schedule) -> None:
    value = at(noise_multiplier, 0)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(
            f"noise_multiplier must be a finite number >= 0, or a function of the step that gives one, not {value}"
        )
