"""From finished runs to a CSV and a table: means, spreads, paired differences from the baseline.

A cell whose runs are missing says so, and so does a cell with a seed that diverged.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from . import evidence
from .cells import (
    Difference,
    cell_values,
    difference_between,
    direction,
    diverged_seeds,
    is_private,
    published,
)
from .measures import MEASURES, Run
from .planned import Column, Plan
from .store import Store


def summary(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean, sample standard deviation (None for a single value) and count."""
    if not values:
        return None
    std = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": std, "n": len(values)}


def collect(plan: Plan, store: Store) -> dict[str, Run]:
    """The finished runs of a plan by key, without those that can't be trusted."""
    found = ((run.key, store.run(run)) for run in plan.runs)
    return {key: run for key, run in found if run is not None}


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
    """One line per run and cell of the table, finished or needed.

    Args:
        plan: The plan of the experiment.
        runs: The finished runs by key.
        needed: Keys of runs that are still needed.
    """
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
        "published": published(plan, group, row, column),
        "difference": None if difference is None else vars(difference),
        "better": {evidence.BETTER: True, evidence.WORSE: False}.get(
            "" if difference is None else difference.word
        ),
        "rules": {**vars(rules), "looks": list(rules.looks)},
        "good": direction(measure, finished),
        "epsilon": [min(spent), max(spent)] if spent else None,
        "delta": next(
            (run.result.get("delta") for run in finished if run.result.get("epsilon") is not None),
            None,
        ),
        "finished": len(finished),
        "diverged": diverged_seeds(plan, runs, group, row, column),
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
