"""What an engine tells of its run: the ledger, ε, and what is planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..accounting import epsilon
from ..errors import NoGuarantee
from ..ledger import Event, Ledger
from ..words import counted
from ._describe import Description, described_paths
from ._dry_run import dry_run
from ._group import Ranks
from ._hooks import Hooks
from ._loop import PrivateLoop
from ._terms import DeltaCheck


class RunFacts:
    """What can be asked of a run. Nothing here releases anything or moves the run.

    **Guarantee.** ε comes from the rows of the ledger, never from the settings.
    """

    def __init__(self, accountant: str) -> None:
        self.accountant = accountant
        self._loop: PrivateLoop | None = None
        self._delta = DeltaCheck()

    def _private(self) -> PrivateLoop:
        if self._loop is None:
            raise RuntimeError("nothing is private yet: call make_private first")
        return self._loop

    @property
    def ledger(self) -> Ledger:
        """Everything that was released, and the terms it was released under."""
        return self._private().log.ledger

    def __repr__(self) -> str:
        if self._loop is None:
            return f"PrivacyEngine(nothing private yet, accountant {self.accountant})"
        planned = "" if self.planned_updates is None else f" of {self.planned_updates} planned"
        return f"PrivacyEngine({counted(self.updates, 'update')}{planned}, {self.ledger!r})"

    def get_epsilon(self, delta: float | None = None, accountant: str | None = None) -> float:
        """ε of what has been released so far.

        By default at the run's ``target_delta`` and by this engine's accountant.
        """
        ledger = self.ledger
        delta = self._delta.chosen(delta)
        if not ledger.header.claims_privacy:
            raise NoGuarantee(ledger.header.claim.removeprefix("none: "))
        self._delta.look(delta, ledger.header.num_examples)
        return epsilon(ledger.events(), delta, accountant or self.accountant)

    @property
    def ranks(self) -> Ranks | None:
        """This process's side of the group that trains together; None with one process."""
        group = self._private().group
        return group if isinstance(group, Ranks) else None

    @property
    def updates(self) -> int:
        """How many updates have been taken."""
        return self._private().state.step

    @property
    def planned_updates(self) -> int | None:
        """How many updates the noise was chosen for; None if any number."""
        return self._private().batches.planned_steps

    @property
    def controller(self) -> Any:
        """What moves C."""
        return self._private().method.controller

    @property
    def control_seconds(self) -> float:
        """Time spent on reading what the controller reads and on moving C."""
        return self._private().control.seconds

    def planned_events(self, start: int, stop: int) -> list[Event]:
        """What the updates from number ``start`` up to before ``stop`` will release, as planned."""
        return self._private().batches.planned_events(start, stop)

    @property
    def hooks(self) -> Hooks:
        """For frameworks that run the training loop themselves."""
        return Hooks(self._private())

    def describe(self) -> Description:
        """Which path the per-example gradients of each parameter take."""
        return described_paths(self._private().model)

    def validate(
        self,
        batch: Any,
        loss_fn: Callable[[nn.Module, Any], Any],
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> list[str]:
        """Finds problems that training on such a batch would meet.

        It runs forward and backward on a few records, and on each of them alone. Their number
        equals no other dimension of the model. Nothing is released and nothing changes.

        Args:
            batch: A batch as the loader gives it. With ``collate_fn``, a list of records, short and
                long.
            loss_fn: ``loss_fn(module, batch)`` returns the loss of a batch.
            collate_fn: Makes a batch of records. Each record is also collated alone, as in
                ``check_parity``, which finds padding that reaches the loss.

        Returns:
            A problem per part, by its name; an empty list if there is none.
        """
        loop = self._private()
        if loop.batch is not None:
            raise RuntimeError("validate() while a private batch is out; call it before training")
        model, reduction = loop.model, loop.settings.loss_reduction
        return dry_run(
            model.module, model.layout, model.recorder, batch, loss_fn, reduction, collate_fn
        )
