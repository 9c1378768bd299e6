"""How long will it take? From finished runs where there are some, else from twenty steps of one,
else from records of other machines.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import read_cache, read_json, write_json
from .measures import Run
from .plan import PlannedRun
from .runner import environment_of, train_command
from .store import Store

_STEPS = 20
_MEASURED = f"{_STEPS} measured steps"
_MOST_SECONDS = 600
_FILE = "speeds.json"


@dataclass(frozen=True)
class Speed:
    """Seconds before the first step, per step, and where the numbers come from."""

    setup: float
    step: float
    source: str


def steps_of(config: Mapping[str, Any], size: int) -> int:
    """How many steps a configuration takes on a set of ``size`` records."""
    if "steps" in config:
        return int(config["steps"])
    kept = size * (1.0 - float(config.get("validation", 0.0)))
    return int(config["epochs"]) * max(1, math.ceil(kept / int(config["batch_size"])))


def known_speeds(store: Store) -> dict[tuple[str, str, str], Speed]:
    """Speeds by data, network and method: of what has finished in this folder, else measured for
    it, else of records of other machines.
    """
    here = {}
    for folder in sorted((store.out / "runs").glob("*")):
        with suppress(OSError, ValueError):
            here[folder.name] = (Run.read(folder).result, read_json(folder / "config.json"))
    elsewhere = [(run.result, run.config) for key, run in store.records.items() if key not in here]
    finished = _medians(here.values(), "finished runs")
    return _medians(elsewhere, "recorded runs") | _remembered(store) | finished


def _medians(
    runs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]], source: str
) -> dict[tuple[str, str, str], Speed]:
    """Speeds out of results and their configurations."""
    found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for result, config in runs:
        # One that says too little about itself only makes the estimate coarser.
        with suppress(KeyError, TypeError, ValueError, ZeroDivisionError):
            seconds = result["seconds"]
            setup = float(seconds.get("setup") or 0.0)
            step = (float(seconds["total"]) - setup) / int(result["steps"])
            place = (str(config["data"]), str(config["model"]), str(config["method"]))
            found.setdefault(place, []).append((setup, step))
    return {
        place: Speed(
            statistics.median([a for a, _ in pairs]),
            statistics.median([b for _, b in pairs]),
            source,
        )
        for place, pairs in found.items()
    }


def remember(store: Store, speeds: Mapping[tuple[str, str, str], Speed]) -> None:
    """Keeps what was measured, so that a table can tell the time of runs of which none has
    finished.
    """
    measured = {
        "/".join(place): [one.setup, one.step]
        for place, one in speeds.items()
        if one.source == _MEASURED
    }
    if measured and store.out.exists():
        write_json(store.out / _FILE, measured)


def _remembered(store: Store) -> dict[tuple[str, str, str], Speed]:
    found = {}
    for name, pair in read_cache(store.out / _FILE).items():
        with suppress(ValueError, TypeError):  # edited by hand: it is measured again
            data, model, method = name.rsplit("/", 2)
            setup, step = map(float, pair)
            found[data, model, method] = Speed(setup, step, _MEASURED)
    return found


def measure(run: PlannedRun, threads: int) -> Speed | None:
    """Twenty steps of this run in a temporary folder, on as many threads as a worker has; None if
    they can't be run.
    """
    config = {
        key: value for key, value in run.config.items() if key not in ("epochs", "validation")
    }
    # What a clip schedule costs is nothing; the run whose C it follows need not exist yet.
    config.pop("clipping", None)
    rate = run.config["lr"]
    config |= {"steps": _STEPS, "lr": rate if isinstance(rate, float) else 0.1}
    with tempfile.TemporaryDirectory(prefix="zetaclip-estimate-") as folder:
        file, out = Path(folder) / "config.json", Path(folder) / "run"
        write_json(file, config)
        words = train_command(str(file), str(out), False)
        try:
            ended = subprocess.run(
                words,
                capture_output=True,
                timeout=_MOST_SECONDS,
                check=False,
                env=environment_of(threads),
            )
        except subprocess.TimeoutExpired:
            return None
        if ended.returncode != 0 or not (out / "result.json").exists():
            return None
        seconds = Run.read(out).result["seconds"]
    train = float(seconds["train"])
    return Speed(max(0.0, float(seconds["total"]) - train), train / _STEPS, _MEASURED)


def estimate(
    runs: Sequence[PlannedRun],
    sizes: Mapping[str, int],
    costs: Mapping[str, float],
    speeds: dict[tuple[str, str, str], Speed],
    threads: int | None = None,
) -> tuple[float | None, set[str]]:
    """Seconds of one worker for these runs, and the sources of the figure; None if nothing is known
    about a data set.

    ``costs`` are the steps of a method in units of DP-SGD's, for methods that nothing is known
    about yet. With ``threads``, what is not known at all is measured, on so many.
    """
    total = 0.0
    sources: set[str] = set()
    for run in runs:
        config = run.config
        place = (str(config["data"]), str(config["model"]), str(config["method"]))
        speed = speeds.get(place) or _near(place, speeds, costs)
        if speed is None and threads is not None:
            speed = measure(run, threads)
            if speed is not None:
                speeds[place] = speed
        if speed is None:
            return None, sources
        total += speed.setup + speed.step * steps_of(config, sizes[run.labels["data"]])
        sources.add(speed.source)
    return total, sources


def _near(
    place: tuple[str, str, str],
    speeds: Mapping[tuple[str, str, str], Speed],
    costs: Mapping[str, float],
) -> Speed | None:
    """The same data and network with another method, at the ratio of their costs."""
    for (data, model, method), speed in speeds.items():
        if (data, model) == place[:2]:
            ratio = costs.get(place[2], 1.0) / costs.get(method, 1.0)
            return Speed(speed.setup, speed.step * ratio, speed.source)
    return None
