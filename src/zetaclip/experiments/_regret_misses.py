"""Which tasks of `no-tuning` miss the goal, and what the cells tell about why."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ._regret_page import LAW, groups, halves, interval, own_score, rate_factor, spread, summary
from ._tasks import NOISY, TASKS, TWINS
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
        network = _network(task)
        others = {
            other: change
            for (other, budget), same in found.items()
            if budget == epsilon and other != task and _network(other) == network
            if network and (change := _change(same, factor)) is not None
        }
        said.append(
            f"- **{task}, ε {epsilon:g}**: {_with_interval(mean, wide, line['seeds'])}."
            f" {factor:.2g} times the law's rate is best here.{_reason(task, epsilon, twins)}"
            f" {_elsewhere(others)}"
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


def _reason(task: str, epsilon: float, lines: Mapping[tuple[str, float], Any]) -> str:
    """What is special about the task, and the regret of the same table without that."""
    if task not in TWINS:
        return ""
    why, instead, twin = TWINS[task]
    line = lines.get((twin.label, epsilon))
    if line is None:
        return f" {why}; its twin with {instead} has not run."
    mean, wide = line["regret"][LAW]
    shown = f"{mean:.2f}" if math.isnan(wide) else f"{mean:.2f} ± {wide:.2f}"
    return (
        f" {why}: with {instead} and all else the same, regret is {shown}, and"
        f" {line['best_factor']:.2g} times the law's rate is best."
    )


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
    """Every fall from one ε to the next: beyond the seeds' spread or not; the step's part in it."""
    by_line = {(line["task"], line["epsilon"]): line for line in lines}
    found = {key: same for key, same in groups(cells).items() if key[1] not in NOISY}
    rows = []
    for task in dict.fromkeys(task for task, _ in found):
        budgets = sorted(budget for name, budget in found if name == task)
        for low, high in itertools.pairwise(budgets):
            below = {c["seed"]: own_score(c) for c in found[task, low]}
            pairs = [own_score(c) - below[c["seed"]] for c in found[task, high]
                     if c["seed"] in below]  # fmt: skip
            if not pairs or (mean := statistics.fmean(pairs)) >= 0:
                continue
            _, wide = interval(pairs)
            best = by_line[task, high]["best"] - by_line[task, low]["best"]
            rows.append([task, f"{low:g} to {high:g}", _points(mean, wide), str(len(pairs)),
                         _verdict(-mean, wide, 0.0), f"{best:+.2f}"])  # fmt: skip
    if not rows:
        return ["No mean falls from one ε to the next.", ""]
    proved = [row for row in rows if row[4] == _BEYOND]
    return [
        f"{len(rows)} steps of {len({row[0] for row in rows})} tasks fall in the mean. A fall is a",
        "miss only if its 95 % interval over seeds, each paired with itself, excludes zero:",
        f"{len(proved)} do. 'At the best rates' is the same step if each ε has the rate that is",
        "best on its test set: where that rises, the law's rate is the reason for the fall; where",
        "it falls as well, no rate of the ladder would have avoided it.",
        "",
        *grid(["task", "ε", "fall", "seeds", "verdict", "at the best rates"], rows),
    ]


def moved_by_clip(cells: _Cells) -> list[str]:
    """Every C that moves a mean by more than the goal: beyond the seeds' spread, and the rate's."""
    rows, count = [], 0
    for (task, epsilon), some in groups(cells).items():
        found = [cell for cell in some if cell.get("clips")]
        for clip in sorted({name for cell in found for name in cell["clips"]}, key=float):
            shifts = [c["clips"][clip] - own_score(c) for c in found if clip in c["clips"]]
            mean, wide = interval(shifts)
            count += 1
            if abs(mean) <= _MOVED:
                continue
            twice, half = (_change(found, factor) for factor in (2.0, 0.5))
            rates = ", ".join("" if v is None else f"{v:+.2f}" for v in (half, twice))
            rows.append([task, f"{epsilon:g}", clip, _points(mean, wide), str(len(shifts)),
                         _verdict(abs(mean), wide, _MOVED), rates])  # fmt: skip
    if not rows:
        return [f"No C moves a mean by more than {_MOVED} points.", ""]
    proved = sum(row[5] == _BEYOND for row in rows)
    return [
        f"{len(rows)} of {count} means move by more than {_MOVED} points; {proved} of them do so",
        f"beyond the seeds' spread: the 95 % interval excludes all shifts of up to {_MOVED}.",
        "A smaller C lets small gradients count as much as large ones. The last column has what",
        "half and twice the rate do to the same cells, as a scale for it.",
        "",
        *grid(["task", "ε", "C", "moves by", "seeds", "verdict", "rate x 1/2, x 2"], rows),
    ]


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
