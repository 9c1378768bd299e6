"""From an experiment to runs: their configurations, their order, and the cells that they fill.

Seeds are paired: every row and column of an experiment uses the same list. So a run and its
baseline share initial weights and, if a method draws one batch a step, batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import CommandError
from .evidence import Rules
from .measures import MEASURES
from .planned import (
    CAP,
    Column,
    Ladder,
    Plan,
    PlannedRun,
    config_key,
    seeded,
    with_dependencies,
)
from .spec import CONFIG_KEYS, Experiment, merged

VALIDATION_SHARE = 0.1
RECIPE = "decoupled"  # of a group or column that names none
LOOKS = (5,)  # of a data set that names none

_DP_KEYS = ("epsilon", "sigma", "delta", "accountant", "clip", "decouple", "clipping", "spectral")


def make_plan(experiment: Experiment, rates: Mapping[str, float] | None = None) -> Plan:
    """The runs of an experiment.

    Args:
        experiment: The experiment.
        rates: The chosen learning rates by the names of their ladders; a missing one leaves a
            placeholder.

    Raises:
        CommandError: The experiment's file has a mistake.
    """
    return _Planner(experiment, rates or {}).plan()


def steps_of(config: Mapping[str, Any], size: int) -> int:
    """How many steps a configuration takes on a set of ``size`` records."""
    if "steps" in config:
        return int(config["steps"])
    kept = size * (1.0 - float(config.get("validation", 0.0)))
    if "epochs" not in config:  # the method "auto" chooses
        from ..training.lengths import length

        linear = config.get("model") in ("head", "linear")
        batch, epochs = length(round(kept), config.get("epsilon"), linear)
        return round((epochs or 0.0) * math.ceil(kept / batch))
    return math.ceil(config["epochs"] * max(1, math.ceil(kept / int(config["batch_size"]))))


class _Planner:
    def __init__(self, experiment: Experiment, rates: Mapping[str, float]) -> None:
        self.experiment, self.rates = experiment, rates
        self.common = experiment.common
        self.rows = {row["label"]: row for row in experiment.rows}
        self.by_key: dict[str, PlannedRun] = {}
        self.ladders: dict[str, Ladder] = {}

    def plan(self) -> Plan:
        experiment = self.experiment
        blocks = [
            (group, column, reading, self._condition(column, reading))
            for group in experiment.groups
            for column in experiment.columns
            for reading in column.get("readings", [None])
        ]
        cells: dict[tuple[str, str, str], dict[int, str]] = {}
        places: dict[tuple[str, str, str], dict[str, Any]] = {}
        order: list[PlannedRun] = []
        most = max(self._looks(group, column)[-1] for group, column, _, _ in blocks)
        for seed in range(1, most + 1):  # one seed of all rows before the second of any
            for group, column, reading, condition in blocks:
                if seed > self._looks(group, column)[-1]:
                    continue
                recipe = self._recipe(group, column)
                for row in experiment.rows:
                    fewer = self._data(group, column)[1].get("seeds_of", {})
                    if recipe not in row.get("recipes", [recipe]) or seed > fewer.get(
                        row["method"], seed
                    ):
                        continue
                    run = self._run(group, column, reading, row, seed)
                    place = (group["label"], row["label"], condition)
                    cells.setdefault(place, {})[seed] = run.key
                    places[place] = self._labels(group, column, reading, row)
                    order.append(run)
        plan = Plan(
            experiment=experiment,
            runs=(),
            columns=tuple(self._columns()),
            cells=cells,
            rules={
                (group["label"], condition, measure): self._rules(group, column, measure)
                for group, column, _, condition in blocks
                for measure in column["measures"]
            },
            comparable={
                (group["label"], condition): (
                    not self._data(group, column)[1].get("not_comparable", False)
                )
                for group, column, _, condition in blocks
            },
            ladders=self.ladders,
            by_key=self.by_key,
            places=places,
        )
        return Plan(**{**vars(plan), "runs": tuple(with_dependencies(plan, order))})

    def _columns(self) -> Iterable[Column]:
        """The columns; those of one data set under several recipes share the published cells."""
        position = 0
        published = self.experiment.published_measures
        places: dict[tuple[str, Any, Any], int] = {}
        for column in self.experiment.columns:
            for measure in column["measures"]:
                shared = (measure, column.get("data"), column.get("x"))
                if (published is None or measure in published) and shared not in places:
                    places[shared] = position
                    position += 1
            for reading in column.get("readings", [None]):
                condition = self._condition(column, reading)
                for measure in column["measures"]:
                    place = places.get((measure, column.get("data"), column.get("x")))
                    yield Column(condition, condition, measure, place, column.get("x"))

    def _run(
        self,
        group: dict[str, Any],
        column: dict[str, Any],
        reading: str | None,
        row: dict[str, Any],
        seed: int,
        asked_by: tuple[str, ...] = (),
    ) -> PlannedRun:
        _, data = self._data(group, column)
        config = merged(self._foundation(group, column, reading, row["method"]), row.get("set", {}))
        config = seeded(config, seed, data.get("splits", False))
        if "clipping" in config:  # has its own first C
            config.pop("clip", None)
        rate_name = ""
        if "lr" not in config:
            rate_name = self._ladder(group, column, reading, row.get("rate_of", row["method"]))
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
        config = {key: _given(key, value) for key, value in config.items()}
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
            "group": group["label"],
            "row": row["label"],
            "column": column["label"],
            "reading": reading or "",
            "condition": self._condition(column, reading),
            "data": self._data(group, column)[0],
            "method": row["method"],
            "recipe": self._recipe(group, column),
        }

    def _with_runs(
        self, value: Any, place: tuple[Any, ...], asked_by: tuple[str, ...], after: list[str]
    ) -> Any:
        """Replaces every ``@run:ROW`` in the configuration by ``@run:KEY``."""
        if isinstance(value, dict):
            return {
                key: self._with_runs(inner, place, asked_by, after) for key, inner in value.items()
            }
        if not (isinstance(value, str) and value.startswith("@run:")):
            return value
        group, column, reading, _, seed = place
        label, _, which = value.removeprefix("@run:").partition("@")
        if label not in self.rows or which not in ("", "other-seed"):
            raise CommandError(f"{self.experiment.name}: {value!r} names no row of this experiment")
        if which == "other-seed":  # the one before, so that every look is complete in itself
            if self._looks(group, column)[0] < 2:
                raise CommandError(
                    f"{self.experiment.name}: another seed's run needs at least two seeds"
                )
            seed = seed - 1 or 2
        needed = self._run(group, column, reading, self.rows[label], seed, asked_by)
        after.append(needed.key)
        return f"@run:{needed.key}"

    def _foundation(
        self, group: dict[str, Any], column: dict[str, Any], reading: str | None, method_name: str
    ) -> dict[str, Any]:
        """All settings of a cell but those of its row."""
        name, data = self._data(group, column)
        method = self.common["methods"][method_name]
        config = merged(
            self.common["base"],
            self.common["recipes"][self._recipe(group, column)]["set"],
            data["set"],
            method["set"],
            {"spectral": data.get("spectral", {})} if method.get("spectral") else {},
            group.get("set", {}),
            self.common["readings"][reading]["set"] if reading else {},
            column.get("set", {}),
            group.get("sets", {}).get(column["label"], {}),
        )
        if "steps" in group.get("set", {}):  # instead of the data set's epochs
            config.pop("epochs", None)
        # Train has defaults for these, but an experiment must state what it compares. Of the method
        # "auto" they are a part.
        lengths = () if config.get("method") == "auto" else (("batch_size",), ("epochs", "steps"))
        for keys in (("model",), *lengths):
            if not any(key in config for key in keys):
                raise CommandError(
                    f"{self.experiment.name}: the set of the data set {name!r} has no"
                    f" {' or '.join(keys)}"
                )
        if not method.get("private", True):
            return {key: value for key, value in config.items() if key not in _DP_KEYS}
        return _by_length(config, method, int(data["size"]))

    def _ladder(
        self, group: dict[str, Any], column: dict[str, Any], reading: str | None, method_name: str
    ) -> str:
        """Plans the ladder of this learning rate, and returns its name."""
        _, data = self._data(group, column)
        method, recipe = self.common["methods"][method_name], self._recipe(group, column)
        condition = self._condition(column, reading)
        where = " · ".join(part for part in (group["label"], condition, recipe) if part)
        name = f"{method_name} · {where}"
        if name in self.ladders:
            return name
        rates = data.get("rates", {})
        start = method.get("start", rates.get(method.get("rate", "sgd")))
        if start is None:
            raise CommandError(
                f"{self.experiment.name}: no learning rate to start from for {name}; set rates in"
                " the data set or start in the method"
            )
        config = merged(
            self._foundation(group, column, reading, method_name), {"validation": VALIDATION_SHARE}
        )
        labels = self._labels(group, column, reading, {"label": method_name, "method": method_name})
        follows = data.get("follows", "")
        follows = follows if follows != method_name and method.get("rate") == "sgd" else ""
        self.ladders[name] = Ladder(
            name,
            config,
            {**labels, "experiment": "ladder", "rate": name},
            float(start),
            self._ladder(group, column, reading, follows) if follows else "",
            int(data.get("ladder_seeds", 1)),
            int(data.get("cap", CAP)) if method_name != data.get("follows") else CAP,
            bool(data.get("splits", False)),
        )
        return name

    def _data(self, group: dict[str, Any], column: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        name = str(group.get("data", column.get("data")))
        return name, self.common["data"][name]

    def _recipe(self, group: dict[str, Any], column: dict[str, Any]) -> str:
        return str(column.get("recipe", group.get("recipe", RECIPE)))

    def _looks(self, group: dict[str, Any], column: dict[str, Any]) -> tuple[int, ...]:
        return tuple(self.experiment.looks or self._data(group, column)[1].get("looks", LOOKS))

    def _rules(self, group: dict[str, Any], column: dict[str, Any], measure: str) -> Rules:
        data = self._data(group, column)[1]
        effect = float(data.get("effects", {}).get(measure, 0.0))
        overlap, step = float(data.get("overlap", 0.0)), MEASURES[measure].step
        return Rules(self._looks(group, column), effect, overlap, step)

    def _condition(self, column: dict[str, Any], reading: str | None) -> str:
        told = self.common["readings"][reading]["label"] if reading else ""
        return ", ".join(part for part in (column["label"], told) if part)


def _given(key: str, value: Any) -> Any:
    """A setting; "none" is train's own choice, but for features, where it is a value."""
    return None if value == "none" and key != "features" else value


def _by_length(config: dict[str, Any], method: Mapping[str, Any], size: int) -> dict[str, Any]:
    """What a method's settings owe to the length of the run.

    ``work``: the share of the steps that it gets. ``noise_falls``: the factor on its noise over the
    whole run. ``average``: the share of the run that its average of weights looks back.
    """
    if not {"work", "noise_falls", "average"} & set(method):
        return config
    config = dict(config)
    for key in ("epochs", "steps"):
        if "work" in method and key in config:
            config[key] = config[key] * method["work"]
    size = int(config.get("skew_size", size))
    steps = steps_of(config, size)
    if "noise_falls" in method:
        epochs = config.get("epochs") or steps / math.ceil(size / int(config["batch_size"]))
        ratio = float(method["noise_falls"]) ** (1 / max(1, epochs))
        options = config.get("method_options", {})
        config["method_options"] = {**options, "ratio": float(f"{ratio:.4g}")}
    if "average" in method:
        config["weight_average"] = float(f"{max(0.0, 1 - 1 / (method['average'] * steps)):.4g}")
    return config
