"""Which tasks of `no-tuning` miss the goal, and what the cells tell about why."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ._regret_page import (
    LAW,
    groups,
    halves,
    interval,
    own_score,
    rate_factor,
    spread,
    steps,
    summary,
)
from ._tasks import TASKS, TWINS
from .tables import grid

# Median, 90th percentile and worst; twice that on the half that nobody tuned on.
_GOALS = (0.2, 1.5, 4.0)
_LARGE = _GOALS[-1]
# How far C may move the points.
_MOVED = 0.3
_Cells = Sequence[Mapping[str, Any]]


def goals(lines: Sequence[dict[str, Any]]) -> list[str]:
    """The goal point by point: what was found, and whether it is met."""
    rows = []
    for half, part in halves(lines).items():
        if part:
            most = [goal * (2 if half == "untouched" else 1) for goal in _GOALS]
            found = zip(spread(part, LAW), most, strict=True)
            rows.append([half, *(_judged(value, goal) for value, goal in found)])
    return ["## The goal", "", *grid(["tasks", "median", "90th percentile", "worst"], rows)]


def _judged(value: float, goal: float) -> str:
    return f"{'met' if value <= goal else '**missed**'}: {value:.2f} (goal {goal:g})"


def large(cells: _Cells, lines: Sequence[dict[str, Any]]) -> list[str]:
    """Lines with a regret above the goal: why, which rate is best, and what it costs elsewhere.

    Args:
        cells: The finished cells, with those of twins.
        lines: The lines of the tasks.
    """
    found = groups(cells)
    twins = {(line["task"], line["epsilon"]): line for line in summary(cells)}
    said = []
    for line in lines:
        mean, wide = line["regret"][LAW]
        if mean <= _LARGE:
            continue
        task, epsilon, factor = line["task"], line["epsilon"], line["best_factor"]
        network, twin = _network(task), twins.get((_twin_of(task), epsilon))
        others = {
            other: change
            for (other, budget), same in found.items()
            if budget == epsilon and other != task and _network(other) == network
            if network and (change := _change(same, factor)) is not None
        }
        said.append(
            f"- **{task}, ε {epsilon:g}**: {_with_interval(mean, wide, line['seeds'])}."
            f" {factor:.2g} times the law's rate is best here."
            f"{_reason(task, _at_best(twin) if twin else None)} {_elsewhere(others)}"
        )
    told = said or [f"No task has a regret above {_LARGE:g} points."]
    return [
        f"## Regret above {_LARGE:g} points, and why",
        "",
        "The law sees the network, N and ε. What a rate that suits a task costs other tasks with",
        "the same network at the same ε is what keeps the law from taking it.",
        "",
        *told,
        "",
    ]


def _with_interval(mean: float, wide: float, seeds: int) -> str:
    if math.isnan(wide):
        return f"{mean:.2f} points, one seed"
    proved = "" if mean - wide > _LARGE else f", so that a regret below {_LARGE:g} is not excluded"
    return f"{mean:.2f} ± {wide:.2f} points over {seeds} seeds{proved}"


def _at_best(line: Mapping[str, Any]) -> str:
    mean, wide = line["regret"][LAW]
    shown = f"{mean:.2f}" if math.isnan(wide) else f"{mean:.2f} ± {wide:.2f}"
    return f"regret is {shown}, and {line['best_factor']:.2g} times the law's rate is best"


def _elsewhere(changes: Mapping[str, float]) -> str:
    if not changes:
        return "No other task has this network and ε."
    low, high = (pick(changes, key=lambda name: changes[name]) for pick in (min, max))
    lose, gain = (sum(s * v > _MOVED for v in changes.values()) for s in (-1, 1))
    return (
        f"On {len(changes)} other tasks with this network it costs more than {_MOVED} points on"
        f" {lose} and gains that on {gain}: {changes[low]:+.1f} ({low}) to {changes[high]:+.1f}"
        f" ({high})."
    )


def _change(cells: _Cells, factor: float) -> float | None:
    """Points at the rung next to so many times the law's rate, over the law's; None if not run."""
    rung = str(round(math.log2(factor * rate_factor(cells[0]))))
    if any(rung not in cell["ladder"] for cell in cells):
        return None
    return statistics.fmean(cell["ladder"][rung] - own_score(cell) for cell in cells)


def falls(cells: _Cells, lines: Sequence[dict[str, Any]]) -> list[str]:
    """Every fall from one ε to the next: beyond the seeds' spread or not, and why.

    Args:
        cells: The finished cells, with those of twins.
        lines: The lines of the tasks.
    """
    best = {(line["task"], line["epsilon"]): line["best"] for line in lines}
    ups = {(up["task"], up["low"]): up for up in steps(cells)}
    tasks = [up for up in ups.values() if (up["task"], up["high"]) in best]
    rows, said = [], []
    for up in tasks:
        mean, wide = up["change"]
        if mean >= 0:
            continue
        at_best = best[up["task"], up["high"]] - best[up["task"], up["low"]]
        span = f"{up['low']:g} to {up['high']:g}"
        verdict = _verdict(-mean, wide, 0.0)
        rows.append([up["task"], span, _points(mean, wide), str(up["seeds"]), verdict,
                     f"{at_best:+.2f}"])  # fmt: skip
        if verdict == _BEYOND:
            twin = ups.get((_twin_of(up["task"]), up["low"]))
            shown = f"the step is {_points(*twin['change'])}" if twin else None
            told = _reason(up["task"], shown)
            if not told and at_best > mean / 2:
                told = f" Most of it is the law's rate: at the best rates it is {at_best:+.2f}."
            told = told or " It is not the rate, and no other reason was measured."
            said.append(f"- **{up['task']}, ε {span}**:{told}")
    if not rows:
        return ["No mean falls from one ε to the next.", ""]
    tested = sum(up["seeds"] > 1 for up in tasks)
    return [
        f"{len(rows)} steps of {len({row[0] for row in rows})} tasks fall in the mean. A fall is a",
        "miss only if its 95 % interval over seeds, each paired with itself, excludes zero:",
        f"{len(said)} do, of {tested} steps with two seeds or more. If none of these rose or fell,",
        f"chance alone would make {0.025 * tested:.0f} such falls. 'At the best rates' is the same",
        "step if each ε has the rate that is best on its test set.",
        "",
        *grid(["task", "ε", "fall", "seeds", "verdict", "at the best rates"], rows),
        *said,
        "",
    ]


def moved_by_clip(cells: _Cells) -> list[str]:
    """Every C that moves a mean by more than the goal: beyond the seeds' spread or not, and why.

    Args:
        cells: The finished cells, with those of twins.
    """
    tasks = {task.label for task in TASKS}
    shifts = _shifts(cells)
    rows, said = [], []
    for (task, epsilon, clip), (mean, wide, seeds) in shifts.items():
        if abs(mean) <= _MOVED or task not in tasks or " x " in clip:
            continue
        verdict = _verdict(abs(mean), wide, _MOVED)
        rows.append([task, f"{epsilon:g}", clip, _points(mean, wide), str(seeds), verdict])
        if verdict == _BEYOND:
            twin = shifts.get((_twin_of(task), epsilon, clip))
            told = _reason(task, f"it moves by {_points(*twin[:2])}" if twin else None)
            told = told or _larger(shifts, task, epsilon, clip) or " No reason was measured."
            said.append(f"- **{task}, ε {epsilon:g}, C = {clip}**:{told}")
    count = sum(task in tasks and " x " not in clip for task, _, clip in shifts)
    if not rows:
        return [f"None of {count} means moves by more than {_MOVED} points.", ""]
    return [
        f"{len(rows)} of {count} means move by more than {_MOVED} points; {len(said)} do so",
        f"beyond the seeds' spread: the 95 % interval excludes all shifts of up to {_MOVED}.",
        "",
        *grid(["task", "ε", "C", "moves by", "seeds", "verdict"], rows),
        *said,
        "",
    ]


def _larger(
    shifts: Mapping[tuple[str, float, str], tuple[float, float, int]],
    task: str,
    epsilon: float,
    clip: str,
) -> str:
    """What the same C does with a larger rate; empty if that has not run."""
    found = {
        name.partition(" x ")[2]: _points(mean, wide)
        for (other, budget, name), (mean, wide, _) in shifts.items()
        if (other, budget) == (task, epsilon) and name.startswith(f"{clip} x ")
    }
    if not found:
        return ""
    listed = ", ".join(f"{shown} with {times} times the rate" for times, shown in found.items())
    return f" Against the law as it is, the same C moves it by {listed}."


def _shifts(cells: _Cells) -> dict[tuple[str, float, str], tuple[float, float, int]]:
    """What each C that was given does to the points, by task, ε and C: mean, interval, seeds."""
    found: dict[tuple[str, float, str], list[float]] = {}
    for (task, epsilon), same in groups(cells).items():
        for cell in same:
            for clip, points in cell["clips"].items():
                shift = points - own_score(cell)
                found.setdefault((task, epsilon, clip), []).append(shift)
    return {key: (*interval(values), len(values)) for key, values in found.items()}


def _twin_of(task: str) -> str:
    """The label of a task's twin; empty if it has none."""
    return TWINS[task][2].label if task in TWINS else ""


def _reason(task: str, shown: str | None) -> str:
    """What is special about a task, and what its twin, which is without that, shows.

    Args:
        task: The task's label; one without a twin has nothing to say.
        shown: What the twin shows; None if it has not run.
    """
    if task not in TWINS:
        return ""
    why, instead, _ = TWINS[task]
    if shown is None:
        return f" {why}; its twin with {instead} has not run."
    return f" {why}: with {instead} and all else the same, {shown}."


_BEYOND, _WITHIN, _UNKNOWN = "beyond it: a miss", "within the spread", "one seed can't tell"


def _verdict(size: float, wide: float, most: float) -> str:
    """Whether a change of this size is proved to be larger than ``most``."""
    if math.isnan(wide):
        return _UNKNOWN
    return _BEYOND if size - wide > most else _WITHIN


def _points(mean: float, wide: float) -> str:
    return f"{mean:+.2f}" if math.isnan(wide) else f"{mean:+.2f} ± {wide:.2f}"


def _network(label: str) -> tuple[tuple[int, ...], str] | None:
    """The network of a task; None of a twin."""
    return next(((task.hidden, task.features) for task in TASKS if task.label == label), None)
