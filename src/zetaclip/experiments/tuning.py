"""Learning rates: three on a grid, one seed, half the length, judged on records held out of the training data.

What was chosen is kept in ``tuning.json``, and is chosen again only if the grid changes. Nothing is chosen before the whole grid
has finished: a run that failed might have been the best. One that diverged has finished, and can't win.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .measures import Run
from .plan import Tuning
from .store import Store, read_json, write_json

NOTE = (
    "Each rate was chosen among those of its grid, by one run of half the length on one seed, on a tenth of the training records that was held "
    "out. Such tuning is not free: it looks at private data, and its cost is not in the ε of any run."
)


def load_rates(store: Store) -> dict[str, dict[str, Any]]:
    """What has been chosen so far, by name."""
    path = store.out / "tuning.json"
    return dict(read_json(path).get("rates", {})) if path.exists() else {}


def settled(tuning: Tuning, rates: dict[str, dict[str, Any]]) -> bool:
    """True if this very grid has been decided, by all of its runs."""
    entry = rates.get(tuning.name)
    if entry is None or [point["run"] for point in entry["grid"]] != [run.key for run in tuning.runs]:
        return False
    return all(point["value"] is not None or point.get("diverged") for point in entry["grid"])


def open_tunings(tunings: Sequence[Tuning], names: set[str], rates: dict[str, dict[str, Any]]) -> list[Tuning]:
    """Those of the named grids that still have to be run."""
    return [tuning for tuning in tunings if tuning.name in names and not settled(tuning, rates)]


def decide(tunings: Sequence[Tuning], store: Store) -> dict[str, str]:
    """Chooses the best rate of each grid and stores it; returns those that can't be decided, and why.

    An undecided grid loses what was chosen for it before: that rate is one of another grid, or of a part of this one.
    """
    rates = load_rates(store)
    undecided = {}
    for tuning in tunings:
        grid, metric, missing = _measured(tuning, store)
        if not missing and any(point["value"] is not None for point in grid):
            rates[tuning.name] = _chosen(grid, metric)
            continue
        why = (
            f"{missing} of {len(grid)} runs of its grid have no result" if missing else "every run of its grid diverged"
        )
        dropped = rates.pop(tuning.name, None)
        undecided[tuning.name] = why + (
            f" (the rate {dropped['rate']:g}, chosen before, is dropped)" if dropped else ""
        )
    write_json(store.out / "tuning.json", {"note": NOTE, "rates": dict(sorted(rates.items()))})
    return undecided


def values(rates: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The bare numbers, as a plan takes them."""
    return {name: float(entry["rate"]) for name, entry in rates.items()}


def _measured(tuning: Tuning, store: Store) -> tuple[list[dict[str, Any]], str, int]:
    """A grid's points, its metric, and how many runs have not finished or can't be trusted."""
    metric, missing = "", 0
    grid: list[dict[str, Any]] = []
    for run in tuning.runs:
        point: dict[str, Any] = {"lr": run.config["lr"], "value": None, "run": run.key}
        if not store.finished(run.key) or store.problems(run):
            missing += 1
        else:
            found = Run.read(store.folder(run.key)).result.get("metric") or {}
            value = found.get("value")
            metric = found.get("name", metric)
            point |= {"value": value} if value is not None and math.isfinite(value) else {"diverged": True}
        grid.append(point)
    return grid, metric, missing


def _chosen(grid: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    better = min if metric == "rmse" else max
    best = better((point for point in grid if point["value"] is not None), key=lambda point: point["value"])
    # A neighbour that diverged was tried too, so it does not make an edge.
    edge = len(grid) > 1 and best["lr"] in (grid[0]["lr"], grid[-1]["lr"])
    return {"rate": best["lr"], "metric": metric, "at_edge_of_grid": edge, "grid": grid}
