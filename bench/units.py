"""Rows, groups and units on Adult: what an ε of 3 for one person costs in each way.

    python bench/units.py --seeds 3

Adult has one row for each person. Here its training rows are dealt out to made-up persons with 1 to
4 rows each, by a public seed. Three ways lead to an ε for a person: rows alone (ε = 3 for a row,
and what that is for a group of four), rows with so much noise that a group of four has ε = 3, and
persons as units. Each is `zetaclip train` with default settings at δ = 1e-5; printed are the three
ε and the mean AUC on the test set.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from zetaclip.accounting import group_epsilon
from zetaclip.data import Dataset, load
from zetaclip.ledger import Event
from zetaclip.training import Config, train
from zetaclip.training.progress import Display

DELTA, TARGET, MOST = 1e-5, 3.0, 4


def with_persons(dataset: Dataset) -> Dataset:
    """The same rows, dealt out to persons with 1 to ``MOST`` of them."""
    generator = torch.Generator().manual_seed(0)
    rows = len(dataset.train.y)
    sizes = torch.randint(1, MOST + 1, (rows,), generator=generator)
    owners = torch.arange(rows).repeat_interleave(sizes)[:rows]
    owners = owners[torch.randperm(rows, generator=generator)]
    persons = len(owners.unique())
    return dataclasses.replace(
        dataset, owners=owners, rows_per_unit=MOST, nominal_size=persons, unit="one person"
    )


def auc(dataset: Dataset, seed: int, epsilon: float) -> tuple[float, Event]:
    """The AUC of a run on the test set, and its steps."""
    config = Config(data="adult", seed=seed, delta=DELTA, epsilon=epsilon)
    with tempfile.TemporaryDirectory() as folder:
        result = train(config, Path(folder) / "run", data=dataset, display=Display(quiet=True))
    steps = Event(result["sample_rate"], result["multipliers"][0], result["steps"])
    return result["metrics"]["auc"], steps


def for_a_group(dataset: Dataset) -> float:
    """The ε for one row with which a group of ``MOST`` rows has about ``TARGET``, from below."""
    low, high = TARGET / MOST / 4, TARGET / MOST
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        _, steps = auc(dataset, 0, middle)
        low, high = (
            (middle, high) if group_epsilon([steps], DELTA, MOST) <= TARGET else (low, middle)
        )
    return low


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    count = parser.parse_args().seeds
    rows = load("adult")
    persons = with_persons(rows)
    print("| what | ε for a row | ε for four rows | ε for a person | AUC |")
    print("|---|---|---|---|---|")
    for name, dataset, epsilon in (
        ("rows", rows, TARGET),
        ("rows, four of them at ε = 3", rows, for_a_group(rows)),
        ("persons as units", persons, TARGET),
    ):
        found = [auc(dataset, seed, epsilon) for seed in range(1, count + 1)]
        group = group_epsilon([found[0][1]], DELTA, MOST)
        private = f"{epsilon:.3g} | - | {epsilon:.3g}" if dataset is persons else ""
        values = private or f"{epsilon:.3g} | {group:.3g} | {group:.3g}"
        mean = statistics.mean(value for value, _ in found)
        print(f"| {name} | {values} | {mean:.4f} |", flush=True)


if __name__ == "__main__":
    main()
