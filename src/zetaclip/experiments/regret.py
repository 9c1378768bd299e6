"""`zetaclip reproduce no-tuning`: what "auto" loses to a step size that is tuned on the test set.

For each task, ε and seed the same private training is run at the law's rate and at a ladder of
rates around it, each twice the one before, until the best one is inside. Regret is the mean of the
best rate minus the mean of the law's, in points of accuracy, AUC x 100 or R² x 100. The best rate
is chosen on the test set, which is unfair to the law on purpose. Other methods run at their default
rates, batches and lengths, against the same best.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..methods._auto import Auto, law, limits
from ._exact import Problem, Setting, start_of, train
from ._tasks import TASKS, Task, problem_of

NAME = "no-tuning"
TITLE = "Nothing to tune: regret of default settings against the best rate by the test set"
EPSILONS = (0.5, 1.0, 3.0, 8.0)
_LADDER = range(-4, 5)  # exponents of 2
_FARTHEST = 9
_BASELINES = {
    "DP-SGD, C = 1, rate 1": Setting(1.0, 1.0, 0.0),
    "AUTO-S, rate 1": Setting(1.0, None, 0.0),
    "DP-Adam, C = 1, rate 0.001": Setting(0.001, 1.0, 0.9, adam=True),
}
_LAW = "auto"


def run(out: str | Path, only: Mapping[str, Sequence[str]] | None = None, say: Any = print) -> str:
    """Runs what is missing, writes the page, and returns a summary.

    Args:
        out: The results folder.
        only: ``data`` names tasks, ``seed`` seeds; others are left for later.
        say: Told after each task.
    """
    folder = Path(out) / NAME
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "cells.jsonl"
    wanted = only or {}
    done = {_key(cell) for cell in read(file)}
    for seed in range(1, 1 + max(task.seeds for task in TASKS)):  # a first seed of every task
        for task in TASKS:
            named = task.name in wanted.get("data", [task.name])
            if seed > task.seeds or not named or str(seed) not in wanted.get("seed", [str(seed)]):
                continue
            left = [e for e in EPSILONS if (task.label, e, seed) not in done]
            problem = problem_of(task, seed) if left else None
            for epsilon in left:
                assert problem is not None
                cell = measure(task, problem, epsilon, seed)
                with file.open("a") as lines:
                    lines.write(json.dumps(cell) + "\n")
            if left:
                say(f"{task.label}, seed {seed}: done")
    return write(folder)


def read(file: Path) -> list[dict[str, Any]]:
    """The finished cells."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def planned() -> int:
    """How many cells there are in all."""
    return sum(task.seeds for task in TASKS) * len(EPSILONS)


def _key(cell: Mapping[str, Any]) -> tuple[str, float, int]:
    return cell["task"], cell["epsilon"], cell["seed"]


