"""The public constants of a run: q, N, the divisor, and what the user chose once for all."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import OwnerWarning
from ._units import Units

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


@dataclass(frozen=True)
class Settings:
    """The public constants of a run."""

    sample_rate: float
    num_examples: int
    expected_batch_size: float
    steps_per_epoch: int
    physical_batch_size: int | None
    loss_reduction: str
    decouple_lr: bool
    normalize: str
    empty: str
    rows_per_unit: int | None = None  # None: a unit is one row
    views: int = 1
    unit_reduction: str = "mean"

    def at_rate(self, sample_rate: float | None) -> Settings:
        """These with another q, and so another L; None leaves them as they are."""
        if sample_rate is None:
            return self
        size = sample_rate * self.num_examples
        return replace(self, sample_rate=sample_rate, expected_batch_size=size)

    def steps_in(self, epochs: float) -> int:
        """How many updates so many epochs are."""
        if not (epochs > 0 and math.isfinite(epochs)):
            raise ValueError(f"epochs must be positive, not {epochs}")
        return math.ceil(epochs * self.steps_per_epoch - 1e-9)


def settings_for(
    loader: DataLoader,
    sample_rate: float | None,
    num_examples: int | None,
    *,
    physical_batch_size: int | None = None,
    loss_reduction: str = "mean",
    decouple_lr: bool = False,
    normalize: str = "expected",
    empty: str = "noise",
    units: Units | None = None,
    unit_reduction: str = "mean",
) -> tuple[Settings, bool]:
    """The constants that were asked for, each checked, and whether N was declared.

    Warnings point at the ``make_private`` call.
    """
    units = units or Units(None, len(loader.dataset), None)  # type: ignore[arg-type]
    found = units.count
    if found == 0:
        raise ValueError("the dataset is empty")
    declared = num_examples is not None
    if num_examples is not None and (
        isinstance(num_examples, bool) or num_examples != int(num_examples) or num_examples < 1
    ):
        raise ValueError(f"num_examples must be a positive whole number, not {num_examples}")
    if sample_rate is not None and not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate is a probability: it must be in (0, 1], not {sample_rate}")
    size = int(found if num_examples is None else num_examples)
    if not declared:
        warnings.warn(
            f"num_examples= was not given: N = {found} is taken from the data, which is private "
            "itself. Declare a public nominal size (and sample_rate=) to keep the divisor and q "
            "independent of the data",
            stacklevel=3,
        )
    elif abs(size - found) > 0.05 * size:
        warnings.warn(
            f"num_examples = {size} was declared, but the dataset has {found} records; the "
            "guarantee holds, but the mean gradient is scaled by the declared size",
            OwnerWarning,
            stacklevel=3,
        )
    assert loader.batch_size is not None
    if sample_rate is None:
        sample_rate = min(1.0, loader.batch_size / size)
        steps = max(1, -(-size // loader.batch_size))
    else:
        steps = max(1, math.ceil(1 / sample_rate - 1e-9))
    if physical_batch_size is not None and (
        isinstance(physical_batch_size, bool)
        or physical_batch_size != int(physical_batch_size)
        or physical_batch_size < 1
    ):
        raise ValueError(
            f"physical_batch_size must be a positive whole number, not {physical_batch_size}"
        )
    if physical_batch_size is not None and units.largest > physical_batch_size:
        raise ValueError(
            f"physical_batch_size = {physical_batch_size} is too small: a unit may have "
            f"{units.largest} rows, and its rows are not split"
        )
    if physical_batch_size is None and units.views > 1:
        # As many rows at a time as without views, so that memory does not grow with them. Larger
        # blocks of memory are given back to the system after each step: 8 views took 12 to 23 times
        # as long as one, and 8 times in parts.
        rows = math.ceil(sample_rate * size) * (units.most or 1)
        physical_batch_size = max(units.largest, rows)
    settings = Settings(
        sample_rate=float(sample_rate),
        num_examples=size,
        expected_batch_size=sample_rate * size,
        steps_per_epoch=steps,
        physical_batch_size=physical_batch_size,
        loss_reduction=_choice("loss_reduction", loss_reduction, ("mean", "sum")),
        decouple_lr=bool(decouple_lr),
        normalize=_choice("normalize", normalize, ("expected", "realized")),
        empty=_choice("empty", empty, ("noise", "skip")),
        rows_per_unit=units.most,
        views=units.views,
        unit_reduction=_choice("unit_reduction", unit_reduction, ("mean", "sum")),
    )
    return settings, declared


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")
    return value
