"""The parts of an experiment that have not been run: counts, commands and estimated times."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import tuning
from .plan import Plan, PlannedRun, tuning_of
from .store import Store

# An experiment is split by these labels if it has more than one value of them.
_ALONG = ("data", "reading")


def parts(
    plan: Plan,
    left: Sequence[PlannedRun],
    command: str,
    store: Store,
    seconds: Callable[[Sequence[PlannedRun]], float | None],
) -> list[dict[str, Any]]:
    """One entry of ``table.json`` for each data set and reading that is not complete.

    Args:
        plan: The plan of the experiment.
        left: The runs that have not finished.
        command: The command that runs the whole experiment.
        store: The results folder.
        seconds: Estimates the time of one worker, or returns None. It gets the runs of grids of
            learning rates too.
    """
    keys = [key for key in _ALONG if len({run.labels[key] for run in plan.runs}) > 1]
    rates = tuning.load_rates(store)
    counted: set[str] = set()  # a grid that two parts need is run only once
    found = []
    for place in dict.fromkeys(_place(run, keys) for run in plan.runs):
        planned = [run for run in plan.runs if _place(run, keys) == place]
        todo = [run for run in left if _place(run, keys) == place]
        if not todo:
            continue
        names = {tuning_of(run) for run in todo} - counted
        counted |= names
        open_grids = tuning.open_tunings(plan.tunings, names, rates)
        grid = [run for one in open_grids for run in one.runs if not store.finished(run.key)]
        only = ",".join(f"{key}={value}" for key, value in zip(keys, place, strict=True) if value)
        found.append(
            {
                "what": ", ".join(
                    _called(plan, key, value)
                    for key, value in zip(keys, place, strict=True)
                    if value
                ),
                "left": len(todo),
                "planned": len(planned),
                "grid": len(grid),
                "command": f"{command} --only {shlex.quote(only)}" if only else command,
                "seconds": seconds([*todo, *grid]),
            }
        )
    return found


def _place(run: PlannedRun, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(run.labels[key]) for key in keys)


def _called(plan: Plan, key: str, value: str) -> str:
    common: Mapping[str, Any] = plan.experiment.common["readings" if key == "reading" else "data"]
    return str(common[value].get("label", value))
