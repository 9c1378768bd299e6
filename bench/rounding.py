"""What float32 arithmetic can do to the sensitivity, measured.

    python bench/rounding.py [--most 4096]

Noise is scaled by S (1 + 2^-9). Half of that covers rounding to the grid, which is proved. The
other half, 2^-10 or 9.8e-4 of C, must cover arithmetic. Records are added in float64, so what is
left is each record's own gradient in float32. It is measured in two ways:

- *own*: how long a record's clipped gradient really is, in float64, over C. Its norm and its share
  of the sum come from different kernels.
- *others*: how far the shares of all other records move, over C, when one record joins. Kernels may
  round differently if a batch has another number of rows, and a loss that is a mean divides by that
  number before it rounds. Copies of one record are the worst case: their differences have the same
  direction.

The figures are the largest over the tries; they are not a proof.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from common import one_thread, table

one_thread()

import torch
import torch.nn.functional as F
from networks import MODELS
from torch import Tensor, nn

from zetaclip.gradients import CaptureBuffer, Chunk, Layout, make_shadows

BUDGET = 2.0**-10


def recorded(module: nn.Module, reduction: str) -> Callable[[Tensor, Tensor], Chunk]:
    """A function from a batch to its per-record gradients."""
    named = dict(module.named_parameters())
    recorder, layout = CaptureBuffer(), Layout.of(named)
    shadows, _ = make_shadows(module, set(named.values()), recorder)
    for shadow in shadows:
        shadow.attach()

    def run(x: Tensor, y: Tensor) -> Chunk:
        recorder.open(len(x))
        F.cross_entropy(module(x), y, reduction=reduction).backward()
        return Chunk(recorder.take(), layout, len(x), float(len(x)) if reduction == "mean" else 1.0)

    return run


@torch.no_grad()
def clipped_sum(chunk: Chunk, clip: float, rows: slice = slice(None)) -> Tensor:
    """The sum of the chosen rows' clipped gradients, in float64."""
    norms = chunk.norms()
    factors = clip / norms.clamp_min(clip)
    chosen = torch.zeros_like(factors)
    chosen[rows] = factors[rows]
    total = torch.zeros(chunk.layout.numel, dtype=torch.float64)
    chunk.add_weighted_sum(total, chosen)
    return total


def own(name: str, tries: int = 8) -> float:
    """The largest length of a record's clipped gradient over C, less 1."""
    model, worst = MODELS[name], 0.0
    for seed in range(tries):
        torch.manual_seed(seed)
        module = model.make()
        x, y = model.data(4)
        run = recorded(module, "sum")
        for row in range(4):
            chunk = run(x * 10.0 ** (seed % 4 - 2) if x.is_floating_point() else x, y)
            with torch.no_grad():
                clip = 0.5 * float(chunk.norms()[row])
            worst = max(
                worst, float(clipped_sum(chunk, clip, slice(row, row + 1)).norm()) / clip - 1
            )
    return worst


class Cancelling(torch.nn.Module):
    """One layer at two positions, one less the other, for records made to lose digits."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h[:, 0] - h[:, 1]


def cancelling(inputs: int, outputs: int, share: float) -> float:
    """The same for a record whose two positions cancel to a share, beside values too small for a
    float32 sum.
    """
    torch.manual_seed(0)
    run = recorded(Cancelling(inputs, outputs), "sum")
    first = torch.full((inputs,), (0.98 * 2.0**-24) ** 0.5)
    first[0] = 1.01
    length = float(first.norm())
    second = -first
    second[0], first[-1], second[-1] = 1.01, share * length, -share * length
    chunk = run(torch.stack([first, second]).unsqueeze(0) * 2.0**12, torch.tensor([1]))
    with torch.no_grad():
        clip = 0.5 * float(chunk.norms()[0])
    return float(clipped_sum(chunk, clip).norm()) / clip - 1


def others(name: str, count: int, reduction: str, copies: bool) -> float:
    """How far the shares of ``count`` records move, over C, when another one joins them."""
    model = MODELS[name]
    torch.manual_seed(count)
    module = model.make().eval()  # no dropout: its masks are drawn again for each batch
    run = recorded(module, reduction)
    x, y = model.data(count + 1)
    if copies:
        x, y = x[:1].repeat(count + 1, *[1] * (x.dim() - 1)), y[:1].repeat(count + 1)
    chunk = run(x[:count], y[:count])
    with torch.no_grad():
        # Copies stay unclipped, so that nothing is normalised.
        clip = float(chunk.norms().median()) * (2.0 if copies else 1.0)
    without = clipped_sum(chunk, clip)
    return float((clipped_sum(run(x, y), clip, slice(0, count)) - without).norm()) / clip


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--most", type=int, default=4096, help="largest batch of the networks that are small enough"
    )
    options = parser.parse_args()
    print(f"budget for arithmetic: {BUDGET:.1e} of C\n")
    rows = [
        [MODELS[name].title, f"{own(name):.1e}"]
        for name in ("mlp", "mnist", "cnn", "resnet", "transformer")
    ]
    for inputs, outputs in ((512, 128), (4608, 512)):
        worst = max(cancelling(inputs, outputs, share) for share in (1e-3, 1.001e-2, 0.1))
        rows.append([f"linear {inputs}-{outputs}, two positions made to cancel", f"{worst:.1e}"])
    print(table(["own length of a clipped gradient, over C, less 1", "largest"], rows))
    rows = []
    for name, most in (
        ("mlp", options.most),
        ("mnist", min(1024, options.most)),
        ("transformer", min(128, options.most)),
    ):
        count = 64
        while count <= most:
            cells = [
                f"{others(name, count, reduction, copies):.1e}"
                for copies in (True, False)
                for reduction in ("sum", "mean")
            ]
            rows.append([MODELS[name].title, str(count), *cells])
            count *= 4
    print()
    head = [
        "others' shares move, over C",
        "records",
        "copies, sum",
        "copies, mean",
        "different, sum",
        "different, mean",
    ]
    print(table(head, rows))


if __name__ == "__main__":
    main()
