"""PrivateClassifier on five numeric columns of Adult, beside diffprivlib's models and Opacus.

    python -m venv .dpl && .dpl/bin/pip install diffprivlib==0.6.6 scikit-learn==1.5.2
    python bench/sklearn_adult.py --data FOLDER --diffprivlib .dpl/bin/python

diffprivlib 0.6.6 needs an older scikit-learn than zetaclip, so this script runs its models in
another environment. FOLDER contains adult/adult.data and adult/adult.test (default:
$ZETACLIP_DATA). AUC is on the test file: the median over seeds with the smallest and the largest.
Bounds are declared, δ = 1e-5 (diffprivlib's models have δ = 0). Seconds include the search for σ.
Opacus trains the same network.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# Age, education, gain, loss, hours.
COLUMNS = {0: (17, 90), 4: (1, 16), 10: (0, 1e5), 11: (0, 4356), 12: (1, 99)}
EPSILONS = (0.5, 1.0, 3.0)
DELTA = 1e-5
Fit = Callable[[np.ndarray, np.ndarray, float, int], Callable[[np.ndarray], np.ndarray]]


def load(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The scaled columns of a file, and its labels."""
    lines = (folder / "adult" / name).read_text().splitlines()
    rows = [line.strip().rstrip(".").split(", ") for line in lines if line.count(",") > 10]
    low, high = np.array([*COLUMNS.values()], dtype=float).T
    x = np.array([[float(row[i]) for i in COLUMNS] for row in rows])
    return np.clip((x - low) / (high - low), 0, 1), np.array(
        [int(row[-1] == ">50K") for row in rows]
    )


# -- contenders: (x, y, ε, seed) -> scores of new rows


def zetaclip(x: np.ndarray, y: np.ndarray, epsilon: float, seed: int) -> Any:
    """``PrivateClassifier`` with its defaults."""
    from zetaclip.integrations.sklearn import PrivateClassifier

    model = PrivateClassifier(
        epsilon, DELTA, bounds=(0, 1), classes=[0, 1], num_examples=len(y), random_state=seed
    ).fit(x, y)
    return lambda rows: model.predict_proba(rows)[:, 1]


def opacus(x: np.ndarray, y: np.ndarray, epsilon: float, seed: int) -> Any:
    """Opacus with the network and settings of ``PrivateClassifier``, C = 1, ghost clipping."""
    import torch
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    from zetaclip.models import Perceptron

    torch.manual_seed(seed)
    network = Perceptron((x.shape[1],), 1, (128, 64))
    inputs, targets = (
        torch.tensor(2 * x - 1, dtype=torch.float32),
        torch.tensor(y, dtype=torch.float32),
    )
    epochs = 20
    network, optimizer, criterion, loader = PrivacyEngine(
        accountant="prv"
    ).make_private_with_epsilon(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(inputs, targets), batch_size=256),
        criterion=torch.nn.BCEWithLogitsLoss(),
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
    )
    steps, done = epochs * len(loader), 0
    for _ in range(epochs):
        for rows, labels in loader:
            optimizer.param_groups[0]["lr"] = 1.0 - done / steps
            optimizer.zero_grad()
            criterion(network(rows).squeeze(1), labels).backward()
            optimizer.step()
            done += 1
    with torch.no_grad():
        return lambda rows: (
            network(torch.tensor(2 * rows - 1, dtype=torch.float32)).squeeze(1).detach().numpy()
        )


def logistic(x: np.ndarray, y: np.ndarray, epsilon: float, seed: int) -> Any:
    """Logistic regression of diffprivlib."""
    from diffprivlib.models import LogisticRegression

    # Its sensitivity needs a bound on a row's norm: five features in [0, 1].
    model = LogisticRegression(epsilon=epsilon, data_norm=5**0.5, random_state=seed).fit(x, y)
    return model.decision_function


def bayes(x: np.ndarray, y: np.ndarray, epsilon: float, seed: int) -> Any:
    """Naive Bayes of diffprivlib."""
    from diffprivlib.models import GaussianNB

    model = GaussianNB(epsilon=epsilon, bounds=(0, 1), random_state=seed).fit(x, y)
    return lambda rows: model.predict_proba(rows)[:, 1]


def forest(x: np.ndarray, y: np.ndarray, epsilon: float, seed: int) -> Any:
    """Random forest of diffprivlib."""
    from diffprivlib.models import RandomForestClassifier

    model = RandomForestClassifier(
        epsilon=epsilon, bounds=(0, 1), classes=[0, 1], random_state=seed
    ).fit(x, y)
    return lambda rows: model.predict_proba(rows)[:, 1]


OURS: dict[str, Fit] = {"zetaclip PrivateClassifier": zetaclip, "Opacus loop, same network": opacus}
THEIRS: dict[str, Fit] = {
    "diffprivlib LogisticRegression": logistic,
    "diffprivlib GaussianNB": bayes,
    "diffprivlib RandomForestClassifier": forest,
}


def measure(contenders: dict[str, Fit], folder: Path, seeds: int) -> list[dict[str, Any]]:
    """AUC and CPU seconds of every contender, ε and seed."""
    from sklearn.metrics import roc_auc_score

    warnings.simplefilter("ignore")
    (x, y), (test, truth) = load(folder, "adult.data"), load(folder, "adult.test")
    found = []
    for name, fit in contenders.items():
        for epsilon in EPSILONS:
            for seed in range(seeds):
                begun = time.process_time()  # other work on the machine must not count
                score = fit(x, y, epsilon, seed)
                seconds = time.process_time() - begun
                auc = float(roc_auc_score(truth, score(test)))
                found.append(
                    {
                        "model": name,
                        "epsilon": epsilon,
                        "seed": seed,
                        "auc": auc,
                        "seconds": seconds,
                    }
                )
                print(
                    f"{name}, ε = {epsilon:g}, seed {seed}: AUC {auc:.4f}, {seconds:.1f} s",
                    file=sys.stderr,
                )
    return found


def summary(found: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    head = ["model", *(f"AUC at ε = {epsilon:g}" for epsilon in EPSILONS), "CPU seconds per fit"]
    lines = [head, ["---"] * len(head)]
    for name in dict.fromkeys(row["model"] for row in found):
        own = [row for row in found if row["model"] == name]
        cells = []
        for epsilon in EPSILONS:
            values = sorted(row["auc"] for row in own if row["epsilon"] == epsilon)
            cells.append(f"{statistics.median(values):.3f} ({values[0]:.3f}-{values[-1]:.3f})")
        lines.append([name, *cells, f"{statistics.median(row['seconds'] for row in own):.2g}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("ZETACLIP_DATA"),
        help="folder that holds adult/",
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--diffprivlib", help="the Python of an environment with diffprivlib and scikit-learn 1.5.2"
    )
    parser.add_argument("--theirs", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", help="write all single results to this file")
    arguments = parser.parse_args()
    if arguments.data is None:
        parser.error("give --data, or set ZETACLIP_DATA")
    if arguments.theirs:
        print(json.dumps(measure(THEIRS, arguments.data, arguments.seeds)))
        return
    from common import one_thread

    one_thread()
    found = measure(OURS, arguments.data, arguments.seeds)
    if arguments.diffprivlib:
        command = [
            arguments.diffprivlib,
            __file__,
            "--theirs",
            "--data",
            str(arguments.data),
            "--seeds",
            str(arguments.seeds),
        ]
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=clean)
        found += json.loads(answer.stdout)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))
    print(summary(found))


if __name__ == "__main__":
    main()
