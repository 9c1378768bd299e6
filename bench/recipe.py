"""Is the default recipe the best one without tuning? Compared with a coupled constant rate.

    python bench/recipe.py --out runs/recipe                 # three seeds; reuses finished runs
    python bench/recipe.py --out runs/recipe --only mnist --seeds 5

MNIST, Adult and CIFAR-10. Every row is DP-SGD at the same σ and δ = 1e-5, except the last of each
set, which is the default of ``zetaclip train``. Prints mean and standard deviation over seeds, and
every seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from common import one_thread, table, write_json

one_thread()

from zetaclip.training import Config, train
from zetaclip.training.progress import Display

MNIST = {"data": "mnist", "model": "cnn", "sigma": 1.1, "batch_size": 256, "epochs": 8.0}
ADULT = {"data": "adult", "model": "mlp", "sigma": 0.62, "batch_size": 256, "epochs": 20.0}
CIFAR = {"data": "cifar10", "model": "resnet-small", "sigma": 0.5, "batch_size": 256, "epochs": 4.0}
COUPLED = {"method": "dp-sgd", "decouple": False, "schedule": "constant"}
CONSTANT = {"method": "dp-sgd", "schedule": "constant"}
DECAY = {"method": "dp-sgd"}
ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "mnist": {
        "coupled 0.25, C = 1": {**MNIST, **COUPLED, "lr": 0.25, "clip": 1.0},
        "decoupled 1.0 constant, C = 1": {**MNIST, **CONSTANT, "clip": 1.0},
        "decoupled 1.0 linear decay, C = 1": {**MNIST, **DECAY, "clip": 1.0},
        "default (spectral C)": MNIST,
    },
    "adult": {
        "coupled 0.1, C = 1": {**ADULT, **COUPLED, "lr": 0.1, "clip": 1.0},
        "decoupled 1.0 linear decay, C = 0.1": {**ADULT, **DECAY, "clip": 0.1},
        "decoupled 1.0 linear decay, C = 1": {**ADULT, **DECAY, "clip": 1.0},
        "decoupled 1.0 linear decay, C = 4": {**ADULT, **DECAY, "clip": 4.0},
        "default (spectral C)": ADULT,
    },
    "cifar10": {
        "coupled 0.5, C = 1": {**CIFAR, **COUPLED, "lr": 0.5, "clip": 1.0},
        "decoupled 1.0 linear decay, C = 1": {**CIFAR, **DECAY, "clip": 1.0},
        "default (spectral C)": CIFAR,
    },
}


def main() -> None:
    """Trains what is missing and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="runs/recipe")
    parser.add_argument("--only", choices=tuple(ROWS), action="append")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    epsilons: dict[str, set[str]] = {}
    for seed in range(arguments.seeds):  # one seed of all rows before the second of any
        for name in arguments.only or ROWS:
            for number, (label, values) in enumerate(ROWS[name].items()):
                folder = Path(arguments.out) / f"{name}-{number}-seed{seed}"
                config = Config(
                    **{**values, "seed": seed, "delta": 1e-5, "threads": 1, "eval_every": 100}
                )
                result = (
                    json.loads((folder / "result.json").read_text())
                    if (folder / "result.json").exists()
                    else train(
                        config,
                        folder,
                        resume=(folder / "config.json").exists(),
                        display=Display(quiet=True),
                    )
                )
                print(f"{name}, {label}, seed {seed}: {result['metric']['value']:.4f}", flush=True)
                found.setdefault(name, {}).setdefault(label, []).append(result["metric"]["value"])
                epsilons.setdefault(name, set()).add(f"{result['epsilon']:.2f}")
    rows = []
    for name, labels in found.items():
        for label, values in labels.items():
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            rows.append(
                [
                    name,
                    label,
                    f"{statistics.fmean(values):.4f} ± {spread:.4f}",
                    ", ".join(f"{value:.4f}" for value in values),
                    " ".join(sorted(epsilons[name])),
                ]
            )
    print(table(["data", "recipe", "mean ± std", "seeds", "ε (PRV)"], rows))
    write_json(arguments.json, {"metrics": found})


if __name__ == "__main__":
    main()
