"""From finished runs to a CSV and a table: means, spreads, paired differences from the baseline.

Every finished seed counts, at its last epoch: no best seed, no best epoch. A cell whose runs are
missing says so, and so does a cell with a seed that diverged. A mean over its other seeds would
flatter it, so nothing is said of it. What a difference proves is in ``evidence.py``.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import evidence
from .evidence import Rules
from .measures import MEASURES, Measure, Run, diverged
from .plan import Column, Plan
from .store import Store


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, its interval over all looks, and what it proves.

    Before the first look there is neither interval nor proof.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    p: dict[str, float]
    word: str


def summary(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean, sample standard deviation (None for a single value) and count."""
    if not values:
        return None
    std = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": std, "n": len(values)}


def compared(
    ours: Mapping[Any, float],
    theirs: Mapping[Any, float],
    rules: Rules,
    good: int = 1,
    published: float | None = None,
) -> Difference | None:
    """Ours minus theirs, seed by seed.

    Args:
        ours: Values by seed.
        theirs: The rival's values by seed.
        rules: How they are judged.
        good: -1 if lower is better.
        published: The gain that the paper reports, positive if it is one.

    Returns:
        The difference, or None without a common seed. Its mean and interval keep their sign; what
        it proves follows ``good``.
    """
    pairs = [ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs), key=int)]
    if not pairs:
        return None
    ends = evidence.interval(pairs, rules)
    p = evidence.p_values([good * pair for pair in pairs], rules, published)
    low, high = ends if ends is not None else (None, None)
    return Difference(statistics.fmean(pairs), low, high, len(pairs), p, evidence.word(p))


def digits_of(low: float, high: float, least: int) -> int:
    """Decimals that show an interval: two figures of its half width, and at least ``least``.

    Args:
        low: The lower end.
        high: The upper end.
        least: The least number of decimals.
    """
    half = (high - low) / 2
    return least if half <= 0 else max(least, min(6, 1 - math.floor(math.log10(half))))


def collect(plan: Plan, store: Store) -> dict[str, Run]:
    """The finished runs of a plan by key, without those that can't be trusted."""
    found = ((run.key, store.run(run)) for run in plan.runs)
    return {key: run for key, run in found if run is not None}


def difference_text(difference: Mapping[str, Any], digits: int) -> str:
    """A difference with its interval, for a page."""
    mean, low, high, n = (difference[name] for name in ("mean", "low", "high", "n"))
    if low is None:
        return f"{mean:+.{digits}f} ({n} seed{'s' if n > 1 else ''})"
    if low == high:
        return f"{mean:+.{digits}f}, the same in every seed"
    digits = digits_of(low, high, digits)
    return f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def cell_values(
    plan: Plan, runs: Mapping[str, Run], group: str, row: str, column: Column
) -> dict[int, float]:
    """One number per finished seed of a cell.

    Args:
        plan: The plan.
        runs: The finished runs, by key.
        group: The group.
        row: The row.
        column: The column.
    """
    measure = MEASURES[column.measure]
    values = _raw(plan, runs, group, row, column, measure)
    if not measure.relative:
        return values
    if row == plan.experiment.baseline:
        return {}
    base = _raw(plan, runs, group, plan.experiment.baseline, column, measure)
    return {
        seed: 100.0 * (value / base[seed] - 1.0) for seed, value in values.items() if base.get(seed)
    }


