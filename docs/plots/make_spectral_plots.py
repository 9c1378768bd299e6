"""Makes the figures and tables of docs/spectral-control.md.

    python docs/plots/make_spectral_plots.py            # the pictures, into this folder
    python docs/plots/make_spectral_plots.py --tables   # the tables, as Markdown on the screen
    python docs/plots/make_spectral_plots.py --causes   # one more table, of 18 short private runs

Everything is simulated here with fixed seeds; no data set is needed. Takes about a minute on one
core.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from torch import nn

from zetaclip import PrivacyEngine
from zetaclip.control import Spectral
from zetaclip.spectrum import METHODS, eigenvalues, fit_tail, random_null

HERE = Path(__file__).parent
COLOURS = {"rank": "C0", "hill": "C1", "ks": "C2"}


def figure(width: float, height: float, columns: int = 1, rows: int = 1):
    drawing = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawing)
    return drawing, drawing.subplots(rows, columns, squeeze=False)


def save(drawing: Figure, name: str) -> None:
    drawing.savefig(HERE / name, dpi=80)
    print(f"{name}: {(HERE / name).stat().st_size // 1024} kB")


# What the fits do on spectra whose exponent is known


def spread(zeta: float, n: int, method: str, draws: int = 400) -> tuple[float, float, float]:
    """Bias, spread and mean stated error over samples of a power law."""
    rng = np.random.default_rng([n, int(10 * zeta)])
    fits = [fit_tail(rng.pareto(zeta - 1.0, n) + 1.0, method) for _ in range(draws)]
    zetas = np.array([fit.zeta for fit in fits if fit.ok])
    stated = np.mean([fit.stderr for fit in fits if fit.ok])
    return float(zetas.mean() - zeta), float(zetas.std()), float(stated)


def table_of_estimators() -> None:
    print("| n | true ζ |" + "".join(f" {method}: bias | spread | stated |" for method in METHODS))
    print("|---|---|" + "---|---|---|" * len(METHODS))
    for zeta in (2.5, 4.0):
        for n in (10, 32, 50, 128, 512, 1024):
            cells = [spread(zeta, n, method) for method in METHODS]
            shown = "".join(
                f" {bias:+.2f} | {sd:.2f} | {stated:.2f} |" for bias, sd, stated in cells
            )
            print(f"| {n} | {zeta} |{shown}")


def table_of_noise() -> None:
    print("| matrix | like |" + "".join(f" {method} |" for method in METHODS))
    print("|---|---|" + "---|" * len(METHODS))
    shapes = {
        (10, 512): "a head for ten classes",
        (32, 512): "fc1 of the MNIST net",
        (64, 27): "a 3x3 stem",
        (128, 1152): "layer2 of a ResNet-18",
        (512, 4608): "layer4 of a ResNet-18",
        (128, 9216): "a wide fc1",
        (256, 256): "a square layer",
        (1024, 1024): "a square layer",
    }
    for shape, what in shapes.items():
        nulls = [random_null(shape, method) for method in METHODS]
        shown = "".join(
            f" {null.median:.1f} ({null.low:.1f} to {null.high:.1f}) |" for null in nulls
        )
        print(f"| {shape[0]} x {shape[1]} | {what} |{shown}")


def table_of_spikes() -> None:
    """A random 32 x 512 matrix plus a few strong directions, singular values from 4 downwards."""
    print("| added to 32 x 512 noise |" + "".join(f" {method} |" for method in METHODS))
    print("|---|" + "---|" * len(METHODS))
    generator = torch.Generator().manual_seed(0)
    noise = (2 * torch.rand(32, 512, generator=generator) - 1) / 512**0.5
    for count in (0, 1, 2, 4, 8, 16):
        left = torch.linalg.qr(torch.randn(32, max(1, count), generator=generator)).Q
        right = torch.linalg.qr(torch.randn(512, max(1, count), generator=generator)).Q
        strength = torch.linspace(4.0, 1.0, count) if count else torch.zeros(1)
        spectrum = eigenvalues(noise + left @ torch.diag(strength) @ right.T)
        zetas = [fit_tail(spectrum, method).zeta for method in METHODS]
        print(f"| {count} directions |" + "".join(f" {zeta:.1f} |" for zeta in zetas))


# Pictures


def plot_tails() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(128, 512, generator=generator) / 512**0.5
    uneven = noise * ((torch.rand(128, generator=generator) + 1e-3) ** -0.5)[:, None]
    drawing, axes = figure(8, 3.2, columns=2)
    for ax, weight, title in zip(
        axes[0], (noise, uneven), ("random weights", "rows of unequal size")
    ):
        values = eigenvalues(weight).numpy()
        ax.loglog(values, np.arange(1, 129) / 128, ".", ms=3, color="0.4")
        for method in METHODS:
            fit = fit_tail(values, method)
            ends = np.array([fit.lambda_min, values[0]])
            label = f"{method}: ζ = {fit.zeta:.1f} ± {fit.stderr:.1f}"
            ax.loglog(
                ends,
                fit.n_tail / 128 * (ends / ends[0]) ** (1 - fit.zeta),
                color=COLOURS[method],
                label=label,
            )
        ax.set(
            title=f"128 x 512, {title}",
            xlabel="eigenvalue λ",
            ylabel="fraction above λ",
            ylim=(4e-3, 1.5),
        )
        ax.legend(fontsize=8)
        ax.xaxis.set_minor_formatter(NullFormatter())
    save(drawing, "tails.png")


def plot_nulls() -> None:
    drawing, axes = figure(8, 3.2, columns=2)
    ratios = np.array([1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 36, 54, 72])
    for ax, rows in zip(axes[0], (32, 128)):
        ax.axhspan(2, 6, color="0.9", label="the paper's zone")
        for method in METHODS:
            nulls = [random_null((rows, int(rows * ratio)), method) for ratio in ratios]
            ax.plot(ratios, [null.median for null in nulls], color=COLOURS[method], label=method)
            low, high = [null.low for null in nulls], [null.high for null in nulls]
            ax.fill_between(ratios, low, high, color=COLOURS[method], alpha=0.2, lw=0)
        ax.set(
            title=f"{rows} eigenvalues",
            xlabel="columns / rows",
            ylabel="ζ of random matrices",
            xscale="log",
            ylim=(0, 30),
        )
    axes[0][0].legend(fontsize=8)
    save(drawing, "nulls.png")


def plot_spread() -> None:
    drawing, axes = figure(8, 3.2, columns=2)
    sizes = (10, 16, 24, 32, 50, 80, 128, 256, 512)
    for method in METHODS:
        cells = [spread(4.0, n, method, draws=200) for n in sizes]
        axes[0][0].plot(
            sizes, [cell[0] for cell in cells], ".-", color=COLOURS[method], label=method
        )
        axes[0][1].plot(
            sizes, [cell[1] for cell in cells], ".-", color=COLOURS[method], label=method
        )
    axes[0][1].axhline(2.0, color="0.6", ls=":", label="radius of the zone")
    axes[0][0].set(title="bias at ζ = 4", xlabel="eigenvalues", xscale="log")
    axes[0][1].set(title="spread at ζ = 4", xlabel="eigenvalues", xscale="log", ylim=(0, 4))
    axes[0][1].legend(fontsize=8)
    save(drawing, "spread.png")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(512, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


def private_run(
    controller: Spectral, sigma: float = 0.8, seed: int = 0, shuffle: bool = False
) -> np.ndarray:
    """clip_history of a short private run on ten made-up clusters."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (4096,), generator=generator)
    centres = torch.randn(10, 512, generator=generator)
    inputs = centres[labels] * 0.4 + torch.randn(4096, 512, generator=generator)
    if shuffle:
        labels = labels[torch.randperm(4096, generator=generator)]
    torch.manual_seed(seed)
    net = Net()
    module, optimizer, loader = PrivacyEngine(seed=seed).make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.5),
        data_loader=torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(inputs, labels), batch_size=128
        ),
        noise_multiplier=sigma,
        clipping=controller,
        sample_rate=1 / 32,
        num_examples=4096,
    )
    loss = nn.CrossEntropyLoss()
    for _ in range(30):
        for x, y in loader:
            optimizer.zero_grad()
            loss(module(x), y).backward()
            optimizer.step()
    return np.array([entry[:5] for entry in optimizer.clip_history], dtype=float)


