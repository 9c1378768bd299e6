"""Max pooling for training on the CPU: the numbers of torch, sooner."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_WHOLE = (torch.float32, torch.float64)


def max_pool(x: Tensor, stride: int) -> Tensor:
    """``F.max_pool2d(x, 2, stride)``, to the last bit, forward and backward.

    Forward, torch's kernel for channels last is several times faster than the one for the usual
    order; backward it is the slower one. So the first finds the places of the largest numbers, and
    a gather takes them (``bench/pooling.py``).

    Args:
        x: Images, (rows, channels, height, width).
        stride: Distance of windows.
    """
    # In half precision the two kernels add up overlapping windows in different ways.
    if x.device.type != "cpu" or x.dtype not in _WHOLE or _recorded():
        return F.max_pool2d(x, 2, stride)
    with torch.no_grad():
        last = x.contiguous(memory_format=torch.channels_last)
        _, places = F.max_pool2d(last, 2, stride, return_indices=True)
    return x.flatten(2).gather(2, places.flatten(2)).view(places.shape)


def _recorded() -> bool:
    """Whether operations are compiled, exported or transformed, which wants the plain one."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
    )
