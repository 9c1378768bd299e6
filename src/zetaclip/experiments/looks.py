"""Which runs an experiment needs: seeds are added while a comparison is open.

Every row has the seeds of its first look. A comparison that can't be told at a look goes on to the
next one, with both of its rows; one that is told stops there. That the published gain is excluded
does not end it: where the difference lies is still open. Compared are all private rows with
the baseline, and the subject of the experiment with every row that the paper has beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from . import evidence
from .cells import cell_values, difference_between, is_private
from .measures import MEASURES, Run
from .planned import Column, Plan, PlannedRun


def needed(plan: Plan, runs: Mapping[str, Run]) -> list[PlannedRun]:
    """The runs that the finished ones call for, in the order of the plan.

    Args:
        plan: The plan, with the runs of all looks.
        runs: The finished runs, by key.
    """
    wanted: set[str] = set()
    for (group, row, condition), seeds in plan.cells.items():
        most = _seeds(plan, runs, group, row, condition)
        wanted |= {key for seed, key in seeds.items() if seed <= most}
    return [run for run in plan.runs if run.key in wanted]


def pairs(plan: Plan, group: str) -> Iterator[tuple[str, str]]:
    """The rows that are compared."""
    experiment = plan.experiment
    published = experiment.published.get(group, {})
    for line in experiment.rows:
        row = line["label"]
        if not is_private(plan, row):
            continue
        if experiment.baseline and row != experiment.baseline:
            yield row, experiment.baseline
        rival = row in published and row not in (experiment.subject, experiment.baseline)
        if experiment.subject and rival:
            yield experiment.subject, row


def _seeds(plan: Plan, runs: Mapping[str, Run], group: str, row: str, condition: str) -> int:
    """How many seeds a row needs under one condition."""
    columns = [
        column
        for column in plan.columns
        if column.condition == condition and MEASURES[column.measure].good
    ]
    looks = next(
        rules.looks for place, rules in plan.rules.items() if place[:2] == (group, condition)
    )
    most = looks[0]
    for pair in pairs(plan, group):
        if row in pair and all((group, one, condition) in plan.cells for one in pair):
            for column in columns:
                most = max(most, _wanted(plan, runs, group, pair, column, looks))
    return most


def _wanted(
    plan: Plan,
    runs: Mapping[str, Run],
    group: str,
    pair: tuple[str, str],
    column: Column,
    looks: tuple[int, ...],
) -> int:
    """The look that a comparison asks for: the first that is not complete, or that tells it."""
    rules = plan.rules[group, column.condition, column.measure]
    if MEASURES[column.measure].relative or not rules.effect:
        return looks[0]
    both = [cell_values(plan, runs, group, row, column) for row in pair]
    for look in looks:
        if any(seed not in values for seed in range(1, look + 1) for values in both):
            return look
        found = difference_between(plan, runs, group, pair, column, look)
        if found is None or evidence.word(found.p) not in (evidence.OPEN, evidence.EXCLUDED):
            return look
    return looks[-1]
