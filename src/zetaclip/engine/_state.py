"""Where a run stands between two logical batches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..control import Released


@dataclass(frozen=True)
class RunState:
    """What a checkpoint must hold to be continued, beside weights, ledger and torch's streams.

    **Guarantee.** It never changes in place: a run moves on, and a checkpoint is loaded, by one
    assignment. While a batch is out this is still the state at the start of that batch, so a
    checkpoint that is saved then holds that start.
    **Edge cases.** ``clip_history`` is the one list that grows: later states share it. Keys are not
    in the repr: a traceback that shows values, or a debugger's log, is often read by others.

    Attributes:
        sampling: key of the stream that draws records.
        noise: key of the stream that draws noise; None on all processes but the first, unless
            each draws the noise of its part of the parameters.
        stream: public name of both keys, which every ledger row carries.
        control: state of the controller.
        same_batch: key of the last batch's records, for a pass that takes the same records again.
        rule: state of the clip rule.
        memory: what the method remembers of earlier releases.
        releases: what this update has released so far, one for each pass that is done.
        clip_history: what the controller noted at each of its updates.
        step: updates done.
        batch: number of the next batch of fresh records.
        phase: the pass of this update that comes next.
        position: updates done in this epoch.
        tries: how often the next batch was begun and put back.
    """

    sampling: bytes = field(repr=False)
    noise: bytes | None = field(repr=False)
    stream: str
    control: Any
    same_batch: bytes | None = field(default=None, repr=False)
    rule: Any = None
    memory: dict[str, Tensor] = field(default_factory=dict)
    releases: tuple[Released, ...] = ()
    clip_history: list[tuple] = field(default_factory=list)
    step: int = 0
    batch: int = 0
    phase: int = 0
    position: int = 0
    tries: int = 0

    def tried(self) -> RunState:
        """After the next batch was begun and put back: its next try has noise of its own."""
        return replace(self, tries=self.tries + 1)

    def tensors(self) -> dict[str, Tensor]:
        """What the method and the clip rule remember, which all processes must have alike."""
        rule = self.rule if isinstance(self.rule, dict) else {}
        found = {f"memory of {name}": value for name, value in self.memory.items()}
        return found | {f"rule's {name}": t for name, t in rule.items() if isinstance(t, Tensor)}
