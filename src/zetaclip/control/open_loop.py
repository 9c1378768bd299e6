"""Open-loop controllers: C follows a plan that was fixed before training.

They are the controls of an honest comparison. If a run gains as much from replaying somebody else's
C_t as from its own feedback, the gain was in the schedule and not in the signal.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from .base import Controller, Probe, check_clip


@dataclass(frozen=True)
class OpenLoopState:
    """C after ``step`` updates, and whether it has just changed."""

    clip: float
    step: int = 0
    changed: bool = False


class _Clock:
    """A probe that reads no weights: its reading is the number of updates done."""

    reads_weights = False

    def bind(self, module: nn.Module, trained: dict[str, nn.Parameter]) -> _Clock:
        return self

    def read(self, module: nn.Module, step: int) -> int:
        return step


class Schedule(Controller):
    """C = ``function(t)`` for the update number t = 0, 1, 2, ...

    **Guarantee.** The plan must be public: a function of the step alone. One tuned on the private
    data is not covered by the ledger.
    """

    def __init__(self, function: Callable[[int], float]) -> None:
        if not callable(function):
            raise TypeError(
                "Schedule takes a function of the step; for a list of values use Replay"
            )
        self.function = function
        self.probe: Probe | None = _Clock()

    def init(self) -> OpenLoopState:
        """The function's value at 0."""
        return OpenLoopState(check_clip(self.function(0)))

    def update(self, reading: int, state: OpenLoopState) -> OpenLoopState:
        """The function's value at ``reading``, the number of updates done."""
        clip = check_clip(self.function(reading))
        return OpenLoopState(clip, reading, clip != state.clip)

    def entry(self, state: OpenLoopState) -> tuple[Any, ...] | None:
        """(step, None, None, 0, C, "") where C changed; nothing was measured."""
        return (state.step, None, None, 0.0, state.clip, "") if state.changed else None

    def __repr__(self) -> str:
        return f"Schedule({getattr(self.function, '__name__', self.function)!s})"


class Replay(Schedule):
    """Somebody else's C_t, whatever this run's weights do.

    Args:
        schedule: a value per update (the last one is kept after the end), a mapping from step to C,
            or an ``optimizer.clip_history`` (also pairs (step, C)): C changes after that many
            updates.
        initial: C before the first step of a mapping or history; a list of values needs none.
    """

    def __init__(
        self, schedule: Sequence[Any] | Mapping[int, float], initial: float | None = None
    ) -> None:
        if not len(schedule):
            raise ValueError("an empty schedule leaves no clipping norm")
        changes = _changes(schedule)
        if initial is not None:
            if changes[0][0] == 0:
                raise ValueError("the schedule already says what C is at step 0; leave initial out")
            changes = [(0, check_clip(initial)), *changes]
        if changes[0][0] != 0:
            raise ValueError(
                f"the schedule starts at step {changes[0][0]}; say with initial= what C is before"
            )
        self.steps = [step for step, _ in changes]
        self.clips = [clip for _, clip in changes]
        if any(later <= earlier for earlier, later in itertools.pairwise(self.steps)):
            raise ValueError("the steps of a schedule must rise")
        super().__init__(self._at)

    def _at(self, step: int) -> float:
        return self.clips[bisect.bisect_right(self.steps, step) - 1]

    def __repr__(self) -> str:
        # Two plans must not look alike where a checkpoint compares configurations.
        digest = hashlib.sha256(repr((self.steps, self.clips)).encode()).hexdigest()[:8]
        return f"Replay({len(self.clips)} values, digest {digest})"


def _changes(schedule: Sequence[Any] | Mapping[int, float]) -> list[tuple[int, float]]:
    """(step, C) pairs, with C holding from that step on."""
    if isinstance(schedule, Mapping):
        return [(int(step), check_clip(clip)) for step, clip in sorted(schedule.items())]
    if isinstance(schedule[0], (tuple, list)):
        # A history entry is (step, ζ, ζ̂, φ, C, hit), a pair is (step, C).
        return [(int(row[0]), check_clip(row[1] if len(row) == 2 else row[4])) for row in schedule]
    return [(step, check_clip(clip)) for step, clip in enumerate(schedule)]
