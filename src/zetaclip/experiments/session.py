"""One call of `zetaclip reproduce`, from request to tables."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CommandError
from ..words import counted
from . import estimate, index, ladder, looks, plots, results, series, tables
from .files import write_json, write_text
from .measures import Run
from .missing import parts
from .needs import missing_data
from .outcome import Outcome
from .plan import make_plan
from .planned import Plan, PlannedRun, ladder_of, with_dependencies
from .progress import Progress, duration
from .runner import TRAIN_VARIABLE, Backend, LocalBackend, cores, run_all
from .spec import OUT, Experiment
from .store import Store

_ONLY = ("method", "data", "seed", "row", "group", "reading", "recipe", "condition")


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    experiment: Experiment
    out: str
    only: dict[str, list[str]] = field(default_factory=dict)
    workers: int | None = None
    ray: str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise CommandError(f"--workers must be at least 1, not {self.workers}")

    @property
    def shared_out(self) -> tuple[int, int]:
        """Workers, and the threads of each. What is timed runs alone.

        ``OMP_NUM_THREADS`` is a limit: on a shared machine threads that wait for each other cost
        many times the work.
        """
        workers = 1 if self.experiment.exclusive else self.workers or cores()
        told = os.environ.get("OMP_NUM_THREADS", "")
        most = int(told) if told.isdecimal() and int(told) > 0 else cores()
        return workers, max(1, min(most, cores() // workers))


def parse_only(text: str | None, known: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Reads ``method=dp-sgd,ww-dp-sgd,seed=1``.

    What follows a comma is one more value of the same key, unless it names another key.

    Labels may hold commas and equal signs of their own, so the longest of the ``known`` ones is
    taken before a comma ends a value.
    """
    chosen: dict[str, list[str]] = {}
    key, rest = "", (text or "").strip(" ,")
    while rest:
        before, equals, after = rest.partition("=")
        if equals and before.strip() in _ONLY:
            key, rest = before.strip(), after.lstrip()
        elif not key:
            raise CommandError(
                f"--only takes KEY=VALUE with one of {', '.join(_ONLY)}, not {rest!r}"
            )
        labels = [label for label in known.get(key, ()) if f"{rest},".startswith(f"{label},")]
        value = max(labels, key=len, default=rest.partition(",")[0])
        chosen.setdefault(key, []).append(value.strip())
        rest = rest[len(value) :].lstrip(" ,")
    return chosen


def known_labels(experiment: Experiment) -> dict[str, set[str]]:
    """What ``--only`` may name, by key."""
    places = [labels for found in _places(make_plan(experiment)).values() for labels in found]
    return {key: {str(labels[key]) for labels in places} for key in _ONLY}


def _places(plan: Plan) -> dict[str, list[dict[str, Any]]]:
    """run -> the labels of every place that it fills."""
    places: dict[str, list[dict[str, Any]]] = {}
    for place, seeds in plan.cells.items():
        for seed, key in seeds.items():
            places.setdefault(key, []).append({**plan.places[place], "seed": seed})
    return places


def select(plan: Plan, only: Mapping[str, Sequence[str]]) -> list[PlannedRun]:
    """The runs that a filter names, without what they need."""
    places = _places(plan)
    for key, values in only.items():
        known = {str(labels[key]) for found in places.values() for labels in found}
        for value in values:
            if value not in known:
                raise CommandError(
                    f"--only {key}={value} matches nothing; there are: {', '.join(sorted(known))}"
                )
    wanted = [
        run
        for run in plan.runs
        if any(
            all(str(labels[key]) in values for key, values in only.items())
            for labels in places.get(run.key, [])
        )
    ]
    if not wanted:
        raise CommandError("--only leaves nothing to run")
    return wanted


def command_line(request: Request) -> str:
    """The command that runs this experiment whole.

    Of an absolute path the last part: a page is no place for the rest.
    """
    words = ["zetaclip", "reproduce", request.experiment.given]
    out = Path(request.out)
    where = out.name if out.is_absolute() else request.out
    return shlex.join(words + ([] if Path(where) == Path(OUT) else ["--out", where]))


def reproduce(request: Request) -> tuple[str, int]:
    """Climbs ladders of learning rates, runs look by look, and writes tables.

    Returns what to print and how much of it failed or was left out.
    """
    from ..features import shared

    store = open_store(request.out)
    with store.lock(), shared(store.out / "private"):
        backend, threads = _backend(request)
        failures: dict[str, str] = {}
        try:
            while True:
                stand, skipped = _stand(request, store, failures)
                if all(run.key in failures for run in store.unfinished(stand.runs)):
                    break
                progress = Progress(title=stand.title)
                outcomes = run_all(stand.runs, store, backend, threads, progress)
                failed = _failures(stand.by_key, outcomes)
                store.keep_failures(failed, over=outcomes)
                failures |= failed
        finally:
            backend.close()
        text = _write(request, store, {**failures, **stand.left_out}, skipped)
    return text, len(failures) + len(stand.left_out)


