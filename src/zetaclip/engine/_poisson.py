"""Poisson sampling: every record joins a batch with the declared probability q, independently."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..randomness import uniforms


def poisson_indices(key: bytes, records: int, sample_rate: float) -> Tensor:
    """The records of one batch, in order.

    Uniforms of 53 bits, so that a small q is met as declared.
    """
    if sample_rate >= 1.0:
        return torch.arange(records)
    return torch.from_numpy(np.flatnonzero(uniforms(key, records) < sample_rate))
