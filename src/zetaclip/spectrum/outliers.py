"""How much of a matrix is signal, where the noise in it is known.

Independent noise of standard deviation s in an m x n matrix has singular values up to
s (√m + √n), the edge of Marchenko and Pastur's bulk, and hardly beyond. What a private training
moved is noise that the engine drew, of known size, and signal. Singular values beyond the edge are
signal; they are read off released weights, so that costs no privacy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .eigenvalues import as_matrix

# The largest value of one of a thousand pure noise matrices is beyond the edge by this many units
# of its fluctuation (Tracy and Widom's law for real matrices).
_ONE_IN_A_THOUSAND = 3.27


@dataclass(frozen=True)
class Outliers:
    """Directions in which a matrix holds more than noise.

    Attributes:
        edge: Singular values of noise stay below this, but for one matrix of a thousand.
        count: How many singular values are beyond it.
        of: How many there are.
        energy: Their share of the squared singular values.
        signal: Estimates of the signal's own singular values, largest first, with what the noise
            added to them taken off.
    """

    edge: float
    count: int
    of: int
    energy: float
    signal: tuple[float, ...]


def noise_edge(shape: tuple[int, int], noise_std: float) -> float:
    """The largest singular value that independent noise alone is likely to have.

    Args:
        shape: Rows and columns.
        noise_std: The standard deviation of each entry.
    """
    rows, columns = math.sqrt(max(shape[0] - 1, 1)), math.sqrt(shape[1])
    middle = (rows + columns) ** 2
    spread = (rows + columns) * (1 / rows + 1 / columns) ** (1 / 3)
    return noise_std * math.sqrt(middle + _ONE_IN_A_THOUSAND * spread)


def outliers(moved: Tensor, noise_std: float) -> Outliers:
    """Directions of a matrix that stand out of noise of known size.

    Args:
        moved: What a layer moved since its start; kernels of convolutions are flattened.
        noise_std: The standard deviation of the noise in each entry.

    Raises:
        ValueError: The noise is negative, or the values are not finite.
    """
    if not (math.isfinite(noise_std) and noise_std >= 0):
        raise ValueError(f"noise_std must be finite and at least 0, not {noise_std}")
    matrix = as_matrix(moved.detach().double().cpu())
    if not torch.isfinite(matrix).all():
        raise ValueError("the matrix has values that are not finite")
    rows, columns = matrix.shape
    values = torch.linalg.svdvals(matrix)
    edge = noise_edge((min(rows, columns), max(rows, columns)), noise_std)
    beyond = values[values > edge]
    total = float(values.square().sum())
    return Outliers(
        edge=edge,
        count=len(beyond),
        of=len(values),
        energy=float(beyond.square().sum()) / total if total else 0.0,
        signal=tuple(_without_noise(float(v), rows, columns, noise_std) for v in beyond),
    )


def _without_noise(value: float, rows: int, columns: int, std: float) -> float:
    """The singular value of a signal that appears as ``value`` in noise (Benaych-Georges)."""
    if std == 0:
        return value
    above = (value / std) ** 2 - rows - columns
    root = max(0.0, above**2 - 4 * rows * columns)
    return std * math.sqrt(max(0.0, (above + math.sqrt(root)) / 2))
