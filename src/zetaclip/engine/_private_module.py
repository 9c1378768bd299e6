"""The user's module while it is trained privately, with all that watches it."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..gradients import CaptureBuffer, Chunk, Layout, make_shadows
from ..gradients.layout import spread
from ..gradients.units import by_unit
from ..mechanism import Room
from ..randomness._forward import ForwardRng
from ._group import Group, Ranks
from ._guard import Guard
from ._loss_check import LossCheck
from ._power import PowerIterations
from ._settings import Settings
from ._sharding import Sharding, is_spread
from ._validation import (
    claim,
    raise_refusals,
    release,
    structural_refusals,
    trained_parameters,
)
from ._weights import Weights


class PrivateModule:
    """What is held, lent and recorded while a chunk is out, and given back afterwards.

    **Guarantee.** Whenever no batch is open, the module holds θ, spectral norms iterate as in
    torch, and torch's generators are where the user left them. While a chunk is out, dropout
    follows a secret key, and every gradient of a trained parameter is recorded for each record
    apart.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, settings: Settings) -> None:
        """Looks at the module and refuses what can't be trained privately; changes nothing."""
        self.module = module
        self.recorder = CaptureBuffer()
        self.power = PowerIterations.of(module)  # None for a module without spectral norms
        self._optimizer = optimizer
        self._mean = settings.loss_reduction == "mean"
        self.rounds_by_rows = False  # whether the chunk that was taken back last was
        self._unit_mean = settings.unit_reduction == "mean"
        self._look()
        device = self.layout.device
        self.recorder.anchor.data = self.recorder.anchor.data.to(device)
        self.losses = LossCheck(self.recorder, settings)
        self._rng = ForwardRng(device)

    def _look(self) -> None:
        sharding = self.sharding = Sharding.of(self.module)  # None if each rank has all weights
        named = trained_parameters(self.module, self._optimizer)
        trained = set(named.values())
        shadows, refusals = make_shadows(self.module, trained, self.recorder)
        if sharding is None:
            raise_refusals([*structural_refusals(self.module), *refusals])
            layout = Layout.of(named)
        else:
            known = structural_refusals(self.module, sharding.held())
            raise_refusals([*known, *refusals, *sharding.refusals(self.module, trained, shadows)])
            layout = spread(Layout.of(named), dist.get_rank(), dist.get_world_size())
        self.named, self.layout, self.shadows = named, layout, shadows
        self.guard = Guard(
            self.module, self._optimizer, self.layout, self.recorder, shadows, sharding
        )
        self.weights = Weights(self.layout, self.module)
        self.room = Room(self.layout)

    def attach(self, group: Group) -> None:
        """From now on the module's layers record what their parameters do to each record's loss."""
        if self.power is not None:
            self.power.iterate()  # for the first batch; later ones follow an update
        if self.sharding is not None:
            assert isinstance(group, Ranks)
            self.sharding.attach(group, self.shadows)
        for shadow in self.shadows:
            shadow.attach()

    def refresh(self) -> None:
        """The optimizer got further parameters: looks at the module again, between two batches."""
        before, shadows = dict(vars(self)), self.shadows
        for shadow in shadows:
            shadow.detach()
        try:
            self._look()
            release(before["named"].values())
            claim(self.named)
        except BaseException:
            vars(self).update(before)
            release(self.named.values())
            claim(self.named)
            for shadow in shadows:
                shadow.attach()
            raise
        for shadow in self.shadows:
            shadow.attach()

    def detach(self) -> None:
        """Gives the module its own forward back, and its parameters to other engines."""
        release(self.layout.parameters)
        for shadow in self.shadows:
            shadow.detach()
        if self.sharding is not None:
            self.sharding.detach()

    def lend(self, rows: int, key: bytes) -> dict[str, Tensor]:
        """A chunk of so many records goes out; its dropout masks follow the key.

        Returns:
            The states of torch's generators, as the user left them.
        """
        self.guard.hand_out()
        if self.power is not None:
            self.power.hold()
        public = self._rng.lend(key)
        self.recorder.open(max(1, rows))
        self.losses.lent = self.recorder.turn
        return public

    def take(self, counts: Tensor | None, records: int) -> Iterable[Chunk]:
        """Takes a chunk back with its contributions, after the last check of what must not happen.

        A chunk without records gives nothing: its row of zeros is nobody's record.

        Args:
            counts: How many rows each unit has; None if each row is a unit of its own.
            records: The number of rows.
        """
        self.guard.before_release()
        self.losses.close()
        rows, divided = self.recorder.rows, self._mean and not self.recorder.undivided
        # Gradients of a mean in half precision are rounded by the number of records.
        self.rounds_by_rows = divided and self.recorder.short and rows > 1
        received = self.recorder.take()
        self._rng.take_back()
        if not records:
            return ()
        scale = float(rows) if divided else 1.0
        if counts is None:
            return (Chunk(received, self.layout, rows, scale),)
        return (
            Chunk(joined, self.layout, units, scale)
            for joined, units in by_unit(received, counts.to(self.layout.device), self._unit_mean)
        )

    def take_back(self) -> None:
        """Whatever is out is out no more, and counts nothing."""
        self._rng.take_back()
        self.recorder.close()

    def rest(self) -> None:
        """The batch is not open any more: θ, and power iterations as in torch."""
        self.weights.restore()
        if self.power is not None:
            self.power.let_go()

    def tensors(self) -> dict[str, Tensor]:
        """What every rank has alike: all parameters and buffers but those that are spread."""
        every = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {name: tensor for name, tensor in every.items() if not is_spread(tensor)}
