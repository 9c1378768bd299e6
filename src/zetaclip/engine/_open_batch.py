"""A logical batch from its keys to its release."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

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


@dataclass
class OpenBatch:
    """The batch that is open now.

    **Guarantee.** One draw of noise covers one sum. From the moment a release is begun the noise of
    this try counts as used (``used``), and no later try of the batch gets it. A spoiled sum is
    never released.

    Attributes:
        drawn: Its keys.
        chunks: Its records, in the parts in which they are handed out.
        mechanism: Adds this try up and releases it.
        moved: Where its gradients are taken, as direction and distance from θ; None at θ itself.
        public: The states of torch's own streams at its start, as the user left them; empty
            before its first chunk is out.
        done: Number of chunks that are in the sum.
        stage: How far it is.
        used: Whether the noise of this try may have been drawn.
    """

    drawn: Drawn
    chunks: list[Tensor]
    mechanism: Mechanism
    moved: tuple[Tensor, float] | None = None
    public: dict[str, Tensor] = field(default_factory=dict)
    done: int = 0
    stage: Stage = Stage.READY
    used: bool = False

    def begin_again(self, mechanism: Mechanism) -> None:
        """The same records from the first chunk, with a mechanism that has summed nothing."""
        self.mechanism, self.public = mechanism, {}
        self.done, self.stage, self.used = 0, Stage.READY, False
