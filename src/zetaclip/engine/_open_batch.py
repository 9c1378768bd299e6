"""A logical batch from its keys to its release."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from ..gradients import Chunk
from ..ledger import Row
from ..mechanism import Mechanism


@dataclass(frozen=True)
class Drawn:
    """The keys of one logical batch, and where the two secret streams stand after it."""

    phase: int
    number: int  # passes over the same records share it, and compose as one Gaussian
    key: bytes = field(repr=False)  # a second pass on the same records draws them again from it
    noise_key: bytes | None = field(repr=False)
    sampling: bytes = field(repr=False)
    noise: bytes | None = field(repr=False)


class Stage(Enum):
    """How far a batch is."""

    READY = "its first chunk can be handed out"
    OUT = "a chunk is with the user"
    ABSORBED = "a chunk is in the sum; the next can be handed out"
    RELEASED = "its release was begun"
    SPOILED = "a chunk was cut off while it was added: some of its records may be in the sum"


class OpenBatch:
    """The batch that is open now.

    **Guarantee.** One draw of noise covers one sum. From the moment a release is begun the noise of
    this try counts as used (``used``), and no later try of the batch gets it. A spoiled sum is
    never released.
    """

    def __init__(
        self,
        drawn: Drawn,
        chunks: list[Tensor],
        mechanism: Mechanism,
        public: dict[str, Tensor],
    ) -> None:
        self.drawn = drawn
        self.chunks = chunks
        self.mechanism = mechanism
        self.public = public  # torch's own streams at its start, as the user left them
        self.done = 0  # chunks that are in the sum
        self.stage = Stage.READY
        self.used = False

    def absorb(self, chunk: Chunk) -> None:
        """Adds the records of the chunk that is out; ``close_chunk`` says that all of them are in.

        Whatever interrupts in between leaves the batch spoiled: no record may be added twice.
        """
        self.stage = Stage.SPOILED
        self.mechanism.absorb(chunk)

    def close_chunk(self) -> bool:
        """The chunk that was out is in the sum; whether it was the last one."""
        self.stage, self.done = Stage.ABSORBED, self.done + 1
        return self.done == len(self.chunks)

    def declare(self) -> tuple[Row, ...]:
        """Begins the release: its rows, to be written before noise is drawn."""
        self.stage, self.used = Stage.RELEASED, True
        return self.mechanism.declare()

    def begin_again(self, mechanism: Mechanism, public: dict[str, Tensor]) -> None:
        """The same records from the first chunk, with a mechanism that has summed nothing."""
        self.mechanism, self.public = mechanism, public
        self.done, self.stage, self.used = 0, Stage.READY, False
