"""What happens during runs: values per epoch or per probe, by seed."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .measures import Run
from .planned import Plan
from .tables import grid

# Kind: the file of the run folder, and the field that counts its lines.
KINDS = {"epochs": ("metrics.jsonl", "epoch"), "probes": ("probes.jsonl", "probe")}
_PER_CENT = ("accuracy", "ece")
LABELS = {
    "epsilon": "ε",
    "accuracy": "accuracy, %",
    "ece": "ECE, %",
    "clip": "C",
    "smoothed": "ζ̂",
    "zeta": "ζ",
    "auc": "AUC",
}


@dataclass(frozen=True)
class Point:
    """One value of one run, at an epoch or a probe."""

    group: str
    condition: str
    row: str
    seed: int
    index: int
    value: str
    number: float


def points(plan: Plan, runs: Mapping[str, Run], spec: Mapping[str, Any]) -> list[Point]:
    """All values that a series asks for.

    Args:
        plan: The plan of the experiment.
        runs: The finished runs, by key.
        spec: The series, from the experiment's file.
    """
    name, index = KINDS[spec["kind"]]
    methods, data = spec.get("methods"), spec.get("data")
    found = []
    for (group, row, condition), seeds in plan.cells.items():
        for seed, key in seeds.items():
            labels = plan.places[group, row, condition]
            if (
                key not in runs
                or (methods and labels["method"] not in methods)
                or (data and labels["data"] != data)
            ):
                continue
            for line in runs[key].lines(name):
                for value in spec["values"]:
                    number = line.get(value)
                    if number is not None:
                        scale = 100.0 if value in _PER_CENT else 1.0
                        found.append(
                            Point(
                                group, condition, row, seed, int(line[index]), value, scale * number
                            )
                        )
    return found


def csv_text(found: list[Point], spec: Mapping[str, Any]) -> str:
    """The points as CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["group", "condition", "row", "seed", KINDS[spec["kind"]][1], "value", "number"]
    )
    writer.writerows(
        [p.group, p.condition, p.row, p.seed, p.index, p.value, p.number] for p in found
    )
    return out.getvalue()


def means(
    found: list[Point], group: str, condition: str, value: str
) -> dict[str, dict[int, list[float]]]:
    """The numbers of the seeds that all rows have, by row and index.

    If no seed is common, all seeds count.

    Args:
        found: The points.
        group: The group.
        condition: The condition.
        value: The name of the value.
    """
    here = [
        point
        for point in found
        if (point.group, point.condition, point.value) == (group, condition, value)
    ]
    seeds: dict[str, set[int]] = {}
    for point in here:
        seeds.setdefault(point.row, set()).add(point.seed)
    common = set.intersection(*seeds.values()) if seeds else set()
    lines: dict[str, dict[int, list[float]]] = {}
    for point in here:
        if point.seed in common or not common:
            lines.setdefault(point.row, {}).setdefault(point.index, []).append(point.number)
    return lines


def panels(found: list[Point], spec: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(group, condition, value) of each table or plot."""
    there = dict.fromkeys((p.group, p.condition, p.value) for p in found)
    return sorted(there, key=lambda panel: spec["values"].index(panel[2]))


def markdown(plan: Plan, found: list[Point], spec: Mapping[str, Any]) -> str:
    """Means over seeds as Markdown, with the published values.

    Args:
        plan: The plan of the experiment.
        found: The points.
        spec: The series, from the experiment's file.
    """
    page = [
        f"# {plan.experiment.title}: {spec['title']}",
        "",
        "Mean over the seeds that all columns have.",
        "",
    ]
    index = KINDS[spec["kind"]][1]
    for group, condition, value in panels(found, spec):
        lines = means(found, group, condition, value)
        published = spec.get("published", {}).get(value, {})
        theirs = {row: list(published[row]) for row in lines if row in published}
        last = max(
            [index for line in lines.values() for index in line]
            + [len(line) for line in theirs.values()]
        )
        head = [index, *lines, *(f"paper: {row}" for row in theirs)]
        body = []
        for place in range(1, last + 1):
            ours = [
                f"{statistics.fmean(line[place]):.3f}" if place in line else ""
                for line in lines.values()
            ]
            paper = [
                f"{line[place - 1]:.2f}" if place <= len(line) else "" for line in theirs.values()
            ]
            body.append([str(place), *ours, *paper])
        title = ", ".join(part for part in (group, condition, LABELS.get(value, value)) if part)
        page += [f"## {title}", "", *grid(head, body)]
    return "\n".join(page).rstrip() + "\n"
