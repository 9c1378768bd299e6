"""What a loader returns: tensors, and what must be known about them to claim privacy for one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Records as rows. ``x`` is float32; ``y`` int64 classes, or float32 (0/1 for binary, targets for regression)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return int(self.y.shape[0])


@dataclass(frozen=True)
class Dataset:
    """Data that a run trains and is judged on.

    Args:
        name: of the set, or of the file.
        task: "classification", "binary" (one logit, judged by AUC) or "regression".
        outputs: columns that the network must have.
        unit: what one record is; the ε of a run is for this unit.
        public: a public benchmark; False for the user's own data.
        notes: treatments to be stated in the result. They say what is done, never how often, for a count of private
            records would be a release.
        private_statistics: what the preparation looked at in the training data. Empty: nothing.
        nominal_size: the published number of training records; None for own data.
        target_range: declared bounds of a regression's target. ``y`` is in the target's units and within them.
        records_per_group: the largest number of records that one ``group`` (a trip, a person) can have; ε for the
            whole group follows by composition, not from the run's ε alone.
    """

    name: str
    task: str
    train: Split
    test: Split | None
    outputs: int
    unit: str
    classes: tuple[str, ...] = ()
    public: bool = True
    notes: tuple[str, ...] = ()
    private_statistics: tuple[str, ...] = ()
    nominal_size: int | None = None
    target_range: tuple[float, float] | None = None
    target_unit: str = ""
    records_per_group: int = 1
    group: str = ""
    features: tuple[str, ...] = ()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one record."""
        return tuple(self.train.x.shape[1:])

    def encode_target(self, y: Tensor) -> Tensor:
        """Targets as a network is trained on them: the declared range becomes [-1, 1]. Classes stay as they are."""
        if self.target_range is None:
            return y
        low, high = self.target_range
        return (y - low) * (2.0 / (high - low)) - 1.0

    def decode_target(self, z: Tensor) -> Tensor:
        """The way back, from a network's output to the target's units."""
        if self.target_range is None:
            return z
        low, high = self.target_range
        return (z + 1.0) * ((high - low) / 2.0) + low
