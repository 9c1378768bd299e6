"""θ, and the perturbed weights that some methods take a gradient at."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..gradients import Layout


class Weights:
    """Moves the trained parameters while a batch is out, and puts them back.

    On the CPU the moved weights are written to memory of their own, and the parameters point there
    meanwhile: θ itself is neither copied nor touched. Elsewhere, or where other tensors share a
    parameter's memory and must move along, θ is copied away and back.

    **Guarantee.** After ``restore`` the parameters are bit for bit what they were before ``move``,
    in the same memory: nothing is subtracted. θ is kept before anything moves, so an interrupt in
    between can't lose it.
    """

    def __init__(self, layout: Layout, module: nn.Module) -> None:
        self._layout = layout
        self._theta: list[Tensor] | None = None  # while the weights are moved
        self._spare: list[Tensor] | None = (
            None  # kept from one batch to the next: moved weights, or a copy of θ
        )
        # Methods that move weights are refused where these are spread over ranks.
        self._lent = layout.shards is None and _lendable(layout.parameters, module)

    def move(self, vector: Tensor, distance: float) -> None:
        """Moves the weights so far along a flat vector.

        A vector that is zero or not finite moves nothing.
        """
        if vector.shape != (self._layout.numel,):
            raise ValueError(
                f"a direction of shape {tuple(vector.shape)} for {self._layout.numel} parameters"
            )
        if not distance:
            return
        parameters: list[Tensor] = list(self._layout.parameters)
        if self._spare is None:
            self._spare = [torch.empty_like(p) for p in parameters]
        if self._lent:
            if self._advance(self._spare, parameters, vector, distance):
                self._theta = [p.data for p in parameters]
                self._point(self._spare)
        else:
            with torch.no_grad():
                torch._foreach_copy_(self._spare, parameters)
            self._theta = self._spare
            self._advance(parameters, parameters, vector, distance)

    def restore(self) -> None:
        if self._theta is not None:
            self._put(self._theta)
            self._theta = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The module holds θ inside, whatever is out."""
        if self._theta is None:
            yield
            return
        moved = [p.data if self._lent else p.detach().clone() for p in self._layout.parameters]
        with ExitStack() as kept:
            # In the end the parameters are what they were, and must not look as if somebody had
            # written to them.
            for parameter in self._layout.parameters:
                kept.enter_context(_unsafe_preserve_version_counter(parameter))
            self._put(self._theta)
            try:
                yield
            finally:
                self._put(moved)

    def _advance(
        self, places: list[Tensor], parameters: list[Tensor], vector: Tensor, distance: float
    ) -> bool:
        """Whether there was a direction to go in."""
        length = float(torch.linalg.vector_norm(vector))
        if not 0.0 < length < math.inf:
            return False
        with torch.no_grad():
            for place, p, part in zip(
                places, parameters, self._layout.views(vector * (distance / length)), strict=True
            ):
                torch.add(p, part.to(p.dtype), out=place)
        return True

    def _put(self, values: list[Tensor]) -> None:
        if self._lent:
            self._point(values)
        else:
            with torch.no_grad():
                torch._foreach_copy_(list(self._layout.parameters), values)

    def _point(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._layout.parameters, values, strict=True):
            parameter.data = value
        # A graph that was built on the other weights is as stale as if they had been written over.
        torch.autograd.graph.increment_version(self._layout.parameters)


def _lendable(parameters: Sequence[Tensor], module: nn.Module) -> bool:
    """Whether parameters can be pointed at other memory without being seen elsewhere.

    Another tensor of the module, or another process, may share the memory of θ.
    """
    users = Counter(
        tensor.untyped_storage().data_ptr()
        for tensor in (*module.parameters(), *module.buffers())
        if tensor.is_cpu
    )
    return all(
        p.is_cpu and not p.is_shared() and users[p.untyped_storage().data_ptr()] == 1
        for p in parameters
    )
