"""From a private gradient to the user's optimizer."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from ..control import Released
from ..gradients import Layout
from ..methods._updates import NoiseAware, scaled_rates
from ._order import OWN_OPTIMIZER, OrderError
from ._sharding import like


class Update:
    """The user's optimizer, which takes one step for each update.

    **Guarantee.** Between ``install`` and ``remove`` the optimizer steps only inside ``apply``, on
    a private gradient. A loop that kept the optimizer it had before ``make_private`` would
    otherwise train on raw gradients, beside the ledger.
    """

    def __init__(self, optimizer: Optimizer, decouple: bool, rereads: bool) -> None:
        self.optimizer = optimizer
        self._decouple = decouple
        self._rereads = rereads  # whether a release is read again after the optimizer's step
        self._told = optimizer if isinstance(optimizer, NoiseAware) else None
        self._open = False
        self._handle: Any = None

    def install(self) -> None:
        self._handle = self.optimizer.register_step_pre_hook(self._check)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _check(self, *_: Any) -> None:
        if not self._open:
            raise OrderError(OWN_OPTIMIZER)

    def apply(self, layout: Layout, released: Released, rate: float) -> None:
        """Puts the private gradient into ``.grad`` and steps.

        Learning rates are multiplied by ``rate`` for this step.
        """
        gradient, std = released.gradient, released.noise_std
        if self._decouple:
            gradient, std = gradient / released.sensitivity, std / released.sensitivity
        elif self._rereads:
            # Some optimizers write into .grad, and must not change what was released.
            gradient = gradient.clone()
        places = layout.places if layout.shards is None else layout.shards.places
        for parameter, place in zip(layout.parameters, places, strict=True):
            view = gradient.as_strided(*place)
            view = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
            parameter.grad = view if layout.shards is None else like(parameter, view)
        if self._told is not None:
            self._told.set_noise_std(std)
        self._open = True
        try:
            if rate == 1.0:
                self.optimizer.step()
            else:
                with scaled_rates(self.optimizer, rate):
                    self.optimizer.step()
        finally:
            self._open = False
