"""What ``zetaclip train`` costs over the bare loop: an epoch of MNIST with evaluation.

    python bench/train.py                # three rounds of an epoch each
    python bench/train.py --rounds 5

It also measures the start of the command. Both loops train the same network on the same data with
the same noise and the spectral controller. They take turns, and the figure is the median over
rounds of the ratio within a round. The data are MNIST if it is found, else random images of its
size.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from common import one_thread, table, write_json

one_thread()

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from zetaclip import PrivacyEngine, Spectral
from zetaclip.data import Dataset, Split, load
from zetaclip.errors import InputError
from zetaclip.models import build
from zetaclip.training import Config, train
from zetaclip.training import start as training_start

BATCH, SIGMA = 256, 1.1


def mnist() -> tuple[Dataset, str]:
    """The data, and what they are called in the table."""
    try:
        return load("mnist"), "MNIST"
    except InputError:

        def made(count: int) -> Split:
            return Split(torch.rand(count, 1, 28, 28), torch.randint(0, 10, (count,)))

        return (
            Dataset(
                "mnist",
                "classification",
                made(60_000),
                made(10_000),
                10,
                "one image",
                nominal_size=60_000,
            ),
            "random",
        )


def bare(data: Dataset) -> float:
    """Seconds of one epoch of the ten-line loop."""
    model = build("cnn", (1, 28, 28), 10)
    engine = PrivacyEngine()
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(data.train.x, data.train.y), batch_size=BATCH),
        noise_multiplier=SIGMA,
        clipping=Spectral(),
        num_examples=data.nominal_size,
        decouple_lr=True,
    )
    began = time.perf_counter()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return time.perf_counter() - began


def whole(data: Dataset) -> dict[str, float]:
    """Seconds of an epoch through the trainer, without the setup."""
    config = Config(data="mnist", model="cnn", sigma=SIGMA, batch_size=BATCH, epochs=1.0, threads=1)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(training_start, "load_data", return_value=data),
    ):
        seconds = train(config, Path(folder) / "run")["seconds"]
    return {name: value for name, value in seconds.items() if name not in ("setup", "total")}


def start(words: list[str]) -> float:
    """Seconds of a command."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "zetaclip", *words], check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    data, name = mnist()
    bare(data)  # warm-up
    rounds: list[tuple[float, dict[str, float]]] = []
    for _ in range(arguments.rounds):
        rounds.append((bare(data), whole(data)))
    ratios = [sum(parts.values()) / loop for loop, parts in rounds]
    shares: dict[str, Any] = {
        part: statistics.median(parts[part] / sum(parts.values()) for _, parts in rounds)
        for part in rounds[0][1]
    }
    helps = [start(["--help"]) for _ in range(5)]
    rows = [
        [
            f"epoch of {name} through the trainer / bare loop",
            f"{statistics.median(ratios):.3f}",
            f"{min(ratios):.3f} to {max(ratios):.3f}",
        ],
        *([f"  share of {part}", f"{100 * share:.1f} %", ""] for part, share in shares.items()),
        [
            "`zetaclip --help`, seconds",
            f"{statistics.median(helps):.2f}",
            f"{min(helps):.2f} to {max(helps):.2f}",
        ],
    ]
    print(table(["what", "value", "spread"], rows))
    if arguments.json:
        write_json(
            arguments.json,
            {"data": name, "ratios": ratios, "shares": shares, "help_seconds": helps},
        )


if __name__ == "__main__":
    main()
