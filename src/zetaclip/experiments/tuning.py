"""Learning rates: three on a grid, one seed, half the length, judged on records held out of the training data.

What was chosen is kept in ``tuning.json``, and is chosen again only if the grid changes.
"""

from __future__ import annotations

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
    """True if this very grid has been decided."""
    entry = rates.get(tuning.name)
    return entry is not None and [point["run"] for point in entry["grid"]] == [run.key for run in tuning.runs]


def open_tunings(tunings: Sequence[Tuning], names: set[str], rates: dict[str, dict[str, Any]]) -> list[Tuning]:
    """Those of the named grids that still have to be run."""
    return [tuning for tuning in tunings if tuning.name in names and not settled(tuning, rates)]


def decide(tunings: Sequence[Tuning], store: Store) -> list[str]:
    """Chooses the best rate of each grid and stores it; returns the names for which no run gave a number."""
    rates = load_rates(store)
    undecided = []
    for tuning in tunings:
        entry = _choose(tuning, store)
        if entry is None:
            undecided.append(tuning.name)
        else:
            rates[tuning.name] = entry
    write_json(store.out / "tuning.json", {"note": NOTE, "rates": dict(sorted(rates.items()))})
    return undecided


def values(rates: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The bare numbers, as a plan takes them."""
    return {name: float(entry["rate"]) for name, entry in rates.items()}


def _choose(tuning: Tuning, store: Store) -> dict[str, Any] | None:
    metric = ""
    grid: list[dict[str, Any]] = []
    for run in tuning.runs:
        value = None
        if store.finished(run.key):
            found = Run.read(store.folder(run.key)).result.get("metric") or {}
            metric, value = found.get("name", metric), found.get("value")
        grid.append({"lr": run.config["lr"], "value": value, "run": run.key})
    good = [point for point in grid if point["value"] is not None]
    if not good:
        return None
    better = min if metric == "rmse" else max
    best = better(good, key=lambda point: point["value"])
    edge = len(grid) > 1 and best["lr"] in (grid[0]["lr"], grid[-1]["lr"])
    return {"rate": best["lr"], "metric": metric, "at_edge_of_grid": edge, "grid": grid}
