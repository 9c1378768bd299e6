"""Why a checkpoint can't be used, and what can be done about it."""

from __future__ import annotations

from enum import Enum


class Remedy(Enum):
    """What helps if a checkpoint can't be loaded."""

    FRESH_STREAMS = (
        "load it without a replay: new noise and batches, and all that was executed counts"
    )
    OTHER_RUN = "load it into the run that it was saved from, or use another checkpoint"
    NOTHING = "the file is damaged, and its weights are lost"


class CheckpointError(ValueError):
    """The file can't be used here; the message says why, and nothing has been changed.

    Attributes:
        reason: What is wrong, without advice; commands and frameworks add their own.
        remedy: What helps.
    """

    def __init__(
        self, reason: str, remedy: Remedy = Remedy.OTHER_RUN, advice: str | None = None
    ) -> None:
        if advice is None:
            fresh = remedy is Remedy.FRESH_STREAMS
            advice = ". load(path) goes on with fresh streams" if fresh else ""
        super().__init__(reason + advice)
        self.reason, self.remedy = reason, remedy