def table(
    plan: Plan,
    runs: Mapping[str, Run],
    command: str,
    planned: int,
    missing: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The content of ``table.json``.

    Args:
        plan: The plan.
        runs: The finished runs, by key.
        command: The command that makes the table.
        planned: How many runs it needs, as far as the looks have decided.
        missing: What has not been run, see ``missing.parts``.
    """
    experiment = plan.experiment
    lines = []
    for group in experiment.groups:
        for row in experiment.rows:
            cells = [
                _cell(plan, runs, group["label"], row["label"], column) for column in plan.columns
            ]
            if any(cell is not None for cell in cells):
                lines.append(
                    {
                        "label": row["label"],
                        "group": group["label"],
                        "method": row["method"],
                        "cells": cells,
                    }
                )
    finished = [run for key, run in runs.items() if key in plan.by_key]
    commits = sorted({str(run.result["commit"]) for run in finished if run.result.get("commit")})
    return {
        "title": experiment.title,
        "name": experiment.name,
        "command": command,
        "commit": ", ".join(commits) or None,
        "baseline": experiment.baseline,
        "subject": experiment.subject,
        "runs": {
            "finished": len(finished),
            "planned": planned,
            "recorded": sum(run.folder is None for run in finished),
            "unsigned": sum("files" not in run.result for run in finished),
        },
        "missing": list(missing),
        "columns": [column_title(column) for column in plan.columns],
        "column_details": [
            {
                "condition": column.condition,
                "measure": column.measure,
                "x": column.x,
                "good": MEASURES[column.measure].good,
            }
            for column in plan.columns
        ],
        "rows": lines,
        "notes": list(experiment.notes),
    }


def column_title(column: Column) -> str:
    """The heading of a column."""
    label = MEASURES[column.measure].label
    return f"{column.label}: {label}" if column.label else label


def csv_text(plan: Plan, runs: Mapping[str, Run], needed: Collection[str]) -> str:
    """One line per run and cell of the table, finished or needed."""
    lines = []
    for place, seeds in plan.cells.items():
        for seed, key in seeds.items():
            if key not in runs and key not in needed:
                continue
            labels = {**plan.places[place], "seed": seed}
            lines.append(_line(labels, plan.by_key[key].config, key, runs.get(key)))
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _cell(
    plan: Plan, runs: Mapping[str, Run], group: str, row: str, column: Column
) -> dict[str, Any] | None:
    planned = plan.cells.get((group, row, column.condition))
    if planned is None:
        return None
    everything = cell_values(plan, runs, group, row, column)
    seeds = _shown(plan, runs, group, row, column)
    values = {seed: value for seed, value in everything.items() if seed in seeds}
    paired = _paired(plan, runs, group, row, column)
    measure = MEASURES[column.measure]
    difference = _difference(plan, runs, group, row, column)
    finished = [runs[planned[seed]] for seed in seeds]
    rules = plan.rules[group, column.condition, column.measure]
    spent = [run.result["epsilon"] for run in finished if run.result.get("epsilon") is not None]
    return {
        "ours": summary(list(values.values())),
        "values": {
            str(seed): value for seed, value in sorted(everything.items()) if seed in paired
        },
        "published": _published(plan, group, row, column),
        "difference": None if difference is None else vars(difference),
        "better": {evidence.BETTER: True, evidence.WORSE: False}.get(
            "" if difference is None else difference.word
        ),
        "rules": {"looks": list(rules.looks), "effect": rules.effect, "overlap": rules.overlap},
        "good": direction(measure, finished),
        "epsilon": [min(spent), max(spent)] if spent else None,
        "delta": next(
            (run.result.get("delta") for run in finished if run.result.get("epsilon") is not None),
            None,
        ),
        "finished": len(finished),
        "diverged": _diverged(plan, runs, group, row, column),
        "planned": min(rules.looks[0], len(planned)),
        "metric": _metric_name(finished) if column.measure == "metric" else None,
    }


def _metric_name(runs: Sequence[Run]) -> str | None:
    """The metric of these runs, if they have the same one and a table has a name for it."""
    names = {str((run.result.get("metric") or {}).get("name")) for run in runs}
    return names.pop() if len(names) == 1 and names <= MEASURES.keys() else None


def _finished(
    plan: Plan, runs: Mapping[str, Run], group: str, row: str, column: Column
) -> list[int]:
    return [
        seed
        for seed, key in plan.cells.get((group, row, column.condition), {}).items()
        if key in runs
    ]


def _shown(plan: Plan, runs: Mapping[str, Run], group: str, row: str, column: Column) -> list[int]:
    """The finished seeds that a cell's mean is over.

    These are the seeds that every started row has, so that rows can be compared by eye: a row may
    be ahead of the others, and seeds differ by more than methods do. If no seed is common yet, all
    of the row's seeds count. A seed that another row was never planned to have counts, too.
    """
    finished, planned = {}, {}
    for line in plan.experiment.rows:
        label = line["label"]
        finished[label] = _finished(plan, runs, group, label, column)
        planned[label] = plan.cells.get((group, label, column.condition), {})
    return [
        seed
        for seed in finished[row]
        if all(
            seed in other or seed not in planned[label]
            for label, other in finished.items()
            if other
        )
    ] or finished[row]


def _paired(plan: Plan, runs: Mapping[str, Run], group: str, row: str, column: Column) -> list[int]:
    """The finished seeds that the baseline has too; differences are over all of these."""
    base = _finished(plan, runs, group, plan.experiment.baseline, column)
    own = _finished(plan, runs, group, row, column)
    return [seed for seed in own if seed in base] or own


def _difference(
    plan: Plan, runs: Mapping[str, Run], group: str, row: str, column: Column
) -> Difference | None:
    """The difference from the baseline, if both may be compared and no seed diverged."""
    baseline = plan.experiment.baseline
    if (
        not baseline
        or row == baseline
        or not MEASURES[column.measure].good
        or not is_private(plan, row)
    ):
        return None
    return difference_between(plan, runs, group, (row, baseline), column)


def difference_between(
    plan: Plan,
    runs: Mapping[str, Run],
    group: str,
    rows: tuple[str, str],
    column: Column,
    seeds: int | None = None,
) -> Difference | None:
    """The difference of two rows, if no seed of either diverged.

    Args:
        plan: The plan.
        runs: The finished runs, by key.
        group: The group.
        rows: Ours and the rival.
        column: The column.
        seeds: How many seeds count; None for all.
    """
    if any(_diverged(plan, runs, group, one, column) for one in rows):
        return None
    ours, theirs = (
        {
            seed: value
            for seed, value in cell_values(plan, runs, group, one, column).items()
            if seeds is None or seed <= seeds
        }
        for one in rows
    )
    keys = plan.cells.get((group, rows[0], column.condition), {}).values()
    good = direction(MEASURES[column.measure], [runs[key] for key in keys if key in runs])
    cells = [_published(plan, group, one, column) for one in rows]
    gain = None
    if cells[0] is not None and cells[1] is not None:
        gain = good * (cells[0]["mean"] - cells[1]["mean"])
    return compared(ours, theirs, plan.rules[group, column.condition, column.measure], good, gain)


def _diverged(plan: Plan, runs: Mapping[str, Run], group: str, row: str, column: Column) -> int:
    """How many finished seeds of a cell have no number."""
    keys = plan.cells.get((group, row, column.condition), {}).values()
    return sum(diverged(runs[key], MEASURES[column.measure]) for key in keys if key in runs)


def is_private(plan: Plan, row: str) -> bool:
    """Whether a row is private. Rows without privacy are upper limits and are not compared."""
    method = next(line["method"] for line in plan.experiment.rows if line["label"] == row)
    return bool(plan.experiment.common["methods"][method].get("private", True))


def direction(measure: Measure, finished: Sequence[Run]) -> int:
    """+1 if higher is better, -1 if lower is; the column "metric" depends on the runs."""
    if measure is MEASURES["metric"] and any(
        (run.result.get("metric") or {}).get("name") == "rmse" for run in finished
    ):
        return -1
    return measure.good


def _published(plan: Plan, group: str, row: str, column: Column) -> dict[str, Any] | None:
    cells = plan.experiment.published.get(group, {}).get(row)
    if cells is None or column.published is None or not plan.comparable[group, column.condition]:
        return None
    cell = cells[column.published]
    return None if cell is None else {"mean": cell.mean, "std": cell.std}


def _raw(
    plan: Plan, runs: Mapping[str, Run], group: str, row: str, column: Column, measure: Measure
) -> dict[int, float]:
    values = {}
    for seed, key in plan.cells.get((group, row, column.condition), {}).items():
        value = measure.read(runs[key]) if key in runs else None
        if value is not None:
            values[seed] = value
    return values


def _line(
    place: Mapping[str, Any], config: Mapping[str, Any], key: str, run: Run | None
) -> dict[str, Any]:
    result: Mapping[str, Any] = run.result if run is not None else {}
    metric, clip = result.get("metric") or {}, result.get("clip") or {}
    probes, seconds, metrics = (
        result.get("probes") or {},
        result.get("seconds") or {},
        result.get("metrics") or {},
    )
    names = (
        "experiment",
        "group",
        "row",
        "condition",
        "data",
        "method",
        "recipe",
        "seed",
    )
    line = {name: place[name] for name in names}
    line |= {
        "run": key,
        "state": "finished" if run is not None else "not run",
        "model": config["model"],
    }
    line["lr"] = config["lr"] if isinstance(config["lr"], (int, float)) else None
    line |= {
        name: result.get(name)
        for name in ("epsilon", "delta", "accountant", "sigma", "steps", "sample_rate")
    }
    line |= {"metric": metric.get("name"), "value": metric.get("value")}
    line |= {name: metrics.get(name) for name in ("accuracy", "auc", "rmse", "ece", "loss")}
    parts = ("initial", "final", "median", "mean", "min", "max", "hits_min", "hits_max")
    line |= {f"clip_{name}": clip.get(name) for name in parts}
    line |= {
        f"probes_{name}": probes.get(name)
        for name in ("count", "in_zone_share", "weak_fits", "failed_fits")
    }
    line |= {
        f"seconds_{name}": seconds.get(name)
        for name in ("total", "train", "eval", "probe", "setup")
    }
    return line | {"commit": result.get("commit")}
