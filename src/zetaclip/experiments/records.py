"""A record of every finished run, in one file that outlives the folders: ``OUT/records.jsonl``.

A run folder contains weights and thousands of ledger rows, and often stays on the machine that made
it. Its record contains what tables, plots and estimates read: the configuration, ``result.json``
without the bins of its calibration curve, and the epochs and probes of its series. So tables can be
made again, and extended by a seed, from the records alone.

A record is written once its folder has been verified. It can't be verified again, but it contains
the digests of the files. The seal of a line reveals an accidental edit. It does not stop a forger,
who would compute a new one.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import CommandError
from .files import write_text
from .measures import Run
from .planned import PlannedRun, config_key

FILE = "records.jsonl"

# The fields of these files that a series or a measure may read.
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
_LEFT_OUT = ("reliability", "evaluation")


def read(out: Path) -> dict[str, Run]:
    """The recorded runs, by key.

    Raises:
        CommandError: A line was changed after it was written; it can't be made again here.
    """
    return {key: _run(line) for key, line in _sound(out / FILE)}


def write(out: Path, runs: Iterable[tuple[PlannedRun, Run]]) -> None:
    """Adds runs whose folders are here, and replaces their older records.

    Lines are ordered by key.
    """
    old = dict(_sound(out / FILE))
    new = old | {planned.key: _line(planned, run) for planned, run in runs}
    if new != old:
        write_text(out / FILE, "".join(f"{new[key]}\n" for key in sorted(new)))


def _sound(path: Path) -> Iterator[tuple[str, str]]:
    """Key and text of each record."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        key, whole = _checked(line)
        if not whole:
            raise CommandError(
                f"{path}, line {number}{f' (run {key})' if key else ''}: not as it was written."
                " Restore the file's last good copy, or delete the line; that run is then repeated"
            )
        yield key, line


@functools.cache  # the file is read again for every run that is added
def _checked(line: str) -> tuple[str, bool]:
    """The key of a record, and whether it is as it was written."""
    try:
        record = json.loads(line)
        key, whole = str(record["run"]), record["seal"] == _seal(record)
        whole &= config_key(record["config"], record["alone"]) == key
        whole &= {"result", "lines"} <= set(record)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", False
    return key, whole


def _run(line: str) -> Run:
    record = json.loads(line)
    return Run(None, record["result"], record["config"], record["lines"])


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
    """The lines that measured something, and the first and the last, which give the time."""
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
