"""The measurements behind constants that choose kernels: MEMORY_COST, SHIFTED_FROM, STORED_FROM.

    python bench/kernels.py                   # convolutions and sequences
    python bench/kernels.py --only convolutions --repeats 9

For a list of convolutions: forward, input gradient and summed weight gradient (the cost of ordinary
training), then the ways to compute per-record gradients: *folded* and *shifted* by torch's kernels,
*stored* and *twice* by compiled code (made once and kept, or made for the norm and again for the
sum), and *Gram*. Each includes its norms and its weighted sum, which a private step needs. "rule"
is the way that the rule would choose by the shapes, "best" the fastest of this run. For matrices
over sequences: norms by Gram matrices and by materialised gradients, by torch and compiled. A
constant is good if "rule over best" stays near 1. It never changes a result, only the time.
For products of linear layers: torch's own choice of library, and oneDNN (WORTH_IT).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from common import one_thread, table, write_json

one_thread()

import torch
import torch.nn.functional as F

from zetaclip.gradients import matmul, products
from zetaclip.gradients.contributions import (
    Contribution,
    Dense,
    row_norms,
)
from zetaclip.gradients.convolution import (
    SHIFTED_FROM,
    STORED_FROM,
    ConvGram,
    ConvPieces,
    Geometry,
    _folded,
    _gradients,
    _shiftable,
    _shifted,
    _weight_gradient,
    convolution_contribution,
)
from zetaclip.gradients.grams import MEMORY_COST, gram_is_cheaper, gram_norms, gram_share

# (inputs, outputs, kernel, stride, image, batch)
CONVOLUTIONS = (
    (1, 32, 3, 1, 28, 256),
    (1, 16, 8, 2, 28, 256),
    (3, 16, 3, 1, 32, 128),
    (16, 16, 3, 1, 32, 128),
    (16, 32, 4, 2, 13, 256),
    (16, 32, 3, 2, 32, 128),
    (32, 32, 3, 1, 16, 128),
    (32, 64, 3, 1, 14, 256),
    (64, 64, 3, 1, 8, 128),
    (64, 64, 3, 1, 32, 32),
    (128, 128, 3, 1, 16, 32),
    (256, 256, 3, 1, 8, 32),
    (512, 512, 3, 1, 4, 32),
)
# (positions, inputs, outputs, batch)
SEQUENCES = (
    (4, 128, 128, 64),
    (16, 128, 128, 64),
    (48, 128, 128, 64),
    (48, 128, 384, 64),
    (48, 128, 512, 64),
    (48, 128, 2048, 64),
    (64, 64, 64, 64),
    (64, 512, 512, 16),
    (256, 512, 512, 8),
)


# (rows, inputs, outputs)
PRODUCTS = (
    (256, 16, 16),
    (256, 105, 256),
    (256, 256, 256),
    (256, 3136, 128),
    (1024, 384, 1536),
    (3072, 128, 512),
)


def milliseconds(function: Callable[[], Any], repeats: int) -> float:
    """The median time of a call."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def used(make: Callable[[], Contribution], shape: torch.Size, batch: int) -> Callable[[], None]:
    """A contribution, its norms, and its weighted sum."""
    factors, out = torch.rand(batch, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)

    def run() -> None:
        contribution = make()
        contribution.norms()
        contribution.add_to(out, factors)

    return run


def convolutions(repeats: int) -> tuple[str, list[dict[str, Any]]]:
    """The table of convolutions, and its figures."""
    rows, figures = [], []
    for inputs, outputs, kernel, stride, image, batch in CONVOLUTIONS:
        padding = kernel // 2 if kernel != 4 else 0
        x = torch.randn(batch, inputs, image, image)
        weight = torch.randn(outputs, inputs, kernel, kernel)
        y = F.conv2d(x, weight, stride=stride, padding=padding)
        g = torch.randn_like(y)
        geometry = Geometry((kernel,) * 2, (stride,) * 2, (padding,) * 2, (1, 1), 1)
        shape = weight.shape
        ways: dict[str, Callable[[], Contribution]] = {
            "folded": lambda: Dense(_folded(x, g, geometry, shape), shape),
            "shifted": lambda: _shifted(x, g, geometry, shape),
            "Gram": lambda: ConvGram(x, g, geometry),
        }
        if products.takes(x, g):
            ways["stored"] = lambda: _gradients(x, g, geometry)
            ways["twice"] = lambda: ConvPieces(x, g, geometry)
        # For unsuitable shapes the Gram and the folded way take seconds and show nothing.
        positions = y[0, 0].numel()
        if (
            positions * positions * (inputs * kernel**2 + outputs)
            > 40 * MEMORY_COST * weight.numel()
        ):
            del ways["Gram"]
        if weight.numel() > 300_000:
            del ways["folded"]
        times = {
            "forward": milliseconds(
                lambda: F.conv2d(x, weight, stride=stride, padding=padding), repeats
            ),
            "input": milliseconds(
                lambda: torch.nn.grad.conv2d_input(x.shape, weight, g, stride, padding),
                repeats,
            ),
            "summed": milliseconds(
                lambda: _weight_gradient(x, g, geometry, shape, geometry.groups), repeats
            ),
        }
        private = {
            way: milliseconds(used(make, shape, batch), repeats) for way, make in ways.items()
        }
        chosen = convolution_contribution(x, g, geometry)
        slow = "shifted" if _shiftable(geometry, inputs, outputs) else "folded"
        if type(chosen) is ConvGram:
            rule = "Gram"
        elif products.takes(x, g):
            rule = "twice" if type(chosen) is ConvPieces else "stored"
        else:
            rule = slow  # in parts or at once, by the same kernel
        best = min(private, key=lambda way: private[way])
        name = (
            f"{inputs} to {outputs}, {kernel}x{kernel} / {stride}, {image}x{image}, batch {batch}"
        )
        cells = [f"{times[part]:.1f}" for part in ("forward", "input", "summed")]
        cells += [
            f"{private[way]:.1f}" if way in private else "-"
            for way in ("folded", "shifted", "stored", "twice", "Gram")
        ]
        over = private[rule] / private[best]
        rows.append([name, *cells, rule, best, f"{over:.2f}"])
        figures.append({"convolution": name, **times, **private, "rule": rule, "best": best})
    head = [
        "convolution",
        "forward",
        "input grad",
        "summed",
        "folded",
        "shifted",
        "stored",
        "twice",
        "Gram",
        "rule",
        "best",
        "rule over best",
    ]
    return table(head, rows), figures


