"""Tables with few columns: which step size suits them. The lab of the law's rule for few inputs.

    python bench/few_inputs.py                      # a ladder of rates around the law without it
    python bench/few_inputs.py --columns 16 48      # the same tables with columns of noise added
    python bench/few_inputs.py --longer 3           # three times the updates
    python bench/few_inputs.py --linear

All tables are made up, and none is a task of `zetaclip reproduce no-tuning`. The numbers are means
over seeds, in points of AUC x 100, accuracy or R² x 100: those of the law without its rule for few
inputs, and what each multiple of its rate adds to that. The last two columns are regret, without
the rule and with it, against the best of all of these rates.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Generator, Tensor

from zetaclip.experiments import regret
from zetaclip.experiments._exact import Problem, Setting, start_of, train
from zetaclip.methods._auto import law, limits
from zetaclip.training.lengths import length

TIMES = (0.5, 1.0, 2.0, 4.0, 8.0)


def normal(g: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g)


def coin(g: Generator, logit: Tensor) -> Tensor:
    return (torch.rand(len(logit), generator=g) < torch.sigmoid(logit)).long()


def plain(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    x = normal(g, n, 5)
    return x, coin(g, x @ torch.tensor([1.0, -1.0, 0.5, 0.0, 1.0]))


def weak(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    x, w = normal(g, n, 8), normal(g, 8)
    return x, coin(g, 0.6 * x @ (w / w.norm()))


def few_positives(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    x = normal(g, n, 6)
    return x, coin(g, 1.5 * x[:, 0] + x[:, 1] - 4)


def scales(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    x = normal(g, n, 6)
    y = coin(g, x @ torch.tensor([0.5, -1.0, 0.7, 1.0, -1.2, 1.0]))
    return x / torch.tensor([1.0, 1.5, 2.5, 4.0, 6.0, 10.0]), y


def rings(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    x = normal(g, n, 3)
    return x, coin(g, 2.5 * (x.square().sum(1) - 2.4))


def checker(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    x = normal(g, n, 6)
    return x, (x[:, 0] * x[:, 1] > 0).long()


def bent(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    x = normal(g, n, 10)
    return x, coin(g, x[:, 0] + 0.8 * x[:, 1] * x[:, 2] - 0.6 * x[:, 3].square() + 0.6)


def clusters(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    y = torch.randint(0, 3, (n,), generator=g)
    return 1.2 * normal(g, 3, 5)[y] + normal(g, n, 5), y


def eight(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    y = torch.randint(0, 8, (n,), generator=g)
    return 0.9 * normal(g, 8, 8)[y] + normal(g, n, 8), y


def number(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    x, w = normal(g, n, 6), normal(g, 6)
    return x, x @ (w / w.norm()) + 0.5 * normal(g, n)


def product(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    x = normal(g, n, 8)
    return x, x[:, 0] * x[:, 1] + 0.5 * x[:, 2] + 0.2 * normal(g, n)


def wave(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    x = normal(g, n, 5)
    y = torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1].square() + 0.3 * x[:, 2]
    return x, y + 0.2 * normal(g, n)


# What draws columns and targets, training records, outputs.
Table = tuple[Callable[[Generator, int], tuple[Tensor, Tensor]], int, int]
TABLES: dict[str, Table] = {
    "plain": (plain, 500, 1),
    "weak": (weak, 600, 1),
    "few-positives": (few_positives, 2000, 1),
    "scales": (scales, 600, 1),
    "rings": (rings, 1000, 1),
    "checker": (checker, 3000, 1),
    "bent": (bent, 2000, 1),
    "clusters": (clusters, 150, 3),
    "eight": (eight, 1000, 8),
    "number": (number, 400, 1),
    "product": (product, 1000, 1),
    "wave": (wave, 800, 1),
}


def problem_of(table: Table, seed: int, columns: int, linear: bool) -> Problem:
    """The records, with columns of noise up to ``columns``, scaled as those of the experiment."""
    draw, rows, outputs = table
    g = torch.Generator().manual_seed(9000 + seed)
    x, y = draw(g, rows + 3000)
    x = torch.cat((x, normal(g, len(x), max(0, columns - x.shape[1]))), 1)
    x = (x / 3).clamp(-1, 1)
    regression = y.is_floating_point()
    if regression:
        low, high = y[:rows].quantile(0.01), y[:rows].quantile(0.99)
        y = (2 * (y - low) / (high - low) - 1).clamp(-1, 1)
    if linear:
        x = x / x.norm(dim=1, keepdim=True).clamp_min(1e-6)
    return Problem(x[:rows], y[:rows], x[rows:], y[rows:], outputs, regression)


def points(problem: Problem, epsilon: float, seed: int, linear: bool, longer: int) -> list[float]:
    """Points at each of ``TIMES`` the rate without the rule, and at the rate with it."""
    size, inputs = problem.x.shape
    widths = (inputs, *(() if linear else (64,)), problem.outputs)
    batch, epochs = length(size, epsilon, linear)
    assert epochs is not None
    steps = round(epochs * -(-size // batch)) * longer
    sigma = regret._sigma(epsilon, min(1.0, batch / size), steps, size)
    update = regret._update(widths, problem)
    without, ruled = (
        law(sigma / batch, steps, update.gain,
            *limits(len(widths) - 1, problem.regression, steps, known))
        for known in (None, inputs)
    )  # fmt: skip
    own = Setting(without, update.clip_norm)
    settings = [replace(own, rate=without * times) for times in TIMES]
    found = train(
        problem, start_of(widths, seed), [*settings, replace(own, rate=ruled)],
        sigma=sigma, batch=batch, steps=steps, seed=1000 + seed,
    )  # fmt: skip
    return regret._scores(problem, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=TABLES)
    parser.add_argument("--columns", nargs="+", type=int, default=[0], help="add noise up to these")
    parser.add_argument("--epsilons", nargs="+", type=float, default=[0.5, 1.0, 3.0, 8.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--longer", type=int, default=1, help="so many times the updates")
    parser.add_argument("--linear", action="store_true", help="no hidden layer; 64 units otherwise")
    given = parser.parse_args()
    torch.set_num_threads(1)
    shown = " | ".join(f"x {times:g}" for times in TIMES if times != 1)
    print(f"| table | columns | ε | law | {shown} | regret | with the rule |")
    print("|---" * (6 + len(TIMES)) + "|")
    regrets: list[tuple[float, float]] = []
    for name in given.tables:
        for columns in given.columns:
            for epsilon in given.epsilons:
                problems = [
                    problem_of(TABLES[name], seed, columns, given.linear)
                    for seed in range(1, given.seeds + 1)
                ]
                rows = [
                    points(problem, epsilon, seed, given.linear, given.longer)
                    for seed, problem in enumerate(problems, 1)
                ]
                means = [statistics.fmean(column) for column in zip(*rows, strict=True)]
                law_alone = means[TIMES.index(1.0)]
                added = " | ".join(
                    f"{mean - law_alone:+.2f}"
                    for times, mean in zip(TIMES, means, strict=False)
                    if times != 1
                )
                regrets.append((max(means) - law_alone, max(means) - means[-1]))
                print(
                    f"| {name} | {problems[0].x.shape[1]} | {epsilon:g} | {law_alone:.2f} |"
                    f" {added} | {regrets[-1][0]:.2f} | {regrets[-1][1]:.2f} |",
                    flush=True,
                )
    for what, one in zip(("without the rule", "with it"), zip(*regrets, strict=True), strict=True):
        ranked = sorted(one)
        ninth = ranked[min(len(ranked) - 1, -(-9 * len(ranked) // 10) - 1)]
        print(
            f"regret {what}: median {statistics.median(ranked):.2f}, 90th percentile {ninth:.2f},"
            f" worst {ranked[-1]:.2f}; {len(ranked)} lines"
        )


if __name__ == "__main__":
    main()
