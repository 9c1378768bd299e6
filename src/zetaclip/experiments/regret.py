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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ..features import shared
from ..methods._auto import CLIP_OF_GAIN, CLIP_OF_GAIN_REGRESSION, Auto, law, limits
from ..training.lengths import length, signal_to_noise
from ._exact import Problem, Setting, start_of, train
from ._tasks import NOISY, TASKS, TWINS, Task, problem_of

NAME = "no-tuning"
TITLE = "Nothing to tune: regret of default settings against the best rate by the test set"
_LADDER, _SHORT_LADDER = range(-2, 3), range(-1, 2)  # exponents of 2
_FARTHEST = 9
_BASELINES = {
    "DP-SGD, C = 1, rate 1": Setting(1.0, 1.0, 0.0, late=False),
    "AUTO-S, rate 1": Setting(1.0, None, 0.0, late=False),
    "DP-Adam, C = 1, rate 0.001": Setting(0.001, 1.0, 0.9, late=False, adam=True),
    "SlaClip, rate 1": Setting(1.0, 1.0, 0.0, late=False, control="slaclip"),
    "spectral C, rate 1": Setting(1.0, 1.0, 0.0, late=False, control="spectral"),
}
# Spectral C with all else as "auto" has it. A spectral probe needs a layer of some width.
_SPECTRAL = "spectral C, else auto"
_NETWORKS_ONLY = ("spectral C, rate 1", _SPECTRAL)
_BESIDES = ("tried", "clips", "others")  # the parts of a cell beside its ladder
# How many seeds have the other methods, and C as a user gives it; what was tried has one.
_SEEDS_OF_OTHERS, _SEEDS_OF_CLIPS = 3, 5
# What was tried in place of the law as it is, on the tasks that it was chosen by.
_TRIED: dict[str, Callable[[Setting], Setting]] = {
    "no momentum": lambda s: replace(s, momentum=0.0),
    # The next two have rates at which noise moves an output as far as it does under the law.
    "linear decay": lambda s: replace(s, rate=s.rate * math.sqrt(8 / 5), late=False),
    "late average": lambda s: replace(s, rate=s.rate * math.sqrt(8 / 15), average=4.0),
    "distance": lambda s: replace(s, pace="distance"),
    "energy": lambda s: replace(s, pace="energy"),
    "outliers": lambda s: replace(s, pace="outliers"),
}
# C as a user gives it, on a few tasks; the law's is taken where it is smaller.
_CLIPS = (0.02, 0.1, 0.5, 2.0, 8.0)
_CLIP_TASKS = (
    "heart", "tiny", "ved", "digits", "twenty", "heart, bins", "ved, bins", "heart, 64", "ved, 64",
    "digits, 64", "rare, 64", "balanced, 64",
)  # fmt: skip


# Where a smaller C costs points: the same with a larger rate, which may make up for it.
_LARGER = {"digits": (1.4, 2.0), "digits, 64": (1.4, 2.0)}


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
    done = {_key(cell): cell for cell in read(file)}
    outdated = {_key(cell)[::2] for cell in done.values() if _outdated(cell)}
    tasks = _with_twins()
    # What an earlier law has left, then a first seed of every task, a second one, ...; what takes
    # minutes comes last.
    order = sorted(
        ((task.large, (task.label, seed) not in outdated, seed, place)
         for place, task in enumerate(tasks) for seed in range(1, task.seeds + 1))
    )  # fmt: skip
    with shared(folder / "features"):
        for number, (_, _, seed, place) in enumerate(order, 1):
            task = tasks[place]
            named = task.name in wanted.get("data", [task.name])
            if not (named and str(seed) in wanted.get("seed", [str(seed)])):
                continue
            left = [e for e in task.epsilons if _lacks(task, e, seed, done)]
            if not left:
                continue
            problem = None if task.features == "cnn" else problem_of(task, seed)
            for epsilon in left:
                before = done.get((task.label, epsilon, seed))
                same = (c for c in done.values() if _key(c)[:2] == (task.label, epsilon))
                centre = next((c["rate"] for c in same if "rate" in c), None)
                cell = (
                    _engine(task, epsilon, seed)
                    if problem is None
                    else measure(task, problem, epsilon, seed, before, centre)
                )
                with file.open("a") as lines:
                    lines.write(json.dumps(cell) + "\n")
            say(f"{number} of {len(order)}: {task.label}, seed {seed}")
    return write(folder)