def sequences(repeats: int) -> tuple[str, list[dict[str, Any]]]:
    """The table of matrices over sequences, and its figures."""
    rows, figures = [], []
    for positions, inputs, outputs, batch in SEQUENCES:
        x, g = torch.randn(batch, positions, inputs), torch.randn(batch, positions, outputs)
        some = max(1, (1 << 22) // (inputs * outputs))

        def materialised(x: torch.Tensor = x, g: torch.Tensor = g, some: int = some) -> None:
            for part_x, part_g in zip(x.split(some), g.split(some), strict=True):
                row_norms(torch.bmm(part_g.transpose(1, 2), part_x))

        share, fast = gram_share(positions, True), products.takes(x, g)
        times = {
            "Gram": milliseconds(lambda: gram_norms(x, g, share), repeats),
            "materialised": milliseconds(materialised, repeats),
        }
        made = "compiled" if fast else "materialised"
        if fast:
            times[made] = milliseconds(
                lambda: products.norms(x, g, products.sequence(x, g)), repeats
            )
        rule = "Gram" if gram_is_cheaper(positions, inputs, outputs, fast) else made
        best = min(times, key=lambda way: times[way])
        # The MEMORY_COST at which the rule would change its choice for this shape.
        edge = positions**2 * (inputs + outputs) / (inputs * outputs)
        name = f"{positions} x ({inputs} to {outputs}), batch {batch}"
        rows.append(
            [
                name,
                f"{times['Gram']:.2f}",
                f"{times['materialised']:.2f}",
                f"{times['compiled']:.2f}" if fast else "-",
                f"{edge:.1f}",
                rule,
                best,
            ]
            + [f"{times[rule] / times[best]:.2f}"]
        )
        figures.append({"sequence": name, **times, "edge": edge, "rule": rule, "best": best})
    head = [
        "positions x matrix",
        "Gram",
        "materialised",
        "compiled",
        "edge",
        "rule",
        "best",
        "rule over best",
    ]
    return table(head, rows), figures


def linear_products(repeats: int) -> tuple[str, list[dict[str, Any]]]:
    """The table of products of linear layers, and its figures."""
    rows, figures = [], []
    for count, inputs, outputs in PRODUCTS:
        x, weight = torch.randn(count, inputs), torch.randn(outputs, inputs)
        times = {
            "torch": milliseconds(lambda: F.linear(x, weight), repeats),
            "oneDNN": milliseconds(
                lambda: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""), repeats
            ),
        }
        worth = count * inputs * outputs >= matmul.WORTH_IT
        rule = matmul.source() if worth else "torch"
        best = min(times, key=lambda way: times[way])
        name = f"{count} x {inputs} to {outputs}"
        over = times[rule] / times[best]
        rows.append(
            [name, f"{times['torch']:.3f}", f"{times['oneDNN']:.3f}", rule, best, f"{over:.2f}"]
        )
        figures.append({"product": name, **times, "rule": rule, "best": best})
    return table(["product", "torch", "oneDNN", "rule", "best", "rule over best"], rows), figures


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("convolutions", "sequences", "products"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    torch.manual_seed(0)
    found: dict[str, Any] = {
        "MEMORY_COST": MEMORY_COST,
        "SHIFTED_FROM": SHIFTED_FROM,
        "STORED_FROM": STORED_FROM,
    }
    print(
        f"Milliseconds, one thread, medians of {options.repeats}. MEMORY_COST = {MEMORY_COST},"
        f" SHIFTED_FROM = {SHIFTED_FROM}, STORED_FROM = {STORED_FROM}.\n"
    )
    with torch.no_grad():
        parts = {
            "convolutions": convolutions,
            "sequences": sequences,
            "products": linear_products,
        }
        for part, measure in parts.items():
            if options.only in (None, part):
                text, found[part] = measure(options.repeats)
                print(text + "\n")
    write_json(options.json, found)


if __name__ == "__main__":
    main()
