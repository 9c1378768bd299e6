"""The parts of an experiment that have not been run: counts, commands and estimated times."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .ladder import Climb
from .planned import Plan, PlannedRun, ladder_of

# An experiment is split by these labels if it has more than one value of them.
_ALONG = ("data", "reading")


def parts(
    plan: Plan,
    needed: Sequence[PlannedRun],
    left: Sequence[PlannedRun],
    climbs: Mapping[str, Climb],
    command: str,
    seconds: Callable[[Sequence[PlannedRun]], float | None],
) -> list[dict[str, Any]]:
    """One entry of ``table.json`` for each data set and reading that is not complete.

    Args:
        plan: The plan of the experiment.
        needed: The runs of the looks that are open or done.
        left: Those that have not finished.
        climbs: Where the ladders of learning rates stand.
        command: The command that runs the whole experiment.
        seconds: Estimates the time of one worker, or returns None. It gets the runs of ladders too.
    """
    keys = [key for key in _ALONG if len({run.labels[key] for run in plan.runs}) > 1]
    counted: set[str] = set()  # a ladder that two parts need is climbed only once
    found = []
    for place in dict.fromkeys(_place(run, keys) for run in plan.runs):
        todo = [run for run in left if _place(run, keys) == place]
        if not todo:
            continue
        names = {ladder_of(run) for run in todo} - counted - {""}
        counted |= names
        rungs = [
            run
            for name in sorted(names)
            for rate in _ahead(plan, climbs, name)
            for run in plan.ladders[name].runs(rate)
        ]
        only = ",".join(f"{key}={value}" for key, value in zip(keys, place, strict=True) if value)
        found.append(
            {
                "what": ", ".join(
                    _called(plan, key, value)
                    for key, value in zip(keys, place, strict=True)
                    if value
                ),
                "left": len(todo),
                "planned": sum(_place(run, keys) == place for run in needed),
                "rungs": len(rungs),
                "command": f"{command} --only {shlex.quote(only)}" if only else command,
                "seconds": seconds([*todo, *rungs]),
            }
        )
    return found


def _ahead(plan: Plan, climbs: Mapping[str, Climb], name: str) -> Sequence[float]:
    """The rates that a ladder still has to try, at least: three and a half step from nothing."""
    climb, ladder = climbs[name], plan.ladders[name]
    if climb.rates or climb.rate is not None:
        return climb.wanted
    return [ladder.start * factor for factor in (0.5, 1.0, 2.0, 2.0**0.5)]


def _place(run: PlannedRun, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(run.labels[key]) for key in keys)


def _called(plan: Plan, key: str, value: str) -> str:
    common: Mapping[str, Any] = plan.experiment.common["readings" if key == "reading" else "data"]
    return str(common[value].get("label", value))
