"""How long runs will take: from finished runs, else from twenty steps, else from other machines."""

from __future__ import annotations

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
from .plan import steps_of
from .planned import PlannedRun
from .runner import environment_of, train_command
from .store import Store

_STEPS = 20
_MEASURED = f"{_STEPS} measured steps"
_MOST_SECONDS = 600
_LOADING = 3.0  # seconds before the first step of a run whose features are there
_FILE = "speeds.json"


@dataclass(frozen=True)
class Speed:
    """How fast a run is.

    Args:
        setup: Seconds before the first step.
        step: Seconds per step.
        source: Where the numbers come from.
    """

    setup: float
    step: float
    source: str


def known_speeds(store: Store) -> dict[tuple[str, str, str], Speed]:
    """Speeds by data, network and method.

    They come from runs finished in this folder, else from measured steps, else from records of
    other machines.
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
    """Speeds from results and their configurations."""
    found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for result, config in runs:
        # A run with missing values only makes the estimate coarser.
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
    """Saves measured speeds, so that a table can state times before any run has finished."""
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
    """Runs twenty steps in a temporary folder, with as many threads as a worker has.

    Returns:
        The speed, or None if the steps can't be run.
    """
    config = {
        key: value for key, value in run.config.items() if key not in ("epochs", "validation")
    }
    # A clip schedule costs nothing, and the run that it follows may not exist yet.
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
    """The time of one worker for these runs.

    Args:
        runs: The runs.
        sizes: Records by data set.
        costs: The cost of a method's step relative to DP-SGD's, for methods without a speed.
        speeds: Known speeds; measured ones are added.
        threads: Measure what is unknown with so many threads; None measures nothing.

    Returns:
        Seconds and the sources of the figure; None if nothing is known about a data set.
    """
    total = 0.0
    sources: set[str] = set()
    featured: set[str] = set()
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
        # A session computes fixed features once; twenty measured steps had to wait for them.
        kind = config.get("features") or "none"
        made = f"{place[0]} {kind} {config.get('features_options')} {config.get('data_options')}"
        again = speed.source == _MEASURED and made in featured
        total += min(speed.setup, _LOADING) if again else speed.setup
        if kind != "none":
            featured.add(made)
        total += speed.step * steps_of(config, sizes[run.labels["data"]])
        sources.add(speed.source)
    return total, sources


def _near(
    place: tuple[str, str, str],
    speeds: Mapping[tuple[str, str, str], Speed],
    costs: Mapping[str, float],
) -> Speed | None:
    """The speed of another method on the same data and network, scaled by the costs."""
    for (data, model, method), speed in speeds.items():
        if (data, model) == place[:2]:
            ratio = costs.get(place[2], 1.0) / costs.get(method, 1.0)
            return Speed(speed.setup, speed.step * ratio, speed.source)
    return None
