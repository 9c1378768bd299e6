"""Max pooling for training on the CPU: torch's kernel against zetaclip's way to the same bits.

    python bench/pooling.py

Forward and backward of one thread, in turns; the sizes are those of the built-in networks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import table
from torch import Tensor

from zetaclip._pooling import max_pool
from zetaclip.cli.allocation import keep_freed_memory

SIZES = {
    "cnn, first": ((256, 16, 14, 14), 1),
    "cnn, second": ((256, 32, 5, 5), 1),
    "cnn-large, first": ((256, 32, 28, 28), 2),
    "cnn-large, second": ((256, 64, 14, 14), 2),
}
TURNS = 15


def seconds(pool: Callable[[Tensor], Tensor], x: Tensor) -> tuple[float, float]:
    """The times of forward and backward."""
    leaf = x.clone().requires_grad_()
    inside = leaf.relu()
    start = time.perf_counter()
    y = pool(inside)
    forward = time.perf_counter() - start
    g = torch.ones_like(y)
    start = time.perf_counter()
    torch.autograd.grad(y, inside, g)
    return forward, time.perf_counter() - start


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = []
    for name, (shape, stride) in SIZES.items():
        torch.manual_seed(0)
        x = torch.randn(shape)
        ways = (lambda x: F.max_pool2d(x, 2, stride)), (lambda x: max_pool(x, stride))
        found: list[list[tuple[float, float]]] = [[], []]
        for _ in range(TURNS):
            for times, way in zip(found, ways, strict=True):
                times.append(seconds(way, x))
        cells, sums = [], []
        for times in found:
            forward, backward = (1e3 * statistics.median(t) for t in zip(*times, strict=True))
            cells.append(f"{forward:.1f} + {backward:.1f} ms")
            sums.append(forward + backward)
        rows.append([name, *cells, f"{sums[0] / sums[1]:.1f}x"])
    print(table(["pooling of", "torch, forward + backward", "zetaclip", "gain"], rows))


if __name__ == "__main__":
    main()
