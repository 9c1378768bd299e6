"""The compiled ``_rows.c``. Without a C compiler ``rows`` is None, and torch does the work."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

rows: Any
try:
    from . import _rows as rows
except ImportError:  # there was no C compiler at installation
    rows = None


def plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether compiled code may read this tensor's memory as one array of ``dtype``."""
    return (
        rows is not None
        and tensor.dtype is dtype
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )
