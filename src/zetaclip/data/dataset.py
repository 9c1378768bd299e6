"""What a loader returns: tensors, and the facts about them that a privacy claim needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from .inputs import Input


@dataclass(frozen=True)
class Split:
    """Records as rows.

    Attributes:
        x: float32, one row per record.
        y: int64 classes; float32 0 or 1 for a binary task; float32 targets for a regression.
        weight: float32 weight of each record's loss; None for 1. It belongs to the record: it must
            not depend on other records.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None = None

    def __len__(self) -> int:
        return int(self.y.shape[0])


@dataclass(frozen=True)
class Dataset:
    """The data of a run.

    Args:
        name: Name of the set, or of the file.
        task: "classification", "binary" (one logit, evaluated by AUC) or "regression".
        train: Training records.
        test: Test records; None if nothing is held out.
        outputs: Number of output columns that the network needs.
        unit: What one record is; the ε of a run is for this unit.
        classes: Names of the classes, in the order of their numbers.
        public: True for a public benchmark, False for the user's own data.
        notes: Treatments to be stated in the result. They describe what is done, never how often: a
            count of private records would be a release.
        private_statistics: What the preparation computed from the training data. Empty: nothing.
        nominal_size: The published number of training records; None for own data.
        target_range: Declared bounds of a regression's target. ``y`` is in the target's units and
            within these bounds.
        target_unit: Unit of a regression's target.
        records_per_group: The largest number of records that one ``group`` can have. The ε of the
            whole group follows by composition, not from the run's ε alone.
        group: What a group is (a trip, a person); empty if there are none.
        features: Names of the columns of ``x``.
        owners: For each training record, the number of the unit that it belongs to; None if each
            record is a unit of its own.
        rows_per_unit: The largest number of records that a unit brings into a batch.
        target: Name of the column that is predicted; empty for pictures.
        inputs: How raw records became the rows of ``x``; None if raw records can't be prepared one
            by one. Constants only, nothing of the records.
        feature_map: Settings of a frozen module that was applied to the prepared records, so that
            ``x`` holds its outputs; None if there is none. ``training.description`` rebuilds it.
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
    owners: Tensor | None = None
    rows_per_unit: int | None = None
    target: str = ""
    inputs: Input | None = None
    feature_map: Mapping[str, Any] | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one record."""
        return tuple(self.train.x.shape[1:])

    def encode_target(self, y: Tensor) -> Tensor:
        """Targets for training: the declared range is mapped to [-1, 1]. Classes are unchanged."""
        if self.target_range is None:
            return y
        low, high = self.target_range
        return (y - low) * (2.0 / (high - low)) - 1.0

    def decode_target(self, z: Tensor) -> Tensor:
        """The inverse of ``encode_target``: from a network's output to the target's units."""
        if self.target_range is None:
            return z
        low, high = self.target_range
        return (z + 1.0) * ((high - low) / 2.0) + low
