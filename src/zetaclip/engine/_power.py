"""The power iterations of spectral norms: none while a batch is out, one after each update.

torch iterates in every training forward, which writes two buffers, u and v. The number of forwards
is the number of chunks, and that depends on how many records were drawn: chunks of one batch would
see different weights, and u and v would tell their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm


class PowerIterations:
    """Takes over the iterations of all spectral norms of a module, of either kind that torch has.

    **Guarantee.** Between ``hold`` and ``let_go`` no forward moves u or v. ``iterate`` reads
    released weights and nothing else, so u and v are functions of the weights and of the number of
    updates.
    **Edge cases.** A layer in evaluation mode does not iterate, as in torch. A training forward
    between two batches iterates as torch does. A copy of the module that is made while a batch is
    out does not iterate until its ``n_power_iterations`` is set.
    """

    def __init__(self, module: nn.Module) -> None:
        self._hooks = [
            (part, hook)
            for part in module.modules()
            for hook in part._forward_pre_hooks.values()
            if isinstance(hook, SpectralNorm)
        ]
        self._weights = list(dict.fromkeys((part, name) for part, name, _ in _parametrized(module)))
        found: list[Any] = [
            *(hook for _, hook in self._hooks),
            *(norm for *_, norm in _parametrized(module)),
        ]
        self._norms = [(norm, norm.n_power_iterations) for norm in found]

    @staticmethod
    def of(module: nn.Module) -> PowerIterations | None:
        """Those of a module; None if it has no spectral norm."""
        found = PowerIterations(module)
        return found if found._norms else None

    def hold(self) -> None:
        for norm, _ in self._norms:
            norm.n_power_iterations = 0

    def let_go(self) -> None:
        for norm, iterations in self._norms:
            norm.n_power_iterations = iterations

    def iterate(self) -> None:
        """What a training forward would do to u and v, by the weights as they are now."""
        with torch.no_grad():
            for part, hook in self._hooks:
                hook(part, ())
            for part, name in self._weights:
                getattr(part, name)


def _parametrized(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for part in module.modules():
        made: Any = part.parametrizations if parametrize.is_parametrized(part) else {}
        for name, norms in made.items():
            for norm in norms:
                # That of a vector is exact, and has neither u nor v.
                if isinstance(norm, _SpectralNorm) and hasattr(norm, "_u"):
                    yield part, name, norm
