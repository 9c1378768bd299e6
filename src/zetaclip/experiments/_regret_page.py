"""From the cells of `no-tuning` to its page: regret, and what else the cells tell."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ._tasks import NOISY, TASKS
from .tables import grid

LAW = "auto"
# Spectral C in networks; in linear models, whose layer is too narrow to be read, its C stayed at 1.
PREVIOUS = "previous default"
_PREVIOUS = ("spectral C, rate 1", "DP-SGD, C = 1, rate 1")
_Cells = Sequence[Mapping[str, Any]]


def groups(cells: Iterable[Mapping[str, Any]]) -> dict[tuple[str, float], list[Mapping[str, Any]]]:
    """Cells by task and ε, the seeds of each in order."""
    found: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for cell in sorted(cells, key=lambda cell: (cell["task"], cell["epsilon"], cell["seed"])):
        found.setdefault((cell["task"], cell["epsilon"]), []).append(cell)
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval; nan for a single value."""
    from scipy.stats import t

    count = len(values)
    if count < 2:
        return statistics.fmean(values), math.nan
    wide = t.ppf(0.975, count - 1) * statistics.stdev(values) / math.sqrt(count)
    return statistics.fmean(values), float(wide)


def summary(cells: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line per task and ε: the best, and each method's regret with its 95 % interval."""
    lines = []
    for (task, epsilon), found in groups(cells).items():
        if epsilon in NOISY:
            continue
        shared = set.intersection(*(set(cell["ladder"]) for cell in found))
        means = {k: statistics.fmean(cell["ladder"][k] for cell in found) for k in shared}
        own = statistics.fmean(own_score(cell) for cell in found)
        best = max(means, key=lambda k: means[k])
        if own > means[best]:  # the law's rate may lie between two rungs, and is one more of them
            best, means = "own", {"own": own}
        regrets = {}
        for name in (LAW, PREVIOUS, *dict.fromkeys(n for c in found for n in _named(c))):
            pairs = [(_at(cell, best), score(cell, name)) for cell in found]
            ran = [high - own for high, own in pairs if own is not None]
            if ran:
                regrets[name] = interval(ran)
        lines.append(
            {
                "task": task,
                "epsilon": epsilon,
                "seeds": len(found),
                "best": means[best],
                "best_factor": 1.0 if best == "own" else 2.0 ** int(best) / rate_factor(found[0]),
                "law": own,
                "constant": statistics.fmean(cell["constant"] for cell in found),
                "regret": regrets,
            }
        )
    return lines


def _named(cell: Mapping[str, Any]) -> dict[str, float]:
    return {**cell["tried"], **cell["others"]}


def score(cell: Mapping[str, Any], name: str) -> float | None:
    """Points of a method in a cell; None if it has not run there."""
    if name == PREVIOUS:
        return next((_named(cell)[own] for own in _PREVIOUS if own in _named(cell)), None)
    return own_score(cell) if name == LAW else _named(cell).get(name)


def own_score(cell: Mapping[str, Any]) -> float:
    """Points of the law; the middle of the ladder, unless the law has changed since it was run."""
    return float(cell.get("own", cell["ladder"]["0"]))


def _at(cell: Mapping[str, Any], rung: str) -> float:
    """Points at a rung of the ladder, or at the law's own rate."""
    return own_score(cell) if rung == "own" else float(cell["ladder"][rung])


def rate_factor(cell: Mapping[str, Any]) -> float:
    """The law's rate over the middle of the ladder."""
    return float(cell["own_rate"] / cell["rate"]) if "own_rate" in cell else 1.0


def spread(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float, float]:
    """Median, 90th percentile and worst regret of a method."""
    values = sorted(line["regret"][name][0] for line in lines)
    ninth = values[min(len(values) - 1, math.ceil(0.9 * len(values)) - 1)]
    return statistics.median(values), ninth, values[-1]


def halves(lines: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """All lines, and those of either half of the tasks."""
    chosen = {task.label for task in TASKS if task.chosen_by}
    return {
        "all": list(lines),
        "chosen by": [line for line in lines if line["task"] in chosen],
        "untouched": [line for line in lines if line["task"] not in chosen],
    }


def overall(lines: Sequence[dict[str, Any]], names: Sequence[str]) -> list[list[str]]:
    """Rows of the first table: each method on all tasks and on each half, where it ran."""
    rows = []
    for half, part in halves(lines).items():
        for name in names:
            ran = [line for line in part if name in line["regret"]]
            if ran:
                rows.append([half, name, *(f"{v:.2f}" for v in spread(ran, name)), str(len(ran))])
    return rows


def resampled(lines: Sequence[dict[str, Any]], draws: int = 2000) -> list[str]:
    """95 % intervals of the law's median and 90th percentile, by drawing tasks with replacement."""
    said = []
    for half, part in halves(lines).items():
        by_task: dict[str, list[dict[str, Any]]] = {}
        for line in part:
            by_task.setdefault(line["task"], []).append(line)
        if len(by_task) < 2:
            continue
        source = random.Random(0)
        found = []
        for _ in range(draws):
            names = source.choices(sorted(by_task), k=len(by_task))
            found.append(spread([line for name in names for line in by_task[name]], LAW))
        ends = [
            (values[draws // 40], values[-draws // 40 - 1])
            for values in (sorted(row[place] for row in found) for place in (0, 1))
        ]
        median, ninth = (f"{low:.2f} to {high:.2f}" for low, high in ends)
        seeds = sorted(line["seeds"] for line in part)
        said.append(
            f"- {half}: median {median}, 90th percentile {ninth}; {len(by_task)} tasks, seeds"
            f" {seeds[0]} to {seeds[-1]}, half of the lines at least"
            f" {seeds[len(seeds) // 2]}"
        )
    return ["95 % intervals for auto, by drawing tasks with replacement:", "", *said, ""]


def crossed(cells: _Cells, least: int = 5) -> list[str]:
    """Regret if the best rate of each seed is chosen by the other seeds: without the best's luck.

    Args:
        cells: The finished cells.
        least: Tasks and ε with fewer seeds are left out.
    """
    plain, fair = [], []
    for line in summary(found := list(cells)):
        if line["seeds"] >= least:
            same = groups(found)[line["task"], line["epsilon"]]
            plain.append(line)
            fair.append({**line, "regret": {LAW: (_without_luck(same), math.nan)}})
    said = []
    for half, part in halves(plain).items():
        if part:
            names = {line["task"] for line in part}
            one = [line for line in fair if line["task"] in names]
            usual, without = (
                ", ".join(f"{v:.2f}" for v in spread(rows, LAW)) for rows in (part, one)
            )
            said.append(f"- {half}, {len(part)} lines: {without} instead of {usual}")
    if not said:
        return []
    return [
        "The best of a ladder is partly luck. If each seed's best rate is the one that is best in",
        f"the mean of the other seeds, where there are at least {least}, median, 90th percentile",
        "and worst are:",
        "",
        *said,
        "",
    ]


def _without_luck(cells: _Cells) -> float:
    shared = sorted(set.intersection(*(set(cell["ladder"]) for cell in cells)))
    totals = {k: sum(cell["ladder"][k] for cell in cells) for k in shared}
    gains = []
    for cell in cells:
        ladder = cell["ladder"]
        best = max(shared, key=lambda k: totals[k] - ladder[k])
        gains.append(ladder[best] - own_score(cell))
    return statistics.fmean(gains)


def tried(lines: Sequence[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """The table of what was tried: beside the law on the same lines."""
    ran = [line for line in lines if names and all(name in line["regret"] for name in names)]
    if not ran:
        return []
    rows = []
    for name in (LAW, *names):
        gains = [line["regret"][LAW][0] - line["regret"][name][0] for line in ran]
        rows.append(
            [
                name,
                *(f"{v:.2f}" for v in spread(ran, name)),
                f"{statistics.fmean(gains):+.2f}",
                f"{sum(g > 0.3 for g in gains)}, {sum(g < -0.3 for g in gains)}",
                str(len(ran)),
            ]
        )
    head = ["rule", "median", "90th percentile", "worst", "mean gain", "better, worse", "cells"]
    return [
        "## What was tried in place of the law",
        "",
        "Regret on the tasks that the law was chosen by, against the same best rate. 'Mean gain'",
        "is in points over the law; the next column counts cells that are better or worse by more",
        "than 0.3.",
        "",
        *grid(head, rows),
    ]


def steps(cells: _Cells) -> list[dict[str, Any]]:
    """Each step from one ε to the next: the law's change over seeds that both have."""
    by_task: dict[str, dict[float, dict[int, float]]] = {}
    for (task, epsilon), found in groups(cells).items():
        if epsilon not in NOISY:
            by_task.setdefault(task, {})[epsilon] = {c["seed"]: own_score(c) for c in found}
    ups = []
    for task, by_budget in by_task.items():
        for low, high in itertools.pairwise(sorted(by_budget)):
            below, above = by_budget[low], by_budget[high]
            changes = [above[seed] - below[seed] for seed in above if seed in below]
            if changes:
                ups.append({"task": task, "low": low, "high": high, "seeds": len(changes),
                            "change": interval(changes)})  # fmt: skip
    return ups


def rises(cells: _Cells) -> tuple[list[str], int, int]:
    """The table of accuracy over ε; how many tasks there are, and how many fall somewhere.

    A task falls where the mean difference between two neighbouring ε over seeds, with its 95 %
    interval, is below zero.
    """
    means: dict[str, list[str]] = {}
    for (task, epsilon), found in groups(cells).items():
        if epsilon not in NOISY:
            mean = statistics.fmean(own_score(c) for c in found)
            means.setdefault(task, []).append(f"{epsilon:g}: {mean:.2f}")
    signs: dict[str, list[str]] = {task: [] for task in means}
    for up in steps(cells):
        mean, wide = up["change"]
        signs[up["task"]].append(
            "?" if math.isnan(wide) else "+" if mean > wide else "-" if mean < -wide else "="
        )
    falls = sum("-" in found for found in signs.values())
    rows = [[task, ", ".join(means[task]), " ".join(signs[task])] for task in means]
    table = [
        "## Does accuracy rise with ε?",
        "",
        "Points of auto at each ε, and whether each step up is a rise (+), a fall (-) or within",
        "the 95 % interval over seeds (=); ? where there is one seed.",
        "",
        *grid(["task", "points by ε", "steps"], rows),
    ]
    return table, len(rows), falls


def clips(cells: _Cells) -> list[str]:
    """The table of C as it is given, where it is smaller than the law's."""
    rows = []
    for (task, epsilon), some in groups(cells).items():
        found = [cell for cell in some if cell.get("clips")]
        if not found:
            continue
        shown = []
        for clip in ("0.02", "0.1", "0.5"):
            if all(clip in cell["clips"] for cell in found):
                mean, wide = interval([cell["clips"][clip] - own_score(cell) for cell in found])
                shown.append(_shown(mean, wide, signed=True))
            else:
                shown.append("0 (the law's is smaller)")
        rows.append([task, f"{epsilon:g}", f"{found[0]['clip']:.3g}", *shown])
    if not rows:
        return []
    return [
        "## Does C matter?",
        "",
        "Points over the law's own C if C is given (`--clip`). A C above the law's is never taken,",
        "so it changes nothing: here that is every one of 2 and 8.",
        "",
        *grid(["task", "ε", "C of the law", "C = 0.02", "C = 0.1", "C = 0.5"], rows),
    ]


def warned(cells: _Cells) -> list[str]:
    """The table behind the warning: what is kept of the signal at ε = 8, by signal to noise."""
    found = groups(cells)
    pairs = []
    for (task, epsilon), some in found.items():
        top = found.get((task, 8.0))
        if top and "signal" in some[0] and epsilon < 8:
            constant = statistics.fmean(c["constant"] for c in some)
            full = statistics.fmean(own_score(c) for c in top) - constant
            here = statistics.fmean(own_score(c) for c in some) - constant
            if full > 0:
                pairs.append((statistics.fmean(c["signal"] for c in some), here / full))
    if not pairs:
        return []
    edges = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0, math.inf)
    rows = []
    for low, high in itertools.pairwise(edges):
        kept = sorted(k for s, k in pairs if low <= s < high)
        if kept:
            half = sum(k < 0.5 for k in kept)
            rows.append(
                [
                    f"{low:g} to {high:g}" if math.isfinite(high) else f"above {low:g}",
                    str(len(kept)),
                    f"{kept[0]:.2f}",
                    f"{statistics.median(kept):.2f}",
                    f"{half} ({100 * half / len(kept):.0f} %)",
                ]
            )
    return [
        "## When noise dominates",
        "",
        "What auto keeps, over a constant answer, of what it has at ε = 8 on the same task, by the",
        "signal to noise that is predicted before training.",
        "",
        *grid(["signal to noise", "cells", "least", "median", "kept less than half"], rows),
    ]


def detail(lines: Sequence[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """The table of all tasks and ε."""
    rows = [
        [
            line["task"],
            f"{line['epsilon']:g}",
            str(line["seeds"]),
            f"{line['best']:.2f}",
            f"{line['best_factor']:.3g}",
            *(_shown(*line["regret"][n]) if n in line["regret"] else "" for n in names),
        ]
        for line in lines
    ]
    return grid(["task", "ε", "seeds", "best", "factor", *names], rows)


def missing(cells: _Cells) -> list[str]:
    """What has not run, a line for each task."""
    counts = {key: len(found) for key, found in groups(cells).items()}
    rows = []
    for task in TASKS:
        left = {e: task.seeds - counts.get((task.label, e), 0) for e in task.epsilons}
        shown = [f"{count} at ε {e:g}" for e, count in left.items() if count > 0]
        if shown:
            rows.append(f"- {task.label}, of {task.seeds} seeds: {', '.join(shown)}")
    return ["## Not run", "", *rows, ""] if rows else []


def _shown(value: float, wide: float, signed: bool = False) -> str:
    mean = f"{value:+.2f}" if signed else f"{value:.2f}"
    return mean if math.isnan(wide) else f"{mean} ± {wide:.2f}"
