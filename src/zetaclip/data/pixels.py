"""From pixel values to what a network takes, by constants."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

SCALINGS = ("symmetric", "unit", "statistics")

# Mean and standard deviation of the training pixels, as published in tutorials. They are statistics
# of the records that a run protects, so they are used only on request, and the result states it.
STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    # These are statistics of the whole of ImageNet, a larger public set.
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


def scaled(pixels: np.ndarray, scaling: str, name: str, white: float = 255.0) -> Tensor:
    """Images as float32.

    Args:
        pixels: Shape (n, channels, height, width), values from 0 to ``white``.
        scaling: "symmetric" maps to [-1, 1], "unit" to [0, 1], "statistics" uses the set's
            published mean and standard deviation.
        name: Entry of ``STATISTICS``.
        white: The largest pixel value.

    Returns:
        A tensor of the same shape.

    Raises:
        InputError: The set has no such scaling.
    """
    import torch

    # Two steps: what numpy converts should lie in order already.
    x = torch.from_numpy(np.ascontiguousarray(pixels).astype(np.float32))
    if scaling == "symmetric":
        return x.mul_(2.0 / white).sub_(1.0)
    if scaling == "unit":
        return x.div_(white)
    if scaling == "statistics" and name in STATISTICS:
        mean, deviation = (torch.tensor(values).view(1, -1, 1, 1) for values in STATISTICS[name])
        return x.div_(white).sub_(mean).div_(deviation)
    known = [s for s in SCALINGS if s != "statistics" or name in STATISTICS]
    raise InputError(f"{name} has no scaling {scaling!r}; choose one of {', '.join(known)}")