def read(file: Path) -> list[dict[str, Any]]:
    """The finished cells; later lines of a cell add to the first.

    A line in which the law has run again takes the place of all that was made from the law before.
    """
    found: dict[tuple[str, float, int], dict[str, Any]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        cell = json.loads(line)
        before = found.setdefault(_key(cell), cell)
        if before is not cell and "own_rate" in cell:
            before |= {"tried": {}, "clips": {}}
            before["others"].pop(_SPECTRAL, None)
        for part in _BESIDES:
            before[part] |= cell[part]
        before |= {name: cell[name] for name in ("own", "own_rate") if name in cell}
    return list(found.values())


def planned() -> int:
    """How many cells there are in all."""
    return sum(task.seeds * len(task.epsilons) for task in TASKS)


def finished(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the tasks by the present law; twins and earlier laws are left out."""
    labels = {task.label for task in TASKS}
    return [cell for cell in cells if cell["task"] in labels and not _outdated(cell)]


def _with_twins() -> list[Task]:
    """All tasks, and the twins of those that have one."""
    labels = {task.label for task in TASKS}
    return [*TASKS, *(twin for label, (_, _, twin) in TWINS.items() if label in labels)]


def _besides(task: Task, epsilon: float, seed: int) -> dict[str, tuple[str, ...]]:
    """What a cell has beside its ladder: names, by part."""
    if task.large or epsilon in NOISY:
        return dict.fromkeys(_BESIDES, ())
    others = (_SPECTRAL, *_BASELINES) if task in TASKS else ()
    return {
        "tried": tuple(_TRIED) if task.chosen_by and seed == 1 else (),
        "clips": (
            *(f"{clip:g}" for clip in _CLIPS),
            *(f"{c:g} x {times:g}" for c in _CLIPS[:2] for times in _LARGER.get(task.label, ())),
        )
        if task.label in _CLIP_TASKS and seed <= _SEEDS_OF_CLIPS
        else (),
        "others": tuple(name for name in others if task.hidden or name not in _NETWORKS_ONLY)
        if seed <= _SEEDS_OF_OTHERS
        else (),
    }


def _lacks(
    task: Task, epsilon: float, seed: int, done: Mapping[tuple[str, float, int], Mapping[str, Any]]
) -> bool:
    """Whether a cell has not run, or lacks something; C above the law's is not run."""
    cell = done.get((task.label, epsilon, seed))
    if cell is None or _law_changed(task, cell):
        return True
    return any(
        name not in cell[part] and not (part == "clips" and _given(name)[0] >= cell["clip"])
        for part, names in _besides(task, epsilon, seed).items()
        for name in names
    )


def _given(name: str) -> tuple[float, float]:
    """The C that a name stands for, and how many times the rate."""
    clip, _, times = name.partition(" x ")
    return float(clip), float(times or 1)


def _key(cell: Mapping[str, Any]) -> tuple[str, float, int]:
    return cell["task"], cell["epsilon"], cell["seed"]


def measure(
    task: Task,
    problem: Problem,
    epsilon: float,
    seed: int,
    before: Mapping[str, Any] | None = None,
    centre: float | None = None,
) -> dict[str, Any]:
    """One cell: the law, its ladder, what was tried in its place, and the other methods.

    Args:
        task: The task.
        problem: Its records.
        epsilon: The target ε.
        seed: Of the start, the batches and the noise.
        before: What the cell has already; only the rest is run.
        centre: The middle of the ladder, which is the same for all seeds; the law's rate if None.
    """
    size, linear = len(problem.y), not task.hidden
    widths = (problem.x.shape[1], *task.hidden, problem.outputs)
    start = start_of(widths, seed)
    update = _update(widths, problem)
    batch, epochs = length(size, epsilon, linear, inputs=widths[0])
    assert epochs is not None
    steps = round(epochs * -(-size // batch))
    sigma = _sigma(epsilon, min(1.0, batch / size), steps, size)
    rate = _rate(task, problem.regression, update.gain, sigma, batch, steps, size, widths[0])

    def scores(settings: Sequence[Setting]) -> list[float]:
        if not settings:
            return []
        outputs = train(
            problem, start, settings, sigma=sigma, batch=batch, steps=steps, seed=1000 + seed
        )
        return _scores(problem, outputs)

    own = Setting(rate, update.clip_norm)
    centre = before["rate"] if before else centre or rate
    changed = before is not None and _law_changed(task, before)
    known: dict[str, dict[str, float]] = {
        part: dict(before[part]) if before else {} for part in _BESIDES
    }
    if changed:  # what was made from the law is run again, its ladder and other methods are not
        known = {part: {} for part in _BESIDES} | {"others": known["others"]}
        known["others"].pop(_SPECTRAL, None)
    left = {
        part: [name for name in names if name not in known[part]]
        for part, names in _besides(task, epsilon, seed).items()
    }
    settings = {("tried", name): _TRIED[name](own) for name in left["tried"]}
    for name in left["clips"]:
        clip, times = _given(name)
        if clip < update.clip_norm:
            settings["clips", name] = replace(own, clip=clip, rate=rate * times)
    if _SPECTRAL in left["others"]:
        settings["others", _SPECTRAL] = replace(own, clip=1.0, control="spectral")
    noisy = epsilon in NOISY
    exponents = [0] if noisy else list(_SHORT_LADDER if task.large else _LADDER)
    if before:
        exponents = []
    if changed or not (before or math.isclose(centre, rate, rel_tol=1e-6)):
        settings["own", ""] = own
    found = scores([replace(own, rate=centre * 2.0**k) for k in exponents] + [*settings.values()])
    ladder = dict(zip(exponents, found, strict=False))
    besides: dict[str, dict[str, float]] = {part: {} for part in (*_BESIDES, "own")}
    for (part, name), score in zip(settings, found[len(exponents) :], strict=True):
        besides[part][name] = score
    again = besides.pop("own")
    while not noisy and ladder and (exponents := _beyond(ladder)):
        ladder |= zip(
            exponents, scores([replace(own, rate=centre * 2.0**k) for k in exponents]), strict=True
        )
    names = [name for name in left["others"] if name in _BASELINES]
    besides["others"] |= _others(problem, start, epsilon, seed, names)
    return {
        "task": task.label,
        "epsilon": epsilon,
        "seed": seed,
        "records": size,
        "batch": batch,
        "steps": steps,
        "sigma": sigma,
        "signal": signal_to_noise(sigma, batch, steps, widths[0]),
        "rate": centre,
        "clip": update.clip_norm,
        "constant": _constant(problem),
        "ladder": {str(k): ladder[k] for k in sorted(ladder)},
        **besides,
        **({"own": again[""], "own_rate": rate} if again else {}),
    }


def _rate(
    task: Task,
    regression: bool,
    gain: float,
    sigma: float,
    batch: int,
    steps: int,
    size: int,
    inputs: int,
) -> float:
    """The first rate that `zetaclip train` takes for such a task."""
    from ..training import Config
    from ..training.fixed import rate_of_auto

    own = limits(1 + len(task.hidden), regression, steps, inputs)
    factor = rate_of_auto(Config(features=task.features or "none"), size)
    return law(sigma / batch, steps, gain, *own) * factor


def _law_changed(task: Task, cell: Mapping[str, Any]) -> bool:
    """Whether the law had another rate when a cell was run; its ladder is as good as before."""
    if "sigma" not in cell:
        return False
    regression = cell["constant"] == 0.0
    gain = cell["clip"] / (CLIP_OF_GAIN_REGRESSION if regression else CLIP_OF_GAIN)
    run = (cell["sigma"], cell["batch"], cell["steps"])
    inputs = round((signal_to_noise(*run, 1) / cell["signal"]) ** 2)
    now = _rate(task, regression, gain, *run, cell["records"], inputs)
    return not math.isclose(now, cell.get("own_rate", cell["rate"]), rel_tol=1e-6)


def _outdated(cell: Mapping[str, Any]) -> bool:
    """Whether a cell is one of an earlier law, which has not run again."""
    return any(task.label == cell["task"] and _law_changed(task, cell) for task in _with_twins())


def _engine(task: Task, epsilon: float, seed: int) -> dict[str, Any]:
    """One cell of a network that `zetaclip train` trains, at a short ladder of its ``--lr``."""
    from ..training import Config
    from ..training import train as train_run

    ladder: dict[int, float] = {}
    exponents = list(_SHORT_LADDER)
    while exponents:
        for k in exponents:
            given = {"data": task.name, "model": "cnn", "epsilon": epsilon, "seed": seed}
            with TemporaryDirectory() as folder:
                config = Config.from_mapping({**given, "lr": 2.0**k, "threads": 1})
                result = train_run(config, Path(folder) / "run")
            ladder[k] = 100 * result["metric"]["value"]
        exponents = _beyond(ladder)
    return {
        "task": task.label,
        "epsilon": epsilon,
        "seed": seed,
        "records": result["num_examples"],
        "constant": 0.0,
        "ladder": {str(k): ladder[k] for k in sorted(ladder)},
        "tried": {},
        "clips": {},
        "others": {},
    }


def _beyond(ladder: Mapping[int, float]) -> list[int]:
    """The next exponent if the best one is at an end."""
    best, low, high = max(ladder, key=lambda k: ladder[k]), min(ladder), max(ladder)
    beyond = [low - 1] if best == low else [high + 1] if best == high else []
    return [k for k in beyond if abs(k) <= _FARTHEST]


def _others(
    problem: Problem, start: list[Tensor], epsilon: float, seed: int, names: Sequence[str]
) -> dict[str, float]:
    """Other methods at the defaults that they had before: 20 epochs of small batches."""
    if not names:
        return {}
    size = len(problem.y)
    batch = min(size, 256, max(16, size // 40))
    steps = 20 * -(-size // batch)
    sigma = _sigma(epsilon, batch / size, steps, size)
    outputs = train(
        problem, start, [_BASELINES[name] for name in names],
        sigma=sigma, batch=batch, steps=steps, seed=2000 + seed,
    )  # fmt: skip
    return dict(zip(names, _scores(problem, outputs), strict=True))


def _update(widths: tuple[int, ...], problem: Problem) -> Auto:
    """The optimizer that `zetaclip train` would build, for its constants."""
    from ..methods._auto import gain
    from ..models import Linear, Perceptron
    from ..randomness._forward import alone

    if len(widths) == 2:
        head = Linear(widths[:1], widths[-1], bias=problem.bias)
        return Auto(head.parameters(), regression=problem.regression)
    with alone():
        torch.manual_seed(0)
        network = Perceptron(widths[:1], widths[-1], widths[1:-1])
        made_up = 2 * torch.rand(16, widths[0], generator=torch.Generator().manual_seed(0)) - 1
    found = gain(network, made_up)
    return Auto(network.parameters(), gain=found, regression=problem.regression)


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


def write(folder: Path) -> str:
    """Writes regret.md, regret.json and regret.png; returns the summary."""
    from . import _regret_misses as misses
    from . import _regret_page as page
    from .files import write_json, write_text
    from .plots import draw_regret
    from .tables import grid

    found = read(folder / "cells.jsonl")
    current = [cell for cell in found if not _outdated(cell)]
    cells = finished(current)
    lines = page.summary(cells)
    if not lines:
        return "no task has run yet"
    waiting = len(found) - len(current)
    # On networks the previous default is spectral C at rate 1.
    usual = [name for name in _BASELINES if name not in _NETWORKS_ONLY]
    names = (page.LAW, page.PREVIOUS, *usual, _SPECTRAL)
    rows = page.overall(lines, names)
    table, tasks, falls = page.rises(cells)
    head = ["tasks", "method", "median", "90th percentile", "worst", "cells"]
    write_json(folder / "regret.json", {"title": TITLE, "lines": lines, "planned": planned()})
    draw_regret(lines, names, folder / "regret.png")
    text = [
        f"# {TITLE}",
        "",
        f"Written by `zetaclip reproduce {NAME}`: {len(cells)} of {planned()} cells have run, each",
        "a task with an ε and a seed. Regret is in points of accuracy, AUC x 100 or R² x 100. The",
        "best rate is chosen on the test set.",
        *([f"{waiting} cells of an earlier law are left out: it runs again."] if waiting else ()),
        "",
        "![regret](regret.png)",
        "",
        *grid(head, rows),
        *page.resampled(lines),
        *page.crossed(cells),
        *misses.goals(lines),
        *misses.large(current, lines),
        *page.tried(lines, tuple(_TRIED)),
        *table,
        *misses.falls(current, lines),
        *page.clips(cells),
        *misses.moved_by_clip(current),
        *page.warned(cells),
        "## Regret by task",
        "",
        "With a 95 % interval over seeds. Names without widths are linear models on records of",
        "length 1. 'factor' is the best rate over the law's.",
        "",
        *page.detail(lines, names),
        *page.missing(cells),
    ]
    write_text(folder / "regret.md", "\n".join(text).rstrip() + "\n")
    own = rows[0]
    return (
        f"{folder / 'regret.md'}: {len(cells)} of {planned()} cells; regret of auto: median"
        f" {own[2]}, 90th percentile {own[3]}, worst {own[4]} points; {falls} of {tasks} tasks fall"
        " somewhere with ε"
    )
