"""θ, and the perturbed weights that some methods take a gradient at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .gradients import Layout, rows


class Weights:
    """Moves the trained parameters while a batch is out, and puts them back.

    **Guarantee.** After ``restore`` the parameters are bit for bit what they were before ``move``: copied back, not
    subtracted. θ is kept before anything moves, so an interrupt in between can't lose it.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._kept: list[Tensor] | None = None
        self._spare: list[Tensor] | None = None  # where θ is kept, from one batch to the next

    @torch.no_grad()
    def move(self, direction: Tensor | None) -> None:
        """Adds a flat direction; None leaves the weights where they are."""
        if direction is None:
            return
        if direction.shape != (self._layout.numel,):
            raise ValueError(f"a direction of shape {tuple(direction.shape)} for {self._layout.numel} parameters")
        parameters: list[Tensor] = list(self._layout.parameters)
        if self._spare is None:
            self._spare = [torch.empty_like(p) for p in parameters]
        rows.copy(self._spare, parameters)
        self._kept = self._spare  # between the two: whatever interrupts them, θ is in place or kept
        if not rows.add(parameters, direction):
            views = zip(parameters, self._layout.views(direction), strict=True)
            torch._foreach_add_(parameters, [view.to(p.dtype) for p, view in views])

    def restore(self) -> None:
        if self._kept is not None:
            self._put(self._kept)
            self._kept = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The module holds θ inside, whatever is out."""
        if self._kept is None:
            yield
            return
        moved = self._copies()
        self._put(self._kept)
        try:
            yield
        finally:
            self._put(moved)

    def _copies(self) -> list[Tensor]:
        return [p.detach().clone() for p in self._layout.parameters]

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        rows.copy(list(self._layout.parameters), values)