def tables_only(request: Request) -> str:
    """Tables and plots of what is there."""
    store = open_store(request.out)
    with store.lock():
        return _write(request, store, {}, [])


def dry_run(request: Request) -> str:
    """The runs that are missing and how long they may take.

    Ladders count with the fewest rates that they need, rows with the looks that are certain. Only
    measured speeds are written, into a folder that exists.
    """
    store = open_store(request.out, create=False)
    plan, climbs = plan_of(request.experiment, store)
    wanted, skipped = _wanted(request, plan, store)
    rungs = _rungs(plan, climbs, {ladder_of(run) for run in with_dependencies(plan, wanted)})
    needed = [*rungs, *with_dependencies(plan, wanted)]
    todo = store.unfinished(needed)
    lines = [f"{run.key}  {run.describe()}" for run in todo]
    keys = {run.key for run in rungs}
    lines.append(
        f"at least {counted(len(todo), 'run')} to do ({sum(run.key in keys for run in todo)} of"
        f" them for learning rates), {len(needed) - len(todo)} done"
    )
    lines += skipped
    workers, threads = request.shared_out
    seconds, sources = _clock(request.experiment, store, threads)(todo)
    if todo and seconds is None:
        lines.append("no estimate of time: twenty steps of a run could not be measured")
    elif todo and seconds is not None:
        lines.append(
            f"about {duration(seconds / workers)} with {workers} "
            f"worker{'s' if workers > 1 else ''}, from {' and '.join(sorted(sources))}"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Stand:
    """What can be run now.

    Args:
        title: What it is, for the progress bar.
        runs: The runs, each after what it needs.
        by_key: All runs that may be named.
        left_out: What can't be run, because a ladder came to nothing.
    """

    title: str
    runs: list[PlannedRun]
    by_key: dict[str, PlannedRun]
    left_out: dict[str, str]


def _stand(request: Request, store: Store, failures: Mapping[str, str]) -> tuple[Stand, list[str]]:
    """First the rungs that ladders ask for; then the runs of the looks that are open."""
    plan, climbs = plan_of(request.experiment, store)
    wanted, skipped = _wanted(request, plan, store)
    names = {ladder_of(run) for run in with_dependencies(plan, wanted)} - {""}
    names |= {plan.ladders[name].follows for name in names} - {""}
    rungs = _rungs(plan, climbs, names)
    name = request.experiment.name
    if any(run.key not in failures for run in rungs):
        by_key = {run.key: run for run in rungs}
        return Stand(f"{name}, learning rates", rungs, by_key, {}), skipped
    ready, left_out = _ready(plan, wanted, climbs)
    return Stand(name, ready, plan.by_key, left_out), skipped


def plan_of(experiment: Experiment, store: Store) -> tuple[Plan, dict[str, ladder.Climb]]:
    """The plan with the learning rates that its ladders have chosen so far."""
    cache: dict[str, Run | None] = {}

    def result(run: PlannedRun) -> Run | None:
        if run.key not in cache:
            cache[run.key] = store.run(run)
        return cache[run.key]

    ladders = make_plan(experiment).ladders
    climbs = ladder.climb_all(ladders, ladders, result)
    rates = {name: found.rate for name, found in climbs.items() if found.rate is not None}
    return make_plan(experiment, rates), climbs


def _rungs(
    plan: Plan, climbs: Mapping[str, ladder.Climb], names: Iterable[str]
) -> list[PlannedRun]:
    """The runs that ladders ask for next."""
    found: dict[str, PlannedRun] = {}
    for name in plan.ladders:
        if name in names:
            for rate in climbs[name].wanted:
                found |= {run.key: run for run in plan.ladders[name].runs(rate)}
    return list(found.values())


def open_store(out: str, create: bool = True) -> Store:
    """The results folder; with a stand-in trainer nothing can be verified."""
    stand_in = bool(os.environ.get(TRAIN_VARIABLE))
    return Store.open(out, verify=(lambda folder: []) if stand_in else None, create=create)


def _backend(request: Request) -> tuple[Backend, int]:
    workers, threads = request.shared_out
    if request.ray is None:
        return LocalBackend(workers), threads
    from .ray_backend import RayBackend

    alone = request.experiment.exclusive
    return RayBackend(
        request.ray, threads if alone else 1, 1 if alone else request.workers
    ), threads if alone else 1


def _wanted(request: Request, plan: Plan, store: Store) -> tuple[list[PlannedRun], list[str]]:
    """The runs that are asked for and whose data are here, and what is skipped."""
    open_ones = {run.key for run in looks.needed(plan, results.collect(plan, store))}
    chosen = select(plan, request.only)
    missing = missing_data(chosen)
    if missing and (request.strict or len(missing) == len({run.config["data"] for run in chosen})):
        raise CommandError("; ".join(missing.values()))
    wanted = [run for run in chosen if run.key in open_ones and run.config["data"] not in missing]
    return wanted, list(missing.values())


def _ready(
    plan: Plan, wanted: Sequence[PlannedRun], climbs: Mapping[str, ladder.Climb]
) -> tuple[list[PlannedRun], dict[str, str]]:
    """The wanted runs with all that they need; and those that have no learning rate."""
    ready, left_out = [], {}
    for run in wanted:
        needed = [
            one for one in with_dependencies(plan, [run]) if "@tuned:" in str(one.config["lr"])
        ]
        if needed:
            name = ladder_of(needed[0])
            why = "not all of its runs have a result" if climbs[name].wanted else "all diverged"
            left_out[name] = f"left out: {name}: no learning rate, {why}"
        else:
            ready.append(run)
    return with_dependencies(plan, ready), left_out


def _failures(runs: Mapping[str, PlannedRun], outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    return {
        key: f"{outcome.state}: {runs[key].describe()}: {outcome.message}"
        for key, outcome in outcomes.items()
        if outcome.state in ("failed", "blocked")
    }


def _untrusted(store: Store, left: Sequence[PlannedRun]) -> list[str]:
    """Finished runs that the tables leave out, and why.

    Without a line they would look as if they had never been run.
    """
    return [
        f"not used: {run.describe()}: {'; '.join(store.problems(run))}"
        for run in left
        if store.finished(run.key)
    ]


def _failed_before(store: Store, left: Sequence[PlannedRun]) -> list[str]:
    """Runs that failed when they were last tried.

    Without a line they would look as if they had never been run.
    """
    kept = store.failures()
    return [
        f"when last tried, {kept[run.key]}"
        for run in left
        if run.key in kept and not store.finished(run.key)
    ]


def _clock(
    experiment: Experiment, store: Store, threads: int | None = None
) -> Callable[[Sequence[PlannedRun]], tuple[float | None, set[str]]]:
    """The seconds of one worker for some runs, and where the figure comes from.

    What is not known is measured with ``threads``.
    """
    costs = {
        str(method["set"]["method"]): float(method.get("cost", 1.0))
        for method in experiment.common["methods"].values()
    }
    speeds = estimate.known_speeds(store)

    def clock(runs: Sequence[PlannedRun]) -> tuple[float | None, set[str]]:
        found = estimate.estimate(runs, _sizes(experiment), costs, speeds, threads)
        if threads is not None:
            estimate.remember(store, speeds)
        return found

    return clock


def _sizes(experiment: Experiment) -> dict[str, int]:
    """Training records by data set."""
    return {name: int(data["size"]) for name, data in experiment.common["data"].items()}


def _write(
    request: Request, store: Store, failures: Mapping[str, str], skipped: Sequence[str]
) -> str:
    """All that an experiment leaves in its folder; returns what to print."""
    plan, climbs = plan_of(request.experiment, store)
    folder = store.out / plan.experiment.name
    runs = results.collect(plan, store)
    needed = looks.needed(plan, runs)
    store.record([*plan.runs, *_climbed(plan, climbs)])
    left = [run for run in needed if run.key not in runs]
    others = [run for run in left if run.key not in failures]
    told = [*failures.values(), *_untrusted(store, others), *_failed_before(store, others)]
    clock = _clock(plan.experiment, store)
    missing = parts(plan, needed, left, climbs, command_line(request), lambda some: clock(some)[0])
    table = results.table(plan, runs, command_line(request), len(needed), missing)
    table["ladders"] = {name: climbs[name].told() for name in plan.ladders if climbs[name].rates}
    pictures: list[str] = []
    note = ""
    try:
        pictures = plots.draw(plan, table, runs, folder)
    except ImportError:
        note = "\nno plots: they need matplotlib (pip install 'zetaclip[report]')"
    write_json(folder / "table.json", table)
    write_text(folder / "runs.csv", results.csv_text(plan, runs, {run.key for run in needed}))
    for spec in plan.experiment.series:
        found = series.points(plan, runs, spec)
        if found:
            write_text(folder / f"{spec['name']}.csv", series.csv_text(found, spec))
            write_text(folder / f"{spec['name']}.md", series.markdown(plan, found, spec))
    page = tables.markdown(plan, table, failures=told, skipped=skipped, pictures=pictures)
    write_text(folder / "table.md", page)
    index.write(store)
    done = len(needed) - len(left)
    report = f"{done} of {len(needed)} runs; table, CSV and plots in {folder}{note}"
    if told:
        report += f"\n{len(told)} failed or left out:\n  " + "\n  ".join(told)
    return "\n".join([report, *skipped])


def _climbed(plan: Plan, climbs: Mapping[str, ladder.Climb]) -> list[PlannedRun]:
    """The runs of all rates that ladders have tried."""
    return [
        run
        for name, found in climbs.items()
        for rate in found.rates
        for run in plan.ladders[name].runs(rate)
    ]
