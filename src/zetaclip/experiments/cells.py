"""The numbers of a cell, seed by seed, and the paired differences of two cells.

Every finished seed counts, at its last epoch: no best seed, no best epoch. A cell with a seed that
diverged is not compared: a mean over its other seeds would flatter it. What a difference proves is
in ``evidence.py``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import evidence
from .evidence import Rules
from .measures import MEASURES, Measure, Run, diverged
from .planned import Column, Plan


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
    pairs = list(evidence.counted(pairs, rules))
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
    if any(diverged_seeds(plan, runs, group, one, column) for one in rows):
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
    cells = [published(plan, group, one, column) for one in rows]
    gain = None
    elsewhere = MEASURES[column.measure].of_the_machine
    if cells[0] is not None and cells[1] is not None and not elsewhere:
        gain = good * (cells[0]["mean"] - cells[1]["mean"])
    return compared(ours, theirs, plan.rules[group, column.condition, column.measure], good, gain)


def diverged_seeds(
    plan: Plan, runs: Mapping[str, Run], group: str, row: str, column: Column
) -> int:
    """How many finished seeds of a cell have no number.

    Args:
        plan: The plan of the experiment.
        runs: The finished runs by key.
        group: The group of the row.
        row: The label of the row.
        column: The column.
    """
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


def published(plan: Plan, group: str, row: str, column: Column) -> dict[str, Any] | None:
    """The paper's number for a cell, if it may be put beside ours.

    Args:
        plan: The plan of the experiment.
        group: The group of the row.
        row: The label of the row.
        column: The column.
    """
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
