"""From an experiment to runs: their configurations, their order, and the cells that they fill.

Seeds are paired: every row and column of an experiment uses the same list. So a run and its
baseline share initial weights and, if a method draws one batch a step, batches. A run is named by
the hash of its configuration. Two cells, or two experiments, that ask for the same configuration
share the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import CommandError
from .spec import CONFIG_KEYS, PROFILES, Experiment, merged

# The runs of a table have the seeds 1, 2, ...; the grids of learning rates use none of them.
TUNING_SEED = 1000
VALIDATION_SHARE = 0.1

_DP_KEYS = ("epsilon", "sigma", "delta", "accountant", "clip", "decouple", "clipping", "spectral")


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
class Tuning:
    """The grid of learning rates of one method on one data set."""

    name: str
    runs: tuple[PlannedRun, ...]


@dataclass(frozen=True)
class Plan:
    """All that an experiment needs under one profile.

    Args:
        experiment: The experiment.
        profile: lite or paper.
        runs: The runs, each after those that it needs.
        columns: The columns of the table.
        cells: The run of each seed, by (group, row, condition).
        comparable: Whether published cells may be put beside ours, by (group, condition).
        tunings: The grids of learning rates.
        left_out: Sentences about what this profile leaves out.
        by_key: The runs by key.
        places: The labels of each cell. Cells may share a run, whose own labels are those of the
            first cell.
    """

    experiment: Experiment
    profile: str
    runs: tuple[PlannedRun, ...]
    columns: tuple[Column, ...]
    cells: dict[tuple[str, str, str], dict[int, str]]
    comparable: dict[tuple[str, str], bool]
    tunings: tuple[Tuning, ...] = ()
    left_out: tuple[str, ...] = ()
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


def make_plan(
    experiment: Experiment, profile: str, rates: Mapping[str, float] | None = None
) -> Plan:
    """The runs of an experiment.

    Args:
        experiment: The experiment.
        profile: lite or paper.
        rates: The tuned learning rates by name; a missing one leaves a placeholder.

    Raises:
        CommandError: The experiment can't be run under this profile, or its file has a mistake.
    """
    if profile not in PROFILES:
        raise CommandError(f"the profile is one of {', '.join(PROFILES)}, not {profile!r}")
    return _Planner(experiment, profile, rates or {}).plan()


def tuning_of(run: PlannedRun) -> str:
    """The name of the grid of this run's learning rate; "" if the experiment sets the rate."""
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


