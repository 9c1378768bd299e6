"""The compiled part, ``_rows.c``.

Where there was no compiler ``rows`` is None, and torch does the work.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

rows: Any
try:
    from . import _rows as rows
except ImportError:  # built where there was no C compiler
    rows = None


def plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the compiled part may go through this tensor from its first to its last number."""
    return (
        rows is not None
        and tensor.dtype is dtype
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def array(tensor: Tensor) -> np.ndarray:
    """A plain tensor's own memory, as the compiled part takes it."""
    return tensor.detach().numpy()
