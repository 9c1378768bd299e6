"""What is planned: runs, columns, ladders of learning rates, and how a run is named.

A run is named by the hash of its configuration. Two cells, or two experiments, that ask for the
same configuration share the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .evidence import Rules
from .spec import Experiment

# The runs of a table have the seeds 1, 2, ...; ladders of learning rates use none of them.
TUNING_SEED = 1000
CAP = 8  # learning rates that a ladder may try, the same for every method


@dataclass(frozen=True)
class PlannedRun:
    """One call of ``zetaclip train``.

    Args:
        key: The hash of the configuration, see ``config_key``.
        config: The configuration. It may contain placeholders: ``"@run:KEY"`` for another run's
            folder, ``"@tuned:NAME"`` for a learning rate that is not chosen yet, and ``{"rate": r,
            "times_mean_clip_of": "@run:KEY"}`` for one scaled by another run's mean C.
        labels: The place in the table.
        after: The runs that must be finished first.
        alone: Whether it has the machine to itself, because it is timed.
    """

    key: str
    config: dict[str, Any]
    labels: dict[str, Any]
    after: tuple[str, ...] = ()
    alone: bool = False

    def describe(self) -> str:
        """The run's place in the table, in words."""
        labels = self.labels
        parts = [labels["group"], labels["condition"], labels["row"]]
        return " · ".join([part for part in parts if part] + [f"seed {labels['seed']}"])


@dataclass(frozen=True)
class Column:
    """One column of the table: a condition, and what is measured under it."""

    label: str
    condition: str
    measure: str
    published: int | None
    x: float | None = None


@dataclass(frozen=True)
class Ladder:
    """The learning rates that one method may try under one condition; see ``ladder.py``.

    Args:
        name: Method, condition and recipe, in words.
        config: The configuration of its runs, without rate and seed.
        labels: Their place.
        start: The first rate.
        follows: The name of a ladder whose choice is the first rate; "" for ``start``.
        seeds: How many runs each rate has.
        cap: How many rates may be tried.
        splits: Whether each seed has a split of its own.
    """

    name: str
    config: dict[str, Any]
    labels: dict[str, Any]
    start: float
    follows: str = ""
    seeds: int = 1
    cap: int = CAP
    splits: bool = False

    def runs(self, rate: float) -> tuple[PlannedRun, ...]:
        """The runs that measure one rate."""
        found = []
        for seed in range(TUNING_SEED, TUNING_SEED + self.seeds):
            config = seeded({**self.config, "lr": rate}, seed, self.splits)
            labels = {**self.labels, "row": f"{self.labels['row']}, lr {rate:g}", "seed": seed}
            found.append(PlannedRun(config_key(config), config, labels))
        return tuple(found)


@dataclass(frozen=True)
class Plan:
    """All that an experiment may need.

    Args:
        experiment: The experiment.
        runs: The runs of all looks, each after those that it needs.
        columns: The columns of the table.
        cells: The run of each seed, by (group, row, condition).
        rules: How a measure is judged, by (group, condition, measure).
        comparable: Whether published cells may be put beside ours, by (group, condition).
        ladders: The ladders of learning rates, by name.
        by_key: The runs by key.
        places: The labels of each cell. Cells may share a run, whose own labels are those of the
            first cell.
    """

    experiment: Experiment
    runs: tuple[PlannedRun, ...]
    columns: tuple[Column, ...]
    cells: dict[tuple[str, str, str], dict[int, str]]
    rules: dict[tuple[str, str, str], Rules]
    comparable: dict[tuple[str, str], bool]
    ladders: dict[str, Ladder] = field(default_factory=dict)
    by_key: dict[str, PlannedRun] = field(default_factory=dict)
    places: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)


def config_key(config: Mapping[str, Any], alone: bool = False) -> str:
    """The name of a run: 16 hexadecimal digits of the hash of its configuration.

    A run that is timed ``alone`` is never shared with one that ran beside others.
    """
    content = (
        {"config": _canonical(config), "alone": True} if alone else {"config": _canonical(config)}
    )
    text = json.dumps(
        content, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def ladder_of(run: PlannedRun) -> str:
    """The name of the ladder of this run's learning rate; "" if the experiment sets the rate."""
    return str(run.labels["rate"])


def with_dependencies(plan: Plan, runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """These runs and those that they need, each after what it needs, else in the given order."""
    ordered: dict[str, PlannedRun] = {}

    def add(run: PlannedRun) -> None:
        if run.key not in ordered:
            for key in run.after:
                add(plan.by_key[key])
            ordered[run.key] = run

    for run in runs:
        add(run)
    return list(ordered.values())


def seeded(config: dict[str, Any], seed: int, splits: bool) -> dict[str, Any]:
    """The configuration with all that depends on the seed.

    Args:
        config: The configuration.
        seed: The seed.
        splits: Whether the split of the data depends on the seed.
    """
    config = {**config, "seed": seed}
    if splits:
        config["data_options"] = {**config.get("data_options", {}), "seed": seed}
    if "skew" in config:
        config["skew_seed"] = seed
    if config.get("spectral", {}).get("signal") == "random":
        # Other random numbers in every seed, so that the seeds show the effect of chance.
        config["spectral"] = {**config["spectral"], "signal_seed": seed}
    return config


def _canonical(value: Any) -> Any:
    """The value with 1.0 as 1, because files may write either."""
    if isinstance(value, Mapping):
        return {str(key): _canonical(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(inner) for inner in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
