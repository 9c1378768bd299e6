"""Learning rates: chosen from a grid of three, on one seed, half the length, held-out records.

What was chosen is kept in ``tuning.json``, and is chosen again only if the grid changes. Nothing is
chosen before the whole grid has finished, because a run that failed might have been the best. A run
that diverged has finished, and can't win.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

from .files import read_own, write_json
from .plan import Tuning
from .store import Store

NOTE = (
    "Each rate was chosen among those of its grid, by one run of half the length on one seed, on a"
    " tenth of the training records that was held out. Such tuning is not free: it looks at private"
    " data, and its cost is not in the ε of any run."
)


def key(tuning: Tuning) -> str:
    """A grid's name and a digest of its runs.

    An experiment with another grid, or other settings of a data set or a method, chooses its own
    rate and does not replace this one.
    """
    return _key(tuning.name, [run.key for run in tuning.runs])


def _key(name: str, runs: Sequence[str]) -> str:
    return f"{name}@{hashlib.sha256(' '.join(runs).encode()).hexdigest()[:8]}"


def load_rates(store: Store) -> dict[str, dict[str, Any]]:
    """What has been chosen so far, by the grids' keys."""
    path = store.out / "tuning.json"
    found = dict(read_own(path).get("rates", {})) if path.exists() else {}
    # Older files have names without a digest; the entry contains the grid.
    return {
        name if "@" in name else _key(name, [point["run"] for point in entry["grid"]]): entry
        for name, entry in found.items()
    }


def settled(tuning: Tuning, rates: dict[str, dict[str, Any]]) -> bool:
    """Whether exactly this grid has been decided, by all of its runs."""
    entry = rates.get(key(tuning))
    return entry is not None and all(
        point["value"] is not None or point.get("diverged") for point in entry["grid"]
    )


def chosen(
    tunings: Sequence[Tuning], rates: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """How the rates of these grids were chosen, by name, for those that are settled."""
    return {tuning.name: rates[key(tuning)] for tuning in tunings if settled(tuning, rates)}


def open_tunings(
    tunings: Sequence[Tuning], names: set[str], rates: dict[str, dict[str, Any]]
) -> list[Tuning]:
    """Those of the named grids that still have to be run.

    Args:
        tunings: The grids.
        names: The names to look for.
        rates: What has been chosen.
    """
    return [tuning for tuning in tunings if tuning.name in names and not settled(tuning, rates)]


def decide(tunings: Sequence[Tuning], store: Store) -> dict[str, str]:
    """Chooses the best rate of each grid and stores it.

    An undecided grid loses an earlier choice, which was based on a part of its runs.

    Returns:
        The grids that can't be decided, with the reason.
    """
    rates = load_rates(store)
    undecided = {}
    for tuning in tunings:
        grid, metric, missing = _measured(tuning, store)
        if not missing and any(point["value"] is not None for point in grid):
            rates[key(tuning)] = _chosen(grid, metric)
            continue
        why = (
            f"{missing} of {len(grid)} runs of its grid have no result"
            if missing
            else "every run of its grid diverged"
        )
        dropped = rates.pop(key(tuning), None)
        undecided[tuning.name] = why + (
            f" (the rate {dropped['rate']:g}, chosen before, is dropped)" if dropped else ""
        )
    write_json(store.out / "tuning.json", {"note": NOTE, "rates": dict(sorted(rates.items()))})
    return undecided


def values(tunings: Sequence[Tuning], rates: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The chosen rates, by name."""
    return {name: float(entry["rate"]) for name, entry in chosen(tunings, rates).items()}


def _measured(tuning: Tuning, store: Store) -> tuple[list[dict[str, Any]], str, int]:
    """A grid's points, its metric, and how many of its runs have no result."""
    metric, missing = "", 0
    grid: list[dict[str, Any]] = []
    for run in tuning.runs:
        point: dict[str, Any] = {"lr": run.config["lr"], "value": None, "run": run.key}
        finished = store.run(run)
        if finished is None:
            missing += 1
        else:
            found = finished.result.get("metric") or {}
            value = found.get("value")
            metric = found.get("name", metric)
            point |= (
                {"value": value}
                if value is not None and math.isfinite(value)
                else {"diverged": True}
            )
        grid.append(point)
    return grid, metric, missing


def _chosen(grid: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    better = min if metric == "rmse" else max
    best = better(
        (point for point in grid if point["value"] is not None), key=lambda point: point["value"]
    )
    # A rate that diverged was tried too, so its neighbour is not at the edge.
    edge = len(grid) > 1 and best["lr"] in (grid[0]["lr"], grid[-1]["lr"])
    return {"rate": best["lr"], "metric": metric, "at_edge_of_grid": edge, "grid": grid}
