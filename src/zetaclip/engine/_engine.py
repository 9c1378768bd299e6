"""PrivacyEngine: turns an ordinary training loop into a private one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from os import PathLike
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..accounting import ACCOUNTANTS, noise_multiplier_for
from ..ledger import Ledger
from ..methods import Auto, Method, NoiseBudget, NoiseSchedule
from . import _checkpoint as checkpoint
from ._assemble import assemble
from ._criterion import check_criterion
from ._dataset_checks import check_loader, check_sampling
from ._facts import RunFacts
from ._group import on_first_rank
from ._loader import PoissonLoader
from ._optimizer import PrivateOptimizer, check_optimizer
from ._private_module import PrivateModule
from ._records import zero_row
from ._rehearsal import rehearse_order
from ._seed import Seed
from ._settings import Settings, settings_for
from ._terms import check_multiplier, composition, header
from ._units import Units
from ._validation import check_module


class PrivacyEngine(RunFacts):
    """Makes (module, optimizer, loader) private, keeps the ledger, and tells ε from it.

    **Guarantee.** With the default settings, training with what ``make_private`` returns is (ε,
    δ)-differentially private with respect to adding or removing one record, for the ε that
    ``get_epsilon(delta)`` computes from the ledger. It covers the weights, the gradients that the
    optimizer sees, and every C_t; it does not cover what the user's own loop prints or stores of
    batches, losses or validation data.
    **Edge cases.** A noise multiplier of 0 gives ε = inf. ``normalize="realized"`` and
    ``empty="skip"`` are the paper's literal forms: they work, and ``get_epsilon`` raises
    ``NoGuarantee``. A ``seed`` makes sampling and noise known to whoever knows it: for tests and
    public data only.
    """

    def __init__(self, accountant: str = "pld", seed: int | None = None) -> None:
        if accountant not in ACCOUNTANTS:
            raise ValueError(
                f"unknown accountant {accountant!r}; there are: {', '.join(ACCOUNTANTS)}"
            )
        super().__init__(accountant)
        self._seed = Seed(seed)

    # -- making private

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader,
        noise_multiplier: NoiseSchedule,
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
        units: Any = None,
        rows_per_unit: int | None = None,
        unit_reduction: str = "mean",
        views: int = 1,
        augment: Callable[[Any], Any] | None = None,
    ) -> tuple[Any, PrivateOptimizer, PoissonLoader]:
        """Makes a loop private: with what it returns, the loop itself stays as it is.

        In a process group of several ranks every rank calls it, and they train one model together.

        Args:
            module: changed in place, and returned.
            optimizer: of all trainable parameters of the module, and no others.
            data_loader: its data set is sampled anew; ``collate_fn`` and workers are kept.
            noise_multiplier: σ in DP-SGD's terms, or a public function of the updates done.
            clipping: a norm, a controller or a clip rule; or "auto", which goes with the optimizer
                ``zetaclip.optim.Auto`` and leaves nothing to tune.
            max_grad_norm: another name for a norm.
            method: a whole composition; by default DP-SGD.
            sample_rate: q, the probability of each record to join a batch; public. By default the
                loader's batch size over N.
            num_examples: N, the declared number of records; public. L = qN is the only divisor. By
                default it is taken from the loader, with a warning: N then depends on the data.
            physical_batch_size: rows at a time, on each rank; bounds memory, changes nothing else.
                None for the whole batch; with ``views``, for as many rows as it has without them.
            loss_reduction: how the loss reduces over the rows of a batch, "mean" or "sum". A
                weighted mean (``weight=``, ``ignore_index``, a mean over tokens) is neither: it
                divides by weights of the whole batch, so one record scales the gradients of all
                others before they are clipped, and ε does not hold. Use a sum for such a loss.
            decouple_lr: divide the private gradient by its sensitivity, so that moving C does not
                move the step size. ``Auto`` always has it so.
            normalize: "expected" divides by L. "realized" divides by the number of records drawn,
                as the paper has it; it withdraws the claim of ε.
            empty: "noise" releases noise alone for a batch without records. "skip" skips it, as the
                paper has it.
            epochs: needed by methods whose noise depends on the number of steps.
            target_delta: needed by the same methods.
            poisson_sampling: only True is offered.
            criterion: ``criterion(outputs, targets)`` is tried now, on made-up rows with the shapes
                of the first record, all together and each alone.
            units: One id for each row of the data set. Rows of one id are one unit, for instance
                the visits of one patient. Units are drawn, clipped and counted: ``num_examples``
                and the loader's batch size are numbers of units, and ε is for one unit.
            rows_per_unit: The largest number of rows that a unit brings into a batch; others are
                left out by secret coins. Needed with ``units``.
            unit_reduction: Whether a unit's gradient is the "mean" or the "sum" of its rows'.
            views: How many copies of each drawn row stand in the batch, to be augmented. Their
                gradients are averaged before clipping, so they cost no privacy.
            augment: ``augment(batch)`` changes every row by itself. It may draw from torch, numpy
                and Python, which follow a secret key of the batch then.

        Returns:
            The module, the optimizer behind a private step, and a Poisson loader; always these.

        Raises:
            ValidationError: the module can't be trained privately; the message says what to change.
            ValueError: An argument does not fit; with ``units`` or ``views`` also a module that
                sorts the rows of a batch.
            LossError: ``criterion`` mixes records, or is not reduced as declared. A loss that
                shows another reduction raises it at its first backward.
        """
        if self._loop is not None:
            raise RuntimeError(
                "this engine has made a module private already; use a new PrivacyEngine for "
                "another one"
            )
        check_module(module)
        check_optimizer(optimizer)
        check_loader(data_loader)
        check_sampling(poisson_sampling)
        chosen = composition(method, clipping, max_grad_norm).for_update(optimizer)
        check_multiplier(noise_multiplier)
        records = len(data_loader.dataset)  # type: ignore[arg-type]
        owners = Units(units, records, rows_per_unit, views)
        settings, declared = settings_for(
            data_loader,
            sample_rate,
            num_examples,
            units=owners,
            unit_reduction=unit_reduction,
            physical_batch_size=physical_batch_size,
            loss_reduction=loss_reduction,
            decouple_lr=decouple_lr or isinstance(optimizer, Auto),
            normalize=normalize,
            empty=empty,
        )
        steps = None if epochs is None else settings.steps_in(epochs)
        self._delta.look(target_delta, settings.num_examples)
        self._delta.target = target_delta
        if isinstance(optimizer, Auto):
            optimizer.plan(steps)
        chosen, plan = chosen.planned(self._budget(noise_multiplier, settings, steps, target_delta))
        settings = settings.at_rate(plan.sample_rate)
        model = PrivateModule(module, optimizer, settings)
        if criterion is not None:
            warn = partial(warnings.warn, stacklevel=3)
            check_criterion(module, criterion, zero_row(data_loader), settings.loss_reduction, warn)
        if not owners.trivial:
            rehearse_order(module, data_loader)
        ledger = Ledger(header(settings, declared, chosen, self.accountant, self._seed.known))
        self._loop = loop = assemble(
            model,
            optimizer,
            data_loader.dataset,
            owners,
            settings,
            chosen,
            plan,
            ledger,
            self._seed,
            steps,
        )
        return module, PrivateOptimizer(optimizer, loop), PoissonLoader(data_loader, loop, augment)

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
        """``make_private`` with the smallest σ whose ε, by this accountant, is within the target.

        Args:
            module: As in ``make_private``.
            optimizer: As in ``make_private``.
            data_loader: As in ``make_private``.
            target_epsilon: ε that ``epochs`` epochs may cost.
            target_delta: δ of that ε.
            epochs: Length of the planned run. A longer run costs more, and ``get_epsilon`` says so.
            sample_rate: As in ``make_private``.
            num_examples: As in ``make_private``.
            options: Any other argument of ``make_private`` but ``noise_multiplier``.

        Returns:
            What ``make_private`` returns.

        Raises:
            TypeError: ``noise_multiplier`` was given, too.
        """
        if "noise_multiplier" in options:
            raise TypeError(
                "make_private_with_epsilon finds σ; make_private takes noise_multiplier="
            )
        check_loader(data_loader)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # make_private says it again
            rows = len(data_loader.dataset)  # type: ignore[arg-type]
            owners = Units(options.get("units"), rows, options.get("rows_per_unit"))
            settings, _ = settings_for(data_loader, sample_rate, num_examples, units=owners)
        steps = settings.steps_in(epochs)
        target = (target_epsilon, target_delta, settings.sample_rate, steps, self.accountant)
        sigma = on_first_rank(lambda: noise_multiplier_for(*target), "the search for the noise")
        chosen = composition(*map(options.get, ("method", "clipping", "max_grad_norm")))
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
        self, sigma: NoiseSchedule, settings: Settings, steps: int | None, delta: float | None
    ) -> NoiseBudget:
        batch, epoch = settings.expected_batch_size, settings.steps_per_epoch
        return NoiseBudget(sigma, settings.sample_rate, steps, delta, self.accountant, batch, epoch)

    def reseed(self, purpose: str) -> None:
        """Takes other streams from the same seed, before anything is released.

        Without a seed they differ anyway.

        **Guarantee.** They have a name of their own as well: rows of one name and number are taken
        for one release wherever ledgers are put together, and would count once.
        """
        loop = self._private()
        if loop.state.step or len(self.ledger):
            raise RuntimeError("reseed() comes before the first step")
        if self._seed.known:
            loop.abandon()
            loop.state = self._seed.rekeyed(loop.state, purpose)

    # -- the run

    def observe(self, observer: Callable[[Any, Any, Any], None] | None) -> None:
        """Calls ``observer(reading, state before, state after)`` at every update of the controller.

        **Guarantee.** It sees what the controller sees: released values and weights, never data.
        """
        self._private().control.observer = observer

    def detach(self) -> None:
        """Gives the module its own forward back. The ledger stays, and so does what was spent."""
        self._private().detach()

    # -- saving and loading

    def save(
        self,
        path: str | PathLike[str],
        *,
        extra: dict[str, Any] | None = None,
        private: str | PathLike[str] | None = None,
    ) -> None:
        """Writes a checkpoint, and the secret streams to ``<path>.private``, each atomically.

        Never publish the secret file. From now on each step is also noted in a journal beside the
        checkpoint, before it is executed. With several ranks every rank calls this, and rank 0
        writes.

        Args:
            path: Where the public checkpoint goes.
            extra: Tensors and plain values of your own, nothing of the data. They are kept in the
                checkpoint, and ``load`` gives them back.
            private: Where the secret file goes, if not to ``<path>.private``.

        **Edge cases.** A checkpoint taken while a batch is out holds the state at the start of that
        batch.
        """
        checkpoint.save(self._private(), path, extra, private)

    def load(
        self,
        path: str | PathLike[str],
        replay: bool = False,
        *,
        private: str | PathLike[str] | None = None,
    ) -> dict[str, Any] | None:
        """Continues from a checkpoint, with fresh streams or the old ones.

        With several ranks every rank calls this, and rank 0 reads.

        Args:
            path: The public checkpoint.
            replay: Whether the old streams go on, so that the same batches and noise come again bit
                for bit. Steps that were executed after the checkpoint then count once. False takes
                fresh streams, and those steps stay in the ledger and count.
            private: The secret file, if it is not ``<path>.private``.

        Returns:
            ``extra`` as it was given to ``save``.

        Raises:
            CheckpointError: The checkpoint does not fit this run. A replay also needs the same
                configuration, data, device, number of threads and number of ranks.
        """
        return checkpoint.load(self._private(), path, replay, private)
