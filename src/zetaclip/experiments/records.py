"""What every finished run came to, in one file that outlives the run folders:
``OUT/records.jsonl``.

A run folder holds weights and thousands of ledger rows, and often stays on the machine that made
it. Its record holds what tables, plots and estimates read: the configuration, ``result.json``
without the bins of its calibration curve, and the epochs and probes of its series. So tables can be
made again, and grow by a seed, where only the records are.

A record is written once its folder has been verified. It can't be verified again: it tells the
digests of the files that could. A line's seal tells an edit by accident, not a forger, who would
make a new one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import CommandError
from .files import write_text
from .measures import Run
from .plan import PlannedRun, config_key

FILE = "records.jsonl"

# Of each line of these files, what a series or a measure may ask for.
_LINES = {
    "metrics.jsonl": (
        "epoch",
        "step",
        "epsilon",
        "accuracy",
        "ece",
        "auc",
        "rmse",
        "loss",
        "clip",
        "zeta",
        "seconds",
    ),
    "probes.jsonl": ("probe", "step", "clip", "smoothed", "zeta"),
}
_LEFT_OUT = ("reliability",)


def read(out: Path) -> dict[str, Run]:
    """The recorded runs, by key.

    A line that is not as it was written is an error: what it told can't be made again here.
    """
    return {key: run for key, _, run in _parsed(out / FILE)}


def write(out: Path, runs: Iterable[tuple[PlannedRun, Run]]) -> None:
    """Adds runs whose folders are here, and replaces older records of theirs.

    Lines stand in the order of their keys.
    """
    old = {key: line for key, line, _ in _parsed(out / FILE)}
    new = old | {planned.key: _line(planned, run) for planned, run in runs}
    if new != old:
        write_text(out / FILE, "".join(f"{new[key]}\n" for key in sorted(new)))


def _parsed(path: Path) -> Iterator[tuple[str, str, Run]]:
    """Key, line and run."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            key, whole = str(record["run"]), record["seal"] == _seal(record)
            whole &= config_key(record["config"], record["alone"]) == key
            run = Run(None, record["result"], record["config"], record["lines"])
        except (ValueError, KeyError, TypeError, AttributeError):
            key, whole = "", False
        if not whole:
            raise CommandError(
                f"{path}, line {number}{f' (run {key})' if key else ''}: not as it was written."
                " Bring back the file's last good copy, or delete the line; that run is then run"
                " again"
            )
        yield key, line, run


def _line(planned: PlannedRun, run: Run) -> str:
    record = {
        "run": planned.key,
        "config": planned.config,
        "alone": planned.alone,
        "result": {name: value for name, value in run.result.items() if name not in _LEFT_OUT},
        "lines": {name: _slim(run.lines(name), keys) for name, keys in _LINES.items()},
    }
    return json.dumps({**record, "seal": _seal(record)}, ensure_ascii=False, separators=(",", ":"))


def _slim(lines: list[dict[str, Any]], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """The first and the last line, which tell the time between them, and those that measured
    something.
    """
    last = len(lines) - 1
    told = [
        line
        for place, line in enumerate(lines)
        if place in (0, last) or line.get("metric", True) is not None
    ]
    return [{key: line[key] for key in keys if line.get(key) is not None} for line in told]


def _seal(record: Mapping[str, Any]) -> str:
    content = {name: value for name, value in record.items() if name != "seal"}
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
