"""Learning rates: each method climbs a ladder of its own, under the very conditions of its cell.

A rung is twice the one below. Every rate is tried at full length, at the cell's ε and schedule, on
a tenth of the training records that was held out. From a first guess the ladder is climbed until
neither neighbour of the best rung is better; then half a step towards the better neighbour is
tried. Of equal rates the lowest counts. All methods may try the same number of rates. A run that
diverged is worse than any that did not.

Nothing is stored: a choice follows from the finished runs, and is the same wherever they are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .measures import Run
from .planned import Ladder, PlannedRun

NOTE = (
    "Each method has climbed its own ladder of rates: steps of 2, at full length, at the ε and the"
    " schedule of the column, on a tenth of the training records that was held out, until neither"
    " neighbour was better, then half a step. Such tuning is not free: it looks at private data,"
    " and its cost is in no ε."
)


@dataclass(frozen=True)
class Climb:
    """How far a ladder has been climbed.

    Args:
        rates: What each rate that was tried came to; None if it diverged.
        rate: The best rate; None while the ladder is not finished, or if all diverged.
        wanted: The rates to try next; none when finished.
        capped: Whether the cap ended it while a neighbour could be better.
        metric: What was measured.
    """

    rates: dict[float, float | None]
    rate: float | None
    wanted: tuple[float, ...]
    capped: bool = False
    metric: str = ""

    def told(self) -> dict[str, Any]:
        """For ``table.json``."""
        points = [{"lr": rate, "value": self.rates[rate]} for rate in sorted(self.rates)]
        return {
            "rate": self.rate,
            "metric": self.metric,
            "at_edge": self.capped,
            "points": points,
        }


def climb(ladder: Ladder, start: float, result: Callable[[PlannedRun], Run | None]) -> Climb:
    """Where a ladder stands.

    Args:
        ladder: The ladder.
        start: Its first rate.
        result: A finished run, or None.
    """
    good, metric = 1, ""
    tried: dict[float, float | None] = {}  # by rung
    open_rungs: set[float] = set()

    def rate(rung: float) -> float:
        return float(f"{start * 2.0**rung:.4g}")

    def look(rung: float) -> None:
        nonlocal good, metric
        runs = [result(run) for run in ladder.runs(rate(rung))]
        found = [run for run in runs if run is not None]
        if len(found) < len(runs):
            open_rungs.add(rung)
            return
        metrics = [run.result.get("metric") or {} for run in found]
        metric = next((str(one["name"]) for one in metrics if one.get("name")), metric)
        good = -1 if metric == "rmse" else 1
        values = [one.get("value") for one in metrics]
        whole = [float(v) for v in values if v is not None and math.isfinite(v)]
        tried[rung] = statistics.fmean(whole) if len(whole) == len(values) else None

    def value(rung: float) -> float:
        found = tried.get(rung)
        return -math.inf if found is None else good * found

    for rung in (-1.0, 0.0, 1.0):
        look(rung)
    capped = False
    while not open_rungs:
        # Of equal rungs the lowest: where all diverge, the way is down.
        top = max(sorted(rung for rung in tried if rung == int(rung)), key=value)
        missing = [rung for rung in (top - 1, top + 1) if rung not in tried]
        if not missing:
            side = 0.5 if value(top + 1) > value(top - 1) else -0.5
            missing = [rung for rung in (top + side,) if rung not in tried]
            if not missing or len(tried) >= ladder.cap:
                break
        elif len(tried) >= ladder.cap:
            capped = True
            break
        for rung in missing[: ladder.cap - len(tried)]:
            look(rung)
    by_rate = {rate(rung): tried[rung] for rung in sorted(tried)}
    if open_rungs:
        return Climb(by_rate, None, tuple(sorted(map(rate, open_rungs))), metric=metric)
    best = max(sorted(tried), key=value)
    chosen = None if tried[best] is None else rate(best)
    return Climb(by_rate, chosen, (), capped, metric)


def climb_all(
    ladders: Mapping[str, Ladder],
    names: Iterable[str],
    result: Callable[[PlannedRun], Run | None],
) -> dict[str, Climb]:
    """Where the named ladders stand, with those that they follow; one that waits has no rates.

    Args:
        ladders: All ladders by name.
        names: Which of them.
        result: Gives the result of a planned run; None if it is not finished.
    """
    found: dict[str, Climb] = {}

    def add(name: str) -> Climb:
        if name not in found:
            ladder, start = ladders[name], ladders[name].start
            if ladder.follows:
                followed = add(ladder.follows)
                if followed.rate is None and followed.wanted:
                    found[name] = Climb({}, None, ())
                    return found[name]
                start = followed.rate or start
            found[name] = climb(ladder, start, result)
        return found[name]

    for name in names:
        if name:
            add(name)
    return found