def table_of_causes() -> None:
    """What moves ζ: the run of the trajectories at constant C, with and without noise, true and
    shuffled labels."""
    print("| labels | σ | ζ at the first probe | smallest | last |")
    print("|---|---|---|---|---|")
    for shuffle in (False, True):
        for sigma in (0.0, 0.8, 2.0):
            runs = [
                private_run(Spectral(period=20, gain=0.0), sigma, seed, shuffle)[:, 1]
                for seed in range(3)
            ]
            columns = (
                [zeta[0] for zeta in runs],
                [zeta.min() for zeta in runs],
                [zeta[-1] for zeta in runs],
            )
            shown = " | ".join(f"{min(values):.1f} to {max(values):.1f}" for values in columns)
            print(f"| {'shuffled' if shuffle else 'true'} | {sigma} | {shown} |")


def plot_trajectories() -> None:
    forms = {
        "Spectral()": Spectral(period=20),
        "Spectral.paper()": Spectral.paper(period=20),
        'zone="relative"': Spectral(period=20, zone="relative"),
        'signal="random"': Spectral(period=20, signal="random"),
    }
    drawing, axes = figure(9, 5, columns=4, rows=2)
    null = random_null((64, 512), "rank")
    for column, (name, controller) in enumerate(forms.items()):
        steps, zeta, smooth, _, clip = private_run(controller).T
        top, bottom = axes[0][column], axes[1][column]
        top.axhspan(2, 6, color="0.92")
        top.axhspan(null.low, null.high, color="C3", alpha=0.25, lw=0)
        top.plot(steps, zeta, ".", ms=3, color="0.5", label="ζ read")
        top.plot(steps, smooth, color="C0", label="ζ̂ smoothed")
        top.set(title=name, ylim=(1, 7))
        bottom.plot(steps, clip, color="C2")
        bottom.axhline(0.5, color="0.6", ls=":")
        bottom.axhline(3.0, color="0.6", ls=":")
        bottom.set(xlabel="updates", ylim=(0.4, 4), yscale="log")
        bottom.set_yticks([0.5, 1, 2, 3], ["0.5", "1", "2", "3"])
        bottom.yaxis.set_minor_formatter(NullFormatter())
    axes[0][0].set_ylabel("ζ of fc1 (64 x 512)")
    axes[1][0].set_ylabel("clipping norm C")
    axes[0][0].legend(fontsize=7)
    save(drawing, "trajectories.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tables", action="store_true", help="print the tables instead of drawing")
    parser.add_argument(
        "--causes", action="store_true", help="print what noise and labels do to zeta, and stop"
    )
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if arguments.causes:
        table_of_causes()
        return
    if arguments.tables:
        table_of_estimators()
        print()
        table_of_noise()
        print()
        table_of_spikes()
        return
    for draw in (plot_tails, plot_nulls, plot_spread, plot_trajectories):
        draw()


if __name__ == "__main__":
    main()
