"""What the Trainer counts: its steps, epochs and lengths are those of private updates."""

from __future__ import annotations

import itertools
from typing import Any

from torch.utils.data import DataLoader
from transformers import TrainerCallback

from ..engine import PrivateOptimizer
from .terms import Updates


class Taken(PrivateOptimizer):
    """The optimizer that the trainer steps.

    ``training_step`` has already taken the update; ``step`` only checks that it did.
    """

    def __init__(self, private: PrivateOptimizer) -> None:
        super().__init__(private.inner, private._loop)
        self._seen = self._loop.state.step

    def step(self, closure: Any = None) -> Any:
        """Checks that one private update was taken."""
        taken, self._seen = self._loop.state.step - self._seen, self._loop.state.step
        if taken != 1:
            raise RuntimeError(
                f"the trainer counted a step in which {taken} private updates were taken:"
                " training_step is overridden, so the training is not private. Override"
                " compute_loss instead"
            )


class Epochs(TrainerCallback):
    """Sets the trainer's epoch from the engine's updates, also after resuming inside an epoch."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Sets the epoch."""
        engine, updates = self._trainer.engine, self._trainer._updates
        assert engine is not None and updates is not None
        state.epoch = engine.updates / len(updates)


class Length:
    """A loader's data set with the number of updates in an epoch as its length."""

    def __init__(self, loader: DataLoader, length: int) -> None:
        self.dataset, self._length = loader.dataset, length

    def __len__(self) -> int:
        return self._length


class First:
    """The first items of a loader."""

    def __init__(self, loader: Updates, count: int) -> None:
        self._loader, self._count = loader, count

    def __iter__(self) -> Any:
        return itertools.islice(iter(self._loader), self._count)
