"""Matrix products of linear layers, by the faster of the two libraries that torch carries.

On the CPU torch's ``linear`` calls its BLAS library, often MKL. torch also carries oneDNN, whose
products take about twice as many multiply-adds per second on processors where MKL does not use
AVX-512 (`bench/kernels.py --only products` compares the two). Both compute in whole float32.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

# A call of oneDNN takes about 10 microseconds more than one of BLAS, so a product must have this
# many multiply-adds to be worth it. This affects only speed.
WORTH_IT = 1 << 21


@functools.cache
def _one_dnn() -> bool:
    """Whether this build of torch has oneDNN's product of float32 matrices, and it is right."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return found.tolist() == [[5, 14, 23, 32], [14, 50, 86, 122]]


def source() -> str:
    """Whose products are used here; part of what an exact replay depends on."""
    return "oneDNN" if _one_dnn() and torch.backends.mkldnn.enabled else "torch"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x weightᵀ + bias``, without a node in the graph.

    Args:
        x: (..., I).
        weight: (O, I), of any strides.
        bias: (O,) or None.

    Returns:
        (..., O). Shapes and types alone decide which library computes it.
    """
    if (
        x.is_cpu
        and x.dtype is torch.float32
        and weight.dtype is torch.float32
        and x.numel() * len(weight) >= WORTH_IT
        and source() == "oneDNN"
    ):
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return F.linear(x, weight, bias)
