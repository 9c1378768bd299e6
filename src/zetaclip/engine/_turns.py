"""What a run hands on from one call to the next: the batch that is out, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..mechanism import Mechanism


class Turn:
    """A logical batch that is out."""

    def __init__(self, chunks: list[Tensor], key: bytes, batch: int) -> None:
        self.chunks = chunks
        self.batch = batch  # passes over the same records share it, and compose as one Gaussian
        self.key = key  # of the sampling stream; a second pass on the same records draws them again from it
        self.done = 0  # chunks that step() has closed
        self.out = False  # whether a chunk is with the user
        self.mechanism: Mechanism | None = None
        self.spoiled = False  # whether a chunk was cut off while it was added: its records may be in the sum already


@dataclass
class Position:
    """Where a run stands between two logical batches: everything that a checkpoint needs to go on.

    Keys are not in its repr: a traceback that shows values, or a debugger's log, is often read by others.
    """

    sampling: bytes = field(repr=False)
    noise: bytes = field(repr=False)
    same_batch: bytes | None = field(repr=False)
    public: dict[str, Tensor]
    tries: int = 0  # how often the batch that comes next was begun and put back
