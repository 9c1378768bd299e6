"""Fixed features of tables, compared on held-out training records under a private linear head.

    python bench/tables.py --tasks "adult;heart" --epsilons 1,8 --seeds 3 --out FILE
    python bench/tables.py --test --tasks adult --epsilons 0.5,1,3 --seeds 5
    python bench/tables.py --tasks adult --records 600 --rows "3 knots;3 and 8 knots" --seeds 8

No test set is looked at, unless --test asks for it: then the default features alone are trained on
all training records, and measured on the test set. Adult, Heart and VED are taken from
$ZETACLIP_DATA, and a fifth of their training records is held out (VED: a fifth of the types of
car); the other tables are made up. Every row is trained by the method "auto" at δ = 1e-5: nothing
is tuned. The number is the mean over seeds of AUC, accuracy, or RMSE as a share of the target's
range (for which less is better).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor

from zetaclip.accounting import noise_multiplier_for
from zetaclip.data import Dataset, Split, load
from zetaclip.data.columns import Categorical, Numeric
from zetaclip.data.inputs import TableInput
from zetaclip.features import Bins, bins
from zetaclip.training import Config
from zetaclip.training.evaluate import outputs_of
from zetaclip.training.recipe import build_method, build_model, resolve, total_steps
from zetaclip.training.records import nominal_size
from zetaclip.training.steps import PrivateSteps

DELTA = 1e-5
METRIC = {"binary": "auc", "classification": "accuracy", "regression": "rmse_of_range"}


# -- tables


def real(name: str, test: bool) -> Dataset:
    """A real table; unless ``test`` is set, its test set is a part of its training records."""
    whole = load(name)
    if test:
        return whole
    x, y = whole.train.x, whole.train.y
    generator = torch.Generator().manual_seed(0)
    if name == "ved":  # by type of car: its last five columns tell it
        _, group = torch.unique(x[:, 11:], dim=0, return_inverse=True)
        held = torch.rand(int(group.max()) + 1, generator=generator)[group] < 0.2
    else:
        held = torch.rand(len(y), generator=generator) < 0.2
    parts = {"train": Split(x[~held], y[~held]), "test": Split(x[held], y[held])}
    return dataclasses.replace(whole, **parts, nominal_size=int((~held).sum()))


def made_up(name: str) -> Dataset:
    """A made-up table with something that real ones have."""
    draw = np.random.default_rng(sum(map(ord, name)))
    rows, numbers, low, high = 10_000, 10, -3.0, 3.0
    if name == "200 rows":
        rows = 400
    if name == "200 numbers, 5 matter":
        numbers = 200
    raw = draw.normal(size=(rows, numbers))
    if name == "heavy tails":
        raw, low, high = draw.standard_t(1.5, (rows, numbers)), -50.0, 50.0
    group = draw.integers(0, 6, rows)
    score = np.tanh(raw[:, 0]) + raw[:, 1] * raw[:, 2] / 2 + np.abs(raw[:, 3]) - raw[:, 4]
    score = score + draw.normal(0, 1, 6)[group] + draw.normal(0, 0.5, rows)
    task, outputs, target_range = "binary", 1, None
    y: Any = (score > np.quantile(score, 0.97 if name == "3 % positives" else 0.6)).astype("f4")
    if name == "regression with outliers":
        spikes = np.where(draw.random(rows) < 0.02, draw.normal(0, 50, rows), 0)
        task, target_range = "regression", (-10.0, 10.0)
        y = np.clip(score + spikes, -10, 10).astype("f4")
    if name == "20 classes":
        task, outputs = "classification", 20
        y = (raw[:, :5] @ draw.normal(size=(5, 20)) + draw.normal(0, 1, (6, 20))[group]).argmax(1)
    scaled = np.clip((raw - low) / (high - low), 0, 1) * 2 - 1
    x = np.concatenate([scaled, group[:, None] == np.arange(6)], 1).astype("f4")
    cut = rows // 2
    columns = [Numeric(str(i), low, high) for i in range(numbers)]
    return Dataset(
        name,
        task,
        Split(torch.from_numpy(x[:cut]), torch.from_numpy(y[:cut])),
        Split(torch.from_numpy(x[cut:]), torch.from_numpy(y[cut:])),
        outputs,
        "one row",
        nominal_size=cut,
        target_range=target_range,
        inputs=TableInput((*columns, Categorical("group", tuple("abcdef")))),
    )


REAL = ("adult", "heart", "ved")
MADE_UP = (
    "3 % positives",
    "200 rows",
    "200 numbers, 5 matter",
    "heavy tails",
    "20 classes",
    "regression with outliers",
)


# -- features

Map = Callable[[Tensor], Tensor]


def maps(dataset: Dataset) -> Iterator[tuple[str, Map]]:
    """Every kind of features, by name."""
    assert isinstance(dataset.inputs, TableInput)
    columns = dataset.inputs.columns
    layout = bins(columns).layout
    numbers = sum(kind == "number" for kind, _ in layout)
    yield "the default", bins(columns, dataset.task == "regression")
    yield "16 hard bins", lambda x: _hard(x, layout, 16)
    yield "3 knots", Bins(layout, (3,))
    yield "8 knots", Bins(layout, (8,))
    yield "3 and 8 knots", Bins(layout, (3, 8))
    yield "2, 4, 8, 16 knots", Bins(layout, (2, 4, 8, 16))
    if 2 <= numbers <= 20:
        yield "3 knots, crosses of numbers", Bins(layout, (3,), 3, 0.8)
        yield "3 and 8 knots, crosses of numbers", Bins(layout, (3, 8), 3, 0.5)
    if len(layout) <= 40:
        yield "3 and 8 knots, all pairs hashed to 2048", lambda x: _all_pairs(x, layout, 2048)
    yield "1024 random Fourier features", lambda x: _fourier(x, 1024, 0.3)


def _hard(x: Tensor, layout: Any, count: int) -> Tensor:
    parts, at = [], 0
    for kind, width in layout:
        part = x[:, at : at + width]
        if kind == "number":
            place = ((part[:, 0].clamp(-1, 1) + 1) / 2 * count).long().clamp(max=count - 1)
            hard = torch.nn.functional.one_hot(place, count).float()
            part = torch.cat([hard * (1 - part[:, 1:]) if width == 2 else hard, part[:, 1:]], 1)
        parts.append(part)
        at += width
    found = torch.cat(parts, 1)
    return found / found.norm(dim=1, keepdim=True).clamp(min=1e-12)


def _all_pairs(x: Tensor, layout: Any, buckets: int) -> Tensor:
    """Hashed products of the cells of every two columns, beside the bins; numbers have 2 knots."""
    parts, at, generator = [], 0, torch.Generator().manual_seed(0)
    for kind, width in layout:
        part = x[:, at : at + width]
        if kind == "number":
            share = (part[:, :1].clamp(-1, 1) + 1) / 2
            part = torch.cat([1 - share, share], 1)
        parts.append(part)
        at += width
    found = torch.zeros(len(x), buckets)
    for i, first in enumerate(parts):
        for second in parts[:i]:
            cells = first.shape[1] * second.shape[1]
            place = torch.randint(buckets, (cells,), generator=generator)
            sign = torch.randint(2, (cells,), generator=generator) * 2.0 - 1
            found.index_add_(1, place, (first[:, :, None] * second[:, None]).flatten(1) * sign)
    found = found / found.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return torch.cat([Bins(layout)(x), found], 1) / math.sqrt(2)


def _fourier(x: Tensor, count: int, scale: float) -> Tensor:
    weights = torch.randn((x.shape[1], count // 2), generator=torch.Generator().manual_seed(0))
    at = x @ (weights * scale)
    return torch.cat([at.cos(), at.sin()], 1) / math.sqrt(count / 2)


# -- training


@cache
def sigma(epsilon: float, rate: float, steps: int) -> float:
    """The noise of one setting."""
    return noise_multiplier_for(epsilon, DELTA, rate, steps, "pld")


def trained(dataset: Dataset, model: str, epsilon: float, seed: int, unit: bool) -> float:
    """The metric of one private training."""
    config = Config(
        method="auto", features="none", model=model, epsilon=epsilon, delta=DELTA, seed=seed,
        method_options={"gain": math.sqrt(2.0 if model == "linear" else 1.0)} if unit else {},
    )  # fmt: skip
    config = resolve(config, dataset, build_method(config))
    size, _ = nominal_size(config, dataset)
    assert config.batch_size is not None
    noise = sigma(epsilon, min(1.0, config.batch_size / size), total_steps(config, size))
    config = config.changed(epsilon=None, sigma=noise)
    torch.manual_seed(seed)
    network = build_model(config, dataset)
    steps = PrivateSteps(config, dataset, build_method(config), network)
    while steps.done < steps.total:
        for _ in steps.updates(steps.total):
            pass
    steps.engine.detach()
    assert dataset.test is not None
    outputs = outputs_of(network, dataset.test, torch.device("cpu"))
    return float(steps.task.measure(outputs, dataset.test.y)[METRIC[dataset.task]])


def drawn(dataset: Dataset, records: int | None, seed: int) -> Dataset:
    """So many of the training records, drawn by the seed; None for all."""
    if records is None:
        return dataset
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(dataset.train.y), generator=generator)[:records]
    train = Split(dataset.train.x[rows], dataset.train.y[rows])
    return dataclasses.replace(dataset, train=train, nominal_size=len(rows))


def compare(
    task: str,
    epsilons: list[float],
    seeds: int,
    test: bool,
    rows: list[str],
    records: int | None = None,
) -> Iterator[tuple[str, int, list[str]]]:
    """A row for every kind of features: its name, its width, and a cell for every ε.

    Every kind has a head without a bias, since the knots of a number add up to 1; the default is
    also tried with one.
    """
    dataset = real(task, test) if task in REAL else made_up(task)
    if records is not None:
        dataset = dataclasses.replace(dataset, nominal_size=records)
    kinds: list[tuple[str, str, Dataset, bool]] = [
        ("none, linear", "linear", dataset, False),
        ("none, MLP 128-64", "mlp", dataset, False),
    ]
    assert dataset.test is not None
    for name, make in maps(dataset):
        with torch.no_grad():
            parts = [
                Split(torch.cat([make(some) for some in part.x.split(1024)]), part.y)
                for part in (dataset.train, dataset.test)
            ]
        made = dataclasses.replace(dataset, train=parts[0], test=parts[1])
        kinds.insert(len(kinds) - 2, (name, "head", made, True))
        if test:
            kinds = kinds[:1]
            break
        if name == "the default":
            kinds.insert(len(kinds) - 2, ("the default, with a bias", "linear", made, True))
    for name, model, data, unit in kinds:
        if rows and name not in rows:
            continue
        cells = []
        for epsilon in epsilons:
            found = [
                trained(drawn(data, records, seed), model, epsilon, seed, unit)
                for seed in range(seeds)
            ]
            spread = f" ± {statistics.stdev(found):.4f}" if seeds > 1 else ""
            cells.append(f"{statistics.fmean(found):.4f}{spread}")
        yield name, data.train.x.shape[1], cells


def main() -> None:
    """Prints a table for every task, and writes it to ``--out`` as it grows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default=";".join((*REAL, *MADE_UP)), help="separated by ;")
    parser.add_argument("--epsilons", default="1,8")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--records", type=int, help="train on so many, drawn by the seed")
    parser.add_argument("--rows", default="", help="names of rows, separated by ;")
    parser.add_argument("--out", type=Path, help="a .md file")
    parser.add_argument("--test", action="store_true", help="the default on the test set")
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    epsilons = [float(value) for value in given.epsilons.split(",")]
    only = [name for name in given.rows.split(";") if name]
    for task in given.tasks.split(";"):
        begun = time.perf_counter()
        lines = [
            f"\n## {task}\n",
            "| features | columns | " + " | ".join(f"ε = {e:g}" for e in epsilons) + " |",
            "|---|---:|" + "---:|" * len(epsilons),
        ]
        for line in lines:
            print(line, flush=True)
        found = compare(task, epsilons, given.seeds, given.test, only, given.records)
        for name, width, cells in found:
            lines.append(f"| {name} | {width} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
        print(f"{time.perf_counter() - begun:.0f} s", flush=True)
        if given.out is not None:
            with open(given.out, "a", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
