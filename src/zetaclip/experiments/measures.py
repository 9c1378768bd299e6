"""From a finished run folder to one number of a table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """What a finished run left: a folder, or a record of a folder that is elsewhere.

    Args:
        folder: The run folder; None for a record (see ``records.py``).
        result: The content of result.json.
        config: The configuration; only of a record.
        recorded: The lines of its files; only of a record.
    """

    folder: Path | None
    result: dict[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    recorded: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Run:
        """The run of a finished run folder."""
        return cls(folder, json.loads((folder / "result.json").read_text(encoding="utf-8")))

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` or ``probes.jsonl``; none if there is no such file."""
        if self.folder is None:
            return list(self.recorded.get(name, []))
        path = self.folder / name
        if not path.exists():
            return []
        return [
            json.loads(line)
            for line in path.read_text(encoding="utf-8").splitlines()
            if line.strip()
        ]


@dataclass(frozen=True)
class Measure:
    """A number of a run, for a column.

    Args:
        read: Reads it; None if the run has none.
        label: The heading.
        good: +1 if higher is better, -1 if lower is, 0 if neither.
        digits: Decimals to show.
        relative: Whether it is in per cent relative to the baseline's run of the same seed. A
            difference from the baseline then says nothing new.
        of_the_machine: Whether it depends on the machine, so that the paper's gain can't be tested.
        metric: The entry of the result's metrics that is read. Other numbers may be missing for
            other reasons than divergence.
        step: What it comes in: a share of 10,000 test records, the largest test sets here. 0: it
            is no such share.
    """

    read: Callable[[Run], float | None]
    label: str
    good: int = 0
    digits: int = 2
    relative: bool = False
    of_the_machine: bool = False
    metric: str = ""
    step: float = 0.0


def diverged(run: Run, measure: Measure) -> bool:
    """Whether a finished run was evaluated but has no finite number."""
    if _main(run) is None:
        return True
    return measure.metric in run.result.get("metrics", {}) and measure.read(run) is None


def _metric(name: str, scale: float = 1.0) -> Callable[[Run], float | None]:
    return lambda run: _number(run.result.get("metrics", {}).get(name), scale)


def _clip(name: str) -> Callable[[Run], float | None]:
    return lambda run: _number((run.result.get("clip") or {}).get(name))


def _main(run: Run) -> float | None:
    metric = run.result.get("metric") or {}
    return _number(metric.get("value"), 100.0 if metric.get("name") == "accuracy" else 1.0)


def _timed(*parts: str) -> Callable[[Run], float | None]:
    def read(run: Run) -> float | None:
        # An epoch's line has the seconds since the start; the paper leaves the first epoch out.
        epochs = run.lines("metrics.jsonl")
        if len(epochs) < 2:
            return None
        first, last = epochs[0]["seconds"], epochs[-1]["seconds"]
        return sum(float(last[part]) - float(first[part]) for part in parts)

    return read


# The paper counts probing as training; the run folder does not.
_TRAIN = ("train", "probe")


def _probe_share(run: Run) -> float | None:
    train, probe = _timed(*_TRAIN)(run), _timed("probe")(run)
    return None if not train or probe is None else 100.0 * probe / train


def _in_zone(run: Run) -> float | None:
    return _number((run.result.get("probes") or {}).get("in_zone_share"), 100.0)


def _number(value: Any, scale: float = 1.0) -> float | None:
    return None if value is None or not math.isfinite(value) else scale * float(value)


MEASURES: dict[str, Measure] = {
    "metric": Measure(_main, "metric", good=1, digits=3),
    "accuracy": Measure(
        _metric("accuracy", 100.0), "accuracy, %", good=1, metric="accuracy", step=0.01
    ),
    "ece": Measure(_metric("ece", 100.0), "ECE, %", good=-1, metric="ece"),
    "auc": Measure(_metric("auc"), "AUC", good=1, digits=3, metric="auc"),
    "rmse": Measure(_metric("rmse"), "RMSE", good=-1, digits=3, metric="rmse"),
    "clip_mean": Measure(_clip("mean"), "mean C"),
    "clip_median": Measure(_clip("median"), "median C"),
    "clip_final": Measure(_clip("final"), "last C"),
    "clip_min": Measure(_clip("min"), "least C"),
    "clip_max": Measure(_clip("max"), "largest C"),
    "hits_min": Measure(_clip("hits_min"), "hits at C_min", digits=1),
    "hits_max": Measure(_clip("hits_max"), "hits at C_max", digits=1),
    "in_zone": Measure(_in_zone, "probes in the zone, %", digits=1),
    "time_total": Measure(_timed(*_TRAIN, "eval"), "total time, s", -1, of_the_machine=True),
    "time_train": Measure(_timed(*_TRAIN), "training time, s", -1, of_the_machine=True),
    "time_eval": Measure(_timed("eval"), "evaluation time, s", -1, of_the_machine=True),
    "overhead": Measure(_timed(*_TRAIN, "eval"), "overhead, %", digits=2, relative=True),
    "probe_share": Measure(_probe_share, "probes in training time, %", digits=3),
}
