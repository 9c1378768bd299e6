"""Speed of the spectral probe: compared with WeightWatcher, and as a part of training.

    OMP_NUM_THREADS=1 python bench/spectrum.py            # both tables
    OMP_NUM_THREADS=1 python bench/spectrum.py --share    # only the second

Every ratio is between two CPU times of the same run on the same matrix, medians of a few
repetitions. "Gaussian" are square matrices whose Gram form loses digits of the smallest values.
The first table splits the time: the cost of eigenvalues is LAPACK's in both programs, the fit is
our own. "At best" is the lower limit of any exact method through the Gram matrix: half a product
and 4/3 n³ for the reduction to three diagonals, at the speed of this machine's matrix product. The
next column is the time of torch's eigenvalue routine.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zetaclip import PrivacyEngine
from zetaclip.control import Spectral
from zetaclip.spectrum import eigenvalues, fit_tail

SHAPES = ((128, 3136), (256, 400), (512, 512), (1024, 1024), (1024, 4096))
# Side and seed of Gaussian matrices whose smallest eigenvalue is 4e-10 of the largest.
SQUARE = ((256, 64), (512, 54), (1024, 4))
PERIOD = 50


def median_ms(function: Callable[[], Any], repeats: int) -> float:
    """The median time of a call."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(1e3 * (time.process_time() - start))
    return statistics.median(times)


def matrix(rows: int, cols: int) -> torch.Tensor:
    """Noise with rows of unequal size, so that there is a tail to fit."""
    generator = torch.Generator().manual_seed(rows + cols)
    scale = (torch.rand(rows, generator=generator) + 1e-3) ** -0.5
    return torch.randn(rows, cols, generator=generator) / cols**0.5 * scale[:, None]


def matrices() -> Iterator[tuple[str, torch.Tensor]]:
    """What the first table measures."""
    for rows, cols in SHAPES:
        yield f"{rows}x{cols}", matrix(rows, cols)
    for side, seed in SQUARE:
        generator = torch.Generator().manual_seed(seed)
        yield f"{side}x{side} Gaussian", torch.randn(side, side, generator=generator) / side**0.5


def against_weightwatcher(repeats: int) -> None:
    """Prints the first table."""
    logging.disable(logging.CRITICAL)
    import weightwatcher
    from weightwatcher.WW_powerlaw import WWFit

    widths = (19, 14, 8, 6, 14, 8, 8, 12, 10, 6)
    names = (
        "matrix",
        "analyze, ms",
        "ours, ms",
        "ratio",
        "eigenvalues",
        "at best",
        "torch's",
        "their fit",
        "our fit",
        "ratio",
    )
    print(" ".join(f"{name:>{width}}" for name, width in zip(names, widths)))
    for name, weight in matrices():
        rows, cols = weight.shape
        layer = nn.Linear(cols, rows, bias=False)
        layer.weight.data = weight.clone()
        model = nn.Sequential(layer)

        def theirs(model: nn.Module = model) -> Any:
            with contextlib.redirect_stdout(io.StringIO()):
                return weightwatcher.WeightWatcher(model=model).analyze()

        alpha = float(theirs().alpha.values[0])
        spectrum = eigenvalues(weight)
        zeta = fit_tail(spectrum, "ks").zeta
        assert abs(zeta - alpha) < 1e-6 * alpha, (zeta, alpha)
        full = median_ms(theirs, repeats)
        eig = median_ms(lambda weight=weight: eigenvalues(weight), repeats)
        fit = median_ms(lambda spectrum=spectrum: fit_tail(spectrum, "ks"), repeats)
        their_fit = median_ms(lambda spectrum=spectrum: WWFit(spectrum.numpy()), repeats)
        double = weight.double()
        least = (rows * rows * cols + 4 / 3 * rows**3) / (2 * rows * rows * cols)
        least *= median_ms(lambda double=double: double @ double.T, repeats)
        torchs = median_ms(lambda double=double: torch.linalg.eigvalsh(double @ double.T), repeats)
        numbers = (
            full,
            eig + fit,
            full / (eig + fit),
            eig,
            least,
            torchs,
            their_fit,
            fit,
            their_fit / fit,
        )
        cells = (name, *(f"{number:.1f}" for number in numbers))
        print(" ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths)))


def mnist_net() -> nn.Module:
    """Two convolutions and two dense layers of 512 to 32 to 10, 26 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


class Block(nn.Module):
    """A residual block with group norm."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1)
        self.norm1 = nn.GroupNorm(outside // 4, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1)
        self.norm2 = nn.GroupNorm(outside // 4, outside)
        self.shortcut = nn.Conv2d(inside, outside, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class Resnet(nn.Module):
    """Three stages of 16, 32 and 64 channels for 32 x 32 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1)
        self.layer1, self.layer2, self.layer3 = Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits."""
        x = self.layer3(self.layer2(self.layer1(torch.relu(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))


def share_of_training() -> None:
    """Prints the second table: probe and controller update over PERIOD private steps."""
    print(
        f"{'network':>8} {'batch':>6} {'step, ms':>9} {'probe, ms':>10} {'share at K = 50':>16}"
        "  layers"
    )
    cases = (("MNIST", mnist_net(), (1, 28, 28), 256), ("ResNet", Resnet(), (3, 32, 32), 128))
    for name, net, shape, batch in cases:
        data = torch.utils.data.TensorDataset(
            torch.randn(16 * batch, *shape), torch.randint(0, 10, (16 * batch,))
        )
        controller = Spectral(period=PERIOD)
        module, optimizer, loader = PrivacyEngine(seed=0).make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            data_loader=torch.utils.data.DataLoader(data, batch_size=batch),
            noise_multiplier=1.1,
            clipping=controller,
            sample_rate=1 / 16,
            num_examples=16 * batch,
        )
        steps = []
        loss = nn.CrossEntropyLoss()
        start = time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            loss(module(x), y).backward()
            optimizer.step()
            steps.append(1e3 * (time.perf_counter() - start))
            start = time.perf_counter()
        assert controller.probe is not None
        probe, state = (
            controller.probe.bind(module, dict(module.named_parameters())),
            controller.init(),
        )

        def once(
            probe: Any = probe,
            controller: Any = controller,
            state: Any = state,
            module: Any = module,
        ) -> None:
            controller.update(probe.read(module, PERIOD), state)

        once()  # computes the random null of each shape, which a run does only once
        step, cost = statistics.median(steps[2:]), median_ms(once, 9)
        layers = ", ".join(probe.bound)  # type: ignore[attr-defined]
        share = 100 * cost / (PERIOD * step + cost)
        print(f"{name:>8} {batch:6d} {step:9.1f} {cost:10.2f} {share:14.3f} %  {layers}")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--share", action="store_true", help="only the share of training")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if not arguments.share:
        against_weightwatcher(arguments.repeats)
        print()
    share_of_training()


if __name__ == "__main__":
    main()