def measure(task: Task, problem: Problem, epsilon: float, seed: int) -> dict[str, Any]:
    """One cell: the law, its ladder, and the other methods."""
    from ..training.lengths import length

    size, linear = len(problem.y), not task.hidden
    widths = (problem.x.shape[1], *task.hidden, problem.outputs)
    start = start_of(widths, seed)
    update = _update(widths, problem.regression)
    batch, epochs = length(size, epsilon, linear)
    assert epochs is not None
    steps = round(epochs * -(-size // batch))
    sigma = _sigma(epsilon, min(1.0, batch / size), steps, size)
    rate = law(sigma / batch, steps, update.gain, *limits(1 + len(task.hidden), problem.regression))
    ladder: dict[int, float] = {}
    exponents = list(_LADDER)
    while exponents:
        settings = [Setting(rate * 2.0**k, update.clip_norm) for k in exponents]
        outputs = train(
            problem, start, settings, sigma=sigma, batch=batch, steps=steps, seed=1000 + seed
        )
        ladder |= zip(exponents, _scores(problem, outputs), strict=True)
        best, low, high = max(ladder, key=lambda k: ladder[k]), min(ladder), max(ladder)
        exponents = [low - 1] if best == low else [high + 1] if best == high else []
        exponents = [k for k in exponents if abs(k) <= _FARTHEST]
    cell = {
        "task": task.label,
        "epsilon": epsilon,
        "seed": seed,
        "batch": batch,
        "steps": steps,
        "sigma": sigma,
        "rate": rate,
        "constant": _constant(problem),
        "ladder": {str(k): ladder[k] for k in sorted(ladder)},
    }
    return cell | {"others": _others(problem, start, epsilon, seed)}


def _others(problem: Problem, start: list[Tensor], epsilon: float, seed: int) -> dict[str, float]:
    """Other methods at the defaults that they had before: 20 epochs of small batches."""
    size = len(problem.y)
    batch = min(size, 256, max(16, size // 40))
    steps = 20 * -(-size // batch)
    sigma = _sigma(epsilon, batch / size, steps, size)
    outputs = train(
        problem, start, list(_BASELINES.values()),
        sigma=sigma, batch=batch, steps=steps, seed=2000 + seed,
    )  # fmt: skip
    return dict(zip(_BASELINES, _scores(problem, outputs), strict=True))


def _update(widths: tuple[int, ...], regression: bool) -> Auto:
    """The optimizer that `zetaclip train` would build, for its constants."""
    from ..methods._auto import gain
    from ..models import Linear, Perceptron
    from ..randomness._forward import alone

    if len(widths) == 2:
        return Auto(Linear(widths[:1], widths[-1]).parameters(), regression=regression)
    with alone():
        torch.manual_seed(0)
        network = Perceptron(widths[:1], widths[-1], widths[1:-1])
        made_up = 2 * torch.rand(16, widths[0], generator=torch.Generator().manual_seed(0)) - 1
    return Auto(network.parameters(), gain=gain(network, made_up), regression=regression)


@lru_cache(maxsize=1024)
def _sigma(epsilon: float, rate: float, steps: int, size: int) -> float:
    from ..accounting import noise_multiplier_for

    return noise_multiplier_for(epsilon, min(1e-5, size**-1.1), rate, steps, "pld")


def _scores(problem: Problem, outputs: Tensor) -> list[float]:
    """Points of each setting; what is not finite is as good as a constant."""
    return [
        _score(problem, one) if torch.isfinite(one).all() else _constant(problem) for one in outputs
    ]


def _score(problem: Problem, outputs: Tensor) -> float:
    from .. import metrics

    y = problem.test_y
    if problem.regression:
        error = (outputs[:, 0].clamp(-1, 1) - y).square().mean() / y.var(unbiased=False)
        return 100 * (1 - float(error))
    if problem.outputs == 1:
        return 100 * metrics.auc(outputs[:, 0], y)
    return 100 * metrics.accuracy(outputs, y.long())


def _constant(problem: Problem) -> float:
    """Points of a model that says the same of every record."""
    if problem.regression:
        return 0.0
    if problem.outputs == 1:
        return 50.0
    return 100 * float(torch.bincount(problem.test_y.long()).max()) / len(problem.test_y)


# -- from cells to the page


def summary(cells: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line per task and ε: the best, and each method's regret with its 95 % interval."""
    from scipy.stats import t

    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["task"], cell["epsilon"]), []).append(cell)
    lines = []
    for (task, epsilon), found in sorted(groups.items()):
        shared = set.intersection(*(set(cell["ladder"]) for cell in found))
        means = {k: statistics.fmean(cell["ladder"][k] for cell in found) for k in shared}
        best = max(means, key=lambda k: means[k])
        regrets = {}
        for name in (_LAW, *_BASELINES):
            values = [
                cell["ladder"][best]
                - (cell["ladder"]["0"] if name == _LAW else cell["others"][name])
                for cell in found
            ]
            wide = (
                t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
                if len(values) > 1
                else math.nan
            )
            regrets[name] = (statistics.fmean(values), wide)
        lines.append(
            {
                "task": task,
                "epsilon": epsilon,
                "seeds": len(found),
                "best": means[best],
                "best_factor": 2.0 ** int(best),
                "constant": statistics.fmean(cell["constant"] for cell in found),
                "regret": regrets,
            }
        )
    return lines


def write(folder: Path) -> str:
    """Writes regret.md, regret.json and regret.png; returns the summary."""
    from .files import write_json, write_text
    from .plots import draw_regret
    from .tables import grid

    cells = read(folder / "cells.jsonl")
    if not cells:
        return "no task has run yet"
    lines = summary(cells)
    chosen = {task.label for task in TASKS if task.chosen_by}
    halves = {
        "all": lines,
        "chosen by": [line for line in lines if line["task"] in chosen],
        "not chosen by": [line for line in lines if line["task"] not in chosen],
    }
    overall = [
        [half, name, *(f"{value:.2f}" for value in _spread(part, name)), str(len(part))]
        for half, part in halves.items()
        if part
        for name in (_LAW, *_BASELINES)
    ]
    head = ["tasks", "method", "median", "90th percentile", "worst", "cells"]
    detail = [
        [
            line["task"], f"{line['epsilon']:g}", str(line["seeds"]), f"{line['best']:.2f}",
            f"{line['best_factor']:g}", *(_shown(line["regret"][n]) for n in (_LAW, *_BASELINES)),
        ]
        for line in lines
    ]  # fmt: skip
    missing = [
        f"- {task.label}, ε {epsilon:g}: {task.seeds - count} of {task.seeds} seeds not run"
        for task in TASKS
        for epsilon in EPSILONS
        if (count := sum(_key(cell)[:2] == (task.label, epsilon) for cell in cells)) < task.seeds
    ]
    write_json(folder / "regret.json", {"title": TITLE, "lines": lines, "planned": planned()})
    draw_regret(halves["all"], (_LAW, *_BASELINES), folder / "regret.png")
    page = [
        f"# {TITLE}",
        "",
        f"Written by `zetaclip reproduce {NAME}`: {len(cells)} of {planned()} cells have run, each",
        "a task with an ε and a seed. Regret is in points of accuracy, AUC x 100 or R² x 100. The",
        "best rate is chosen on the test set.",
        "",
        "![regret](regret.png)",
        "",
        *grid(head, overall),
        "Regret by task, with a 95 % interval over seeds. Names without widths are linear models",
        "on records of length 1. 'factor' is the best rate over the law's.",
        "",
        *grid(["task", "ε", "seeds", "best", "factor", _LAW, *_BASELINES], detail),
        *(["## Not run", "", *missing, ""] if missing else []),
    ]
    write_text(folder / "regret.md", "\n".join(page).rstrip() + "\n")
    own = next(row for row in overall if row[:2] == ["all", _LAW])
    return (
        f"{folder / 'regret.md'}: {len(cells)} of {planned()} cells; regret of auto: median"
        f" {own[2]}, 90th percentile {own[3]}, worst {own[4]} points"
    )


def _spread(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float, float]:
    values = sorted(line["regret"][name][0] for line in lines)
    ninth = values[min(len(values) - 1, math.ceil(0.9 * len(values)) - 1)]
    return statistics.median(values), ninth, values[-1]


def _shown(regret: tuple[float, float]) -> str:
    value, wide = regret
    return f"{value:.2f}" if math.isnan(wide) else f"{value:.2f} ± {wide:.2f}"
