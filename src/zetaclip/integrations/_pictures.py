"""Arrays of pictures for the estimators: their layout, their range, and their fixed features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from ..features import Fixed


class Pictures:
    """How an estimator reads pictures: the fixed features, and the values of black and white.

    Args:
        fixed: The frozen module.
        low: The value of black.
        high: The value of white.
    """

    TYPES: ClassVar[list[type]] = [np.uint8, np.float32, np.float64]

    def __init__(self, fixed: Fixed, low: float, high: float) -> None:
        self.fixed, self.low, self.high = fixed, low, high

    @classmethod
    def of(cls, kind: str, x: np.ndarray, bounds: Any, leaks: list[str]) -> Pictures:
        """For the pictures of a fit.

        Args:
            kind: The name of the features.
            x: The pictures.
            bounds: The declared black and white, or None.
            leaks: Gets "bounds" if they are taken from the data.

        Raises:
            ValueError: The array holds no pictures, or ``bounds`` are no two numbers.
        """
        from ..features import build

        low, high = range_of(bounds, x, leaks)
        return cls(build(kind, channels_first(x).shape[1:]), low, high)

    def features(self, x: np.ndarray) -> np.ndarray:
        """Features as rows.

        Raises:
            ValueError: The pictures are not of the shape that the estimator was fitted on.
        """
        import torch

        from ..features import features_of

        x = channels_first(x)
        if x.shape[1:] != self.fixed.shape:
            raise ValueError(
                f"pictures of shape {x.shape[1:]} (channels, height, width), but the estimator was"
                f" fitted on {self.fixed.shape}"
            )
        pixels = np.clip(x.astype(np.float32), self.low, self.high) - np.float32(self.low)
        unit = pixels * np.float32(2.0 / ((self.high - self.low) or 1.0)) - np.float32(1.0)
        rows: np.ndarray = features_of(
            self.fixed, torch.from_numpy(np.ascontiguousarray(unit))
        ).numpy()
        return rows.astype(np.float64)

    def describe(self) -> dict[str, object]:
        """What was fixed in advance."""
        return self.fixed.describe()


def range_of(declared: Any, x: np.ndarray, leaks: list[str]) -> tuple[float, float]:
    """The values of black and white: declared, or those of the type, or else of the data.

    Raises:
        ValueError: The declared bounds are no two numbers.
    """
    if declared is None:
        if x.dtype == np.uint8:
            return 0.0, 255.0
        leaks.append("bounds")
        return float(x.min()), float(x.max())
    try:
        low, high = (float(side) for side in declared)
    except (TypeError, ValueError):
        raise ValueError(
            f"bounds of pictures are two numbers, (black, white), not {declared!r}"
        ) from None
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        raise ValueError(f"bounds must be (lowest, highest), finite, not {declared}")
    return low, high


def channels_first(x: np.ndarray) -> np.ndarray:
    """Pictures as (rows, channels, height, width).

    Raises:
        ValueError: The array does not hold pictures.
    """
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[1] in (1, 3):
        return x
    if x.ndim == 4 and x.shape[3] in (1, 3):
        return x.transpose(0, 3, 1, 2)
    raise ValueError(
        "with features=, X holds pictures: (rows, height, width), (rows, channels, height, width)"
        f" or (rows, height, width, channels) with 1 or 3 channels, not {x.shape}"
    )
