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
from . import estimate, index, plots, results, series, tables, tuning
from .files import write_json, write_text
from .missing import parts
from .needs import missing_data
from .outcome import Outcome
from .plan import Plan, PlannedRun, make_plan, tuning_of, with_dependencies
from .progress import Progress, duration
from .runner import TRAIN_VARIABLE, Backend, LocalBackend, cores, run_all
from .spec import OUT, Experiment, folder_of
from .store import Store

_ONLY = ("method", "data", "seed", "row", "group", "reading", "recipe", "condition")


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    experiment: Experiment
    profile: str
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
        """Workers, and the threads of each. What is timed runs alone."""
        workers = 1 if self.experiment.exclusive else self.workers or cores()
        return workers, max(1, cores() // workers)


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


def known_labels(experiment: Experiment, profile: str) -> dict[str, set[str]]:
    """What ``--only`` may name, by key."""
    places = [
        labels for found in _places(make_plan(experiment, profile)).values() for labels in found
    ]
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
    words = ["zetaclip", "reproduce", request.experiment.given, "--profile", request.profile]
    out = Path(request.out)
    where = out.name if out.is_absolute() else request.out
    return shlex.join(words + ([] if Path(where) == Path(OUT) else ["--out", where]))


def reproduce(request: Request) -> tuple[str, int]:
    """Tunes, runs and writes tables.

    Returns what to print and how much of it failed or was left out.
    """
    from ..features import shared

    store = open_store(request.out)
    with store.lock(), shared(store.out / "private"):
        backend, threads = _backend(request)
        failures: dict[str, str] = {}
        try:
            plan, wanted, skipped = _prepare(request, store)
            failures |= _tune(request, store, backend, threads, plan, wanted)
            plan, wanted, skipped = _prepare(request, store)
            ready, left_out = _ready(plan, wanted)
            outcomes = run_all(
                ready, store, backend, threads, Progress(title=request.experiment.name)
            )
            failed = _failures(plan.by_key, outcomes)
            store.keep_failures(failed, over=outcomes)
            failures |= failed | left_out
        finally:
            backend.close()
        text = _write(request, store, plan, failures, skipped)
    return text, len(failures)


def tables_only(request: Request) -> str:
    """Tables and plots of what is there."""
    store = open_store(request.out)
    with store.lock():
        return _write(request, store, _plan(request, store), {}, [])


def dry_run(request: Request) -> str:
    """The runs that are missing and how long they may take.

    Only measured speeds are written, into a folder that exists.
    """
    store = open_store(request.out, create=False)
    plan, wanted, skipped = _prepare(request, store)
    rates = tuning.load_rates(store)
    names = {tuning_of(run) for run in with_dependencies(plan, wanted)}
    grids = [run for grid in tuning.open_tunings(plan.tunings, names, rates) for run in grid.runs]
    needed = [*grids, *with_dependencies(plan, wanted)]
    todo = store.unfinished(needed)
    lines = [f"{run.key}  {run.describe()}" for run in todo]
    rates_left = sum(run in grids for run in todo)
    lines.append(
        f"{counted(len(todo), 'run')} to do ({rates_left} of them for learning rates), "
        f"{len(needed) - len(todo)} done"
    )
    lines += skipped
    workers, threads = request.shared_out
    seconds, sources = _clock(request.experiment, request.profile, store, threads)(todo)
    if todo and seconds is None:
        lines.append("no estimate of time: twenty steps of a run could not be measured")
    elif todo and seconds is not None:
        lines.append(
            f"about {duration(seconds / workers)} with {workers} "
            f"worker{'s' if workers > 1 else ''}, from {' and '.join(sorted(sources))}"
        )
    return "\n".join(lines)


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


def _plan(request: Request, store: Store) -> Plan:
    """The plan with the learning rates that its own grids have chosen so far."""
    grids = make_plan(request.experiment, request.profile).tunings
    return make_plan(
        request.experiment, request.profile, tuning.values(grids, tuning.load_rates(store))
    )


def _prepare(request: Request, store: Store) -> tuple[Plan, list[PlannedRun], list[str]]:
    """The plan with the rates known so far.

    With it the wanted runs whose data are here, and what is skipped.
    """
    plan = _plan(request, store)
    wanted = select(plan, request.only)
    missing = missing_data(wanted)
    if missing and request.strict:
        raise CommandError("; ".join(missing.values()))
    wanted = [run for run in wanted if run.config["data"] not in missing]
    if not wanted:
        raise CommandError("; ".join(missing.values()))
    return plan, wanted, list(missing.values())


def _tune(
    request: Request,
    store: Store,
    backend: Backend,
    threads: int,
    plan: Plan,
    wanted: Sequence[PlannedRun],
) -> dict[str, str]:
    names = {tuning_of(run) for run in with_dependencies(plan, wanted)}
    grids = tuning.open_tunings(plan.tunings, names, tuning.load_rates(store))
    if not grids:
        return {}
    runs = [run for grid in grids for run in grid.runs]
    outcomes = run_all(
        runs, store, backend, threads, Progress(title=f"{request.experiment.name}, learning rates")
    )
    undecided = tuning.decide(grids, store)
    failures = _failures({run.key: run for run in runs}, outcomes)
    return failures | {
        name: f"left out: {name}: no learning rate, {why}" for name, why in undecided.items()
    }


def _ready(plan: Plan, wanted: Sequence[PlannedRun]) -> tuple[list[PlannedRun], dict[str, str]]:
    """The wanted runs with all that they need.

    And those that follow a run without a learning rate.
    """
    ready, left_out = [], {}
    for run in wanted:
        needed = [
            one for one in with_dependencies(plan, [run]) if "@tuned:" in str(one.config["lr"])
        ]
        if not needed:
            ready.append(run)
        elif run not in needed:
            left_out[run.key] = (
                f"left out: {run.describe()}: it follows a run without a learning rate"
            )
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
    experiment: Experiment, profile: str, store: Store, threads: int | None = None
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
        found = estimate.estimate(runs, _sizes(experiment, profile), costs, speeds, threads)
        if threads is not None:
            estimate.remember(store, speeds)
        return found

    return clock


def _sizes(experiment: Experiment, profile: str) -> dict[str, int]:
    """Training records by data set; a profile may stand on a part of them."""
    return {
        name: int(data.get(f"{profile}_size", data["size"]))
        for name, data in experiment.common["data"].items()
    }


def _write(
    request: Request, store: Store, plan: Plan, failures: Mapping[str, str], skipped: Sequence[str]
) -> str:
    """All that an experiment leaves in its folder; returns what to print."""
    folder = store.out / folder_of(plan.experiment.name, plan.profile)
    runs = results.collect(plan, store)
    store.record(plan.runs)
    left = [run for run in plan.runs if run.key not in runs]
    others = [run for run in left if run.key not in failures]
    told = [*failures.values(), *_untrusted(store, others), *_failed_before(store, others)]
    clock = _clock(plan.experiment, plan.profile, store)
    missing = parts(plan, left, command_line(request), store, lambda some: clock(some)[0])
    table = results.table(plan, runs, command_line(request), missing)
    rates = tuning.chosen(plan.tunings, tuning.load_rates(store))
    table["rates_at_edge"], table["rates"] = tables.edges(plan, rates)
    pictures: list[str] = []
    note = ""
    try:
        pictures = plots.draw(plan, table, runs, folder)
    except ImportError:
        note = "\nno plots: they need matplotlib (pip install 'zetaclip[report]')"
    write_json(folder / "table.json", table)
    write_text(folder / "runs.csv", results.csv_text(plan, runs))
    for spec in plan.experiment.series:
        found = series.points(plan, runs, spec)
        if found:
            write_text(folder / f"{spec['name']}.csv", series.csv_text(found, spec))
            write_text(folder / f"{spec['name']}.md", series.markdown(plan, found, spec))
    page = tables.markdown(
        plan,
        table,
        failures=told,
        rates=rates,
        skipped=skipped,
        pictures=pictures,
    )
    write_text(folder / "table.md", page)
    index.write(store)
    report = f"{len(runs)} of {len(plan.runs)} runs; table, CSV and plots in {folder}{note}"
    if told:
        report += f"\n{len(told)} failed or left out:\n  " + "\n  ".join(told)
    return "\n".join([report, *skipped])