class _Planner:
    def __init__(self, experiment: Experiment, profile: str, rates: Mapping[str, float]) -> None:
        self.experiment, self.profile, self.rates = experiment, profile, rates
        self.common = experiment.common
        self.rows = {row["label"]: row for row in experiment.rows}
        self.by_key: dict[str, PlannedRun] = {}
        self.tunings: dict[str, Tuning] = {}

    def plan(self) -> Plan:
        experiment = self.experiment
        blocks = []  # (group, column, reading, condition) that this profile runs
        left_out: dict[str, None] = {}
        for group in experiment.groups:
            for column in experiment.columns:
                name, data = self._data(group, column)
                if self.profile not in data.get("profiles", PROFILES):
                    left_out[
                        f"{data.get('label', name)} is not part of the {self.profile} profile"
                    ] = None
                    continue
                for reading in column.get("readings", [None]):
                    blocks.append((group, column, reading, self._condition(column, reading)))
        if not blocks:
            raise CommandError(
                f"{experiment.name} has nothing to run under the profile {self.profile}"
            )
        cells: dict[tuple[str, str, str], dict[int, str]] = {}
        places: dict[tuple[str, str, str], dict[str, Any]] = {}
        order: list[PlannedRun] = []
        most = max(self._seeds(group, column) for group, column, _, _ in blocks)
        for seed in range(1, most + 1):  # one seed of all rows before the second of any
            for group, column, reading, condition in blocks:
                if seed > self._seeds(group, column):
                    continue
                for row in experiment.rows:
                    if seed > self._seeds(group, column, row):
                        continue
                    run = self._run(group, column, reading, row, seed)
                    place = (group["label"], row["label"], condition)
                    cells.setdefault(place, {})[seed] = run.key
                    places[place] = self._labels(group, column, reading, row)
                    order.append(run)
        comparable = {
            (group["label"], condition): (
                self.profile not in self._data(group, column)[1].get("not_comparable", ())
            )
            for group, column, _, condition in blocks
        }
        plan = Plan(
            experiment=experiment,
            profile=self.profile,
            runs=(),
            columns=tuple(self._columns({condition for *_, condition in blocks})),
            cells=cells,
            comparable=comparable,
            tunings=tuple(self.tunings.values()),
            left_out=tuple(left_out),
            by_key=self.by_key,
            places=places,
        )
        return Plan(**{**vars(plan), "runs": tuple(with_dependencies(plan, order))})

    def _columns(self, conditions: set[str]) -> Iterable[Column]:
        position = 0
        published = self.experiment.published_measures
        for column in self.experiment.columns:
            places = {}
            for measure in column["measures"]:
                if published is None or measure in published:
                    places[measure] = position
                    position += 1
            for reading in column.get("readings", [None]):
                condition = self._condition(column, reading)
                if condition in conditions:
                    for measure in column["measures"]:
                        label = ", ".join(
                            part for part in (column["label"], self._reading_label(reading)) if part
                        )
                        yield Column(
                            label, condition, measure, places.get(measure), column.get("x")
                        )

    def _run(
        self,
        group: dict[str, Any],
        column: dict[str, Any],
        reading: str | None,
        row: dict[str, Any],
        seed: int,
        asked_by: tuple[str, ...] = (),
    ) -> PlannedRun:
        name, _ = self._data(group, column)
        method_name = row["method"]
        method = self.common["methods"][method_name]
        recipe = group.get("recipe", "paper")
        config = merged(
            self._foundation(name, recipe, method_name),
            group.get("set", {}),
            group.get(self.profile, {}),
            self.common["readings"][reading]["set"] if reading else {},
            column.get("set", {}),
            column.get(self.profile, {}),
            row.get("set", {}),
            row.get(self.profile, {}),
            {"seed": seed},
        )
        if not method.get("private", True):
            config = {key: value for key, value in config.items() if key not in _DP_KEYS}
        if "steps" in group.get(self.profile, {}):  # instead of the data set's epochs
            config.pop("epochs", None)
        if "clipping" in config:  # has its own first C
            config.pop("clip", None)
        if "skew" in config:
            config["skew_seed"] = seed
        if config.get("spectral", {}).get("signal") == "random":
            # Other random numbers in every seed, so that the seeds show the effect of chance.
            config["spectral"] = {**config["spectral"], "signal_seed": seed}
        rate_name = ""
        if "lr" not in config:  # an experiment over learning rates sets them
            rate_name = self._tuning(name, recipe, method_name)
            config["lr"] = self.rates.get(rate_name, f"@tuned:{rate_name}")
        if "rate_times_mean_clip" in row:
            config["lr"] = {"rate": config["lr"], "times_mean_clip_of": row["rate_times_mean_clip"]}
        after: list[str] = []
        if row["label"] in asked_by:
            raise CommandError(
                f"{self.experiment.name}: the row {row['label']!r} needs its own result"
            )
        config = self._with_runs(
            config, (group, column, reading, row, seed), (*asked_by, row["label"]), after
        )
        for key in config:
            if key not in CONFIG_KEYS:
                raise CommandError(
                    f"{self.experiment.name}: {row['label']!r} sets {key!r}, which train does not"
                    " know"
                )
        labels = {**self._labels(group, column, reading, row), "seed": seed, "rate": rate_name}
        key = config_key(config, self.experiment.exclusive)
        run = PlannedRun(key, config, labels, tuple(after), self.experiment.exclusive)
        return self.by_key.setdefault(key, run)

    def _labels(
        self,
        group: dict[str, Any],
        column: dict[str, Any],
        reading: str | None,
        row: dict[str, Any],
    ) -> dict[str, Any]:
        return {
            "experiment": self.experiment.name,
            "profile": self.profile,
            "group": group["label"],
            "row": row["label"],
            "column": column["label"],
            "reading": reading or "",
            "condition": self._condition(column, reading),
            "data": self._data(group, column)[0],
            "method": row["method"],
            "recipe": group.get("recipe", "paper"),
        }

    def _with_runs(
        self, value: Any, place: tuple[Any, ...], asked_by: tuple[str, ...], after: list[str]
    ) -> Any:
        """Replaces every ``@run:ROW`` in the configuration by ``@run:KEY``, and "none" by None."""
        if isinstance(value, dict):
            return {
                key: self._with_runs(inner, place, asked_by, after) for key, inner in value.items()
            }
        if value == "none":
            return None
        if not (isinstance(value, str) and value.startswith("@run:")):
            return value
        group, column, reading, _, seed = place
        label, _, which = value.removeprefix("@run:").partition("@")
        if label not in self.rows or which not in ("", "next-seed"):
            raise CommandError(f"{self.experiment.name}: {value!r} names no row of this experiment")
        if which == "next-seed":
            count = self._seeds(group, column)
            if count < 2:
                raise CommandError(
                    f"{self.experiment.name}: another seed's run needs at least two seeds"
                )
            seed = seed % count + 1
        needed = self._run(group, column, reading, self.rows[label], seed, asked_by)
        after.append(needed.key)
        return f"@run:{needed.key}"

    def _foundation(self, data_name: str, recipe: str, method_name: str) -> dict[str, Any]:
        data, method = self.common["data"][data_name], self.common["methods"][method_name]
        config = merged(
            self.common["base"],
            self.common["recipes"][recipe]["set"],
            data["set"],
            data.get(self.profile, {}),
            method["set"],
            {"spectral": data.get("spectral", {})} if method.get("spectral") else {},
        )
        # Train has defaults for these, but an experiment must state what it compares, and a grid
        # uses half of the length. Of the method "auto" they are a part.
        lengths = () if config.get("method") == "auto" else (("batch_size",), ("epochs", "steps"))
        for keys in (("model",), *lengths):
            if not any(key in config for key in keys):
                raise CommandError(
                    f"{self.experiment.name}: the set of the data set {data_name!r} has no"
                    f" {' or '.join(keys)} for the profile {self.profile}"
                )
        return config

    def _tuning(self, data_name: str, recipe: str, method_name: str) -> str:
        """Plans the grid of this learning rate, and returns its name."""
        method_name = self.experiment.tuning.get("rate_of") or method_name
        name = f"{self.profile}/{data_name}/{recipe}/{method_name}"
        if name in self.tunings:
            return name
        data, method = self.common["data"][data_name], self.common["methods"][method_name]
        rates = {**data.get("rates", {}), **self.common["recipes"][recipe].get("rates", {})}
        middle = method.get("middle", rates.get(method.get("rate", "sgd")))
        if middle is None:
            raise CommandError(
                f"{self.experiment.name}: no learning rate to start from for {name}; set rates or"
                " middle"
            )
        half = merged(
            self._foundation(data_name, recipe, method_name),
            data.get("tuning", {}),
            {"validation": VALIDATION_SHARE, "seed": TUNING_SEED},
        )
        for length in ("epochs", "steps"):
            if length in half:
                half[length] = max(1, half[length] // 2)
        if not method.get("private", True):
            half = {key: value for key, value in half.items() if key not in _DP_KEYS}
        labels = {
            "experiment": "tuning",
            "profile": self.profile,
            "group": "learning rate",
            "seed": TUNING_SEED,
        }
        labels |= {
            "column": "",
            "reading": "",
            "data": data_name,
            "method": method_name,
            "recipe": recipe,
            "rate": name,
        }
        runs = []
        for factor in self.experiment.tuning.get("factors", [1.0]):
            rate = float(f"{middle * factor:.6g}")
            config = {**half, "lr": rate}
            row = {
                "row": f"{method_name}, lr {rate:g}",
                "condition": f"{data_name}, {recipe} recipe",
            }
            runs.append(PlannedRun(config_key(config), config, {**labels, **row}))
        self.tunings[name] = Tuning(name, tuple(runs))
        return name

    def _data(self, group: dict[str, Any], column: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        name = str(group.get("data", column.get("data")))
        return name, self.common["data"][name]

    def _seeds(
        self, group: dict[str, Any], column: dict[str, Any], row: dict[str, Any] | None = None
    ) -> int:
        """The number of seeds of a cell; a data set may have fewer for an expensive method."""
        name, data = self._data(group, column)
        seeds = self.experiment.seeds or data.get("seeds", {})
        if self.profile not in seeds:
            raise CommandError(
                f"{self.experiment.name}: neither the experiment nor the data set {name!r} has"
                f" seeds for the profile {self.profile}; set e.g. seeds = {{ lite = 3, paper = 5 }}"
            )
        fewer = data.get("seeds_of", {}).get("" if row is None else row["method"])
        return int(seeds[self.profile] if fewer is None else min(fewer, seeds[self.profile]))

    def _reading_label(self, reading: str | None) -> str:
        return self.common["readings"][reading]["label"] if reading else ""

    def _condition(self, column: dict[str, Any], reading: str | None) -> str:
        return ", ".join(part for part in (column["label"], self._reading_label(reading)) if part)


def _canonical(value: Any) -> Any:
    """The value with 1.0 as 1, because files may write either."""
    if isinstance(value, Mapping):
        return {str(key): _canonical(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(inner) for inner in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
