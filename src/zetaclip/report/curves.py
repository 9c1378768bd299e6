"""The figures of an experiment: what happened during its runs, averaged over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .captions import CLIP, EPOCH, EPSILON, STEP, ZETA
from .charts import PART_NAMES, PARTS, clip_path
from .figure import Axis, Bars, Chart, Series, Value, thin
from .format import NAMES, epsilon_text
from .lines import number
from .read import Follower, Run

# Panels (data set and condition) per kind of figure; the table has all of them.
MAX_PANELS = 6
# If the largest ε is within this factor of the smallest, they look the same in a chart.
ALIKE = 1.02

Pairs = list[tuple[float, float]]
Panel = tuple[str, str]


def figures(rows: Sequence[dict[str, str]], folders: Sequence[Path | None]) -> list[Chart]:
    """C, ζ̂, metric against ε, ECE and time, each if its runs have values.

    Only runs that the table counts are drawn: the last value of an unfinished run is not final.

    Args:
        rows: The rows of runs.csv.
        folders: The run folder of each row, or None.
    """
    runs: dict[Path, Run] = {}
    panels: dict[Panel, dict[str, list[Run]]] = {}
    for row, folder in zip(rows, folders):
        if folder is None or row.get("state") != "finished":
            continue
        run = runs.setdefault(folder, Follower(folder).read())
        panel = (row.get("group") or row.get("data", ""), row.get("condition", ""))
        panels.setdefault(panel, {}).setdefault(row.get("row") or row.get("method", ""), []).append(
            run
        )
    made: list[Chart] = []
    made += _over_panels(panels, "clip", "Clipping norm", Axis(STEP), Axis(CLIP), _clips, "steps")
    made += _over_panels(
        panels, "zeta", "Smoothed tail exponent ζ̂", Axis(STEP), Axis(ZETA), _zetas, "line"
    )
    made += budget_charts(panels)
    made += _over_panels(
        panels,
        "ece",
        "Expected calibration error",
        Axis(EPOCH),
        Axis("ECE (%)"),
        _eces,
        "marked",
        bars=True,
    )
    made.append(time_chart(panels))
    return [chart for chart in made if not chart.empty]


def _clips(run: Run) -> Pairs:
    # A constant C needs no chart.
    path = [(x, y) for x, y in clip_path(run) if x is not None and y is not None]
    return path if run.probes or run.clips else []


def _zetas(run: Run) -> Pairs:
    found = ((number(probe.get("step")), number(probe.get("smoothed"))) for probe in run.probes)
    return [(x, y) for x, y in found if x is not None and y is not None]


def _eces(run: Run) -> Pairs:
    found = ((number(line.get("epoch")), number(line.get("ece"))) for line in run.metrics)
    return [(x, 100 * y) for x, y in found if x is not None and y is not None]


def mean_curve(
    curves: Sequence[Pairs],
) -> tuple[tuple[float, ...], tuple[Value, ...], tuple[Value, ...]]:
    """Mean and standard deviation over seeds at every x.

    A seed keeps its value until its next point.

    Returns:
        The positions, the means, and the standard deviations (None for a single seed).
    """
    places = sorted({x for curve in curves for x, _ in curve})
    columns: list[list[float]] = [[] for _ in places]
    for curve in curves:
        values = iter(sorted(curve))
        upcoming, current = next(values, None), None
        for column, x in zip(columns, places):
            while upcoming is not None and upcoming[0] <= x:
                current, upcoming = upcoming[1], next(values, None)
            if current is not None:
                column.append(current)
    means = tuple(statistics.fmean(column) for column in columns)
    spreads = tuple(statistics.stdev(column) if len(column) > 1 else None for column in columns)
    return tuple(places), means, spreads


def _over_panels(
    panels: dict[Panel, dict[str, list[Run]]],
    key: str,
    title: str,
    x: Axis,
    y: Axis,
    read: Callable[[Run], Pairs],
    kind: str,
    bars: bool = False,
) -> list[Chart]:
    made: list[Chart] = []
    slots = slots_of(panels)
    for panel, rows in panels.items():
        series = []
        for row, runs in rows.items():
            curves = [curve for run in runs if (curve := read(run))]
            if not curves:
                continue
            places, means, spreads = mean_curve(curves)
            chosen = thin(len(places), 40 if bars else 200)
            series.append(
                Series(
                    row,
                    tuple(places[i] for i in chosen),
                    tuple(means[i] for i in chosen),
                    slots[row],
                    kind,
                    tuple(spreads[i] for i in chosen) if bars else (),
                )
            )
        if series and len(made) < MAX_PANELS:
            seeds = max(len(runs) for runs in rows.values())
            made.append(
                Chart(
                    f"{key}-{len(made)}",
                    _titled(title, panel),
                    x,
                    y,
                    tuple(series),
                    summary="One seed." if seeds == 1 else f"Mean of up to {seeds} seeds.",
                )
            )
    return made


def slots_of(panels: dict[Panel, dict[str, list[Run]]]) -> dict[str, int]:
    """A number for each method, so that it has the same colour on the whole page."""
    return {
        row: slot
        for slot, row in enumerate(dict.fromkeys(row for rows in panels.values() for row in rows))
    }


def _titled(title: str, panel: Panel) -> str:
    group, condition = panel
    told = (
        condition
        if group.lower() in condition.lower()
        else ", ".join(part for part in panel if part)
    )
    return f"{title}, {told}" if told else title


def budget_charts(panels: dict[Panel, dict[str, list[Run]]]) -> list[Chart]:
    """The metric and the calibration error against ε with error bars, one chart per data set."""
    slots = slots_of(panels)
    found: dict[tuple[str, str], dict[str, list[tuple[float, float, Value]]]] = {}
    for (group, _), rows in panels.items():
        for row, runs in rows.items():
            for name, pairs in _at_the_end(runs).items():
                values = [value for _, value in pairs]
                spread = statistics.stdev(values) if len(values) > 1 else None
                point = (
                    statistics.fmean(spent for spent, _ in pairs),
                    statistics.fmean(values),
                    spread,
                )
                found.setdefault((name, group), {}).setdefault(row, []).append(point)
    made: list[Chart] = []
    for (name, group), methods in sorted(found.items(), key=lambda one: one[0][0] == "ece"):
        spent = [point[0] for points in methods.values() for point in points]
        # If all ε are alike, rows are drawn side by side; else they would cover one another.
        alike = max(spent) <= ALIKE * min(spent)
        series = []
        for place, (row, unordered) in enumerate(methods.items(), 1):
            x, y, error = zip(*sorted(unordered, key=lambda point: point[:2]))
            x = tuple(float(place) for _ in x) if alike else x
            series.append(
                Series(
                    row, x, y, slots[row], "marked" if len(x) > 1 and not alike else "points", error
                )
            )
        unit = {"accuracy": "%", "ece": "%", "auc": "no unit, 0.5 is guessing"}.get(
            name, "unit of the target"
        )
        shown = NAMES.get(name, name)
        title = f"{shown[0].upper()}{shown[1:]} " + (
            f"at ε = {epsilon_text(max(spent))}" if alike else "against ε"
        )
        made.append(
            Chart(
                f"budget-{len(made)}",
                _titled(title, (group, "")),
                Axis("row of the table (count)" if alike else EPSILON),
                Axis(f"{shown} ({unit})"),
                tuple(series),
                summary="ε from the ledgers, at the last epoch.",
            )
        )
    return made[: 2 * MAX_PANELS]


def _at_the_end(runs: Sequence[Run]) -> dict[str, Pairs]:
    """(ε, value) of each finished run, by metric."""
    made: dict[str, Pairs] = {}
    for run in runs:
        measured = (run.result or {}).get("metrics")
        ece = number(measured.get("ece")) if isinstance(measured, dict) else None
        for name, value in ((run.metric_name, run.metric), ("ece", ece)):
            if run.result is not None and run.epsilon is not None and value is not None:
                scale = 100.0 if name in ("accuracy", "ece") else 1.0
                made.setdefault(name, []).append((run.epsilon, scale * value))
    return made


def time_chart(panels: dict[Panel, dict[str, list[Run]]]) -> Chart:
    """Mean seconds by part, with a bar per row and panel."""
    labels: list[str] = []
    times: list[dict[str, float]] = []
    for panel, rows in panels.items():
        for row, runs in rows.items():
            measured = [run.seconds for run in runs if run.result is not None]
            if measured and len(labels) < 40:
                labels.append(
                    ", ".join(part for part in (row, *(panel if len(panels) > 1 else ())) if part)
                )
                times.append({part: _mean(one.get(part) for one in measured) for part in PARTS})
    bars = tuple(
        Bars(PART_NAMES.get(part, part), tuple(one[part] for one in times), slot)
        for slot, part in enumerate(PARTS)
        if any(one[part] for one in times)
    )
    return Chart(
        "time",
        "Time by part",
        Axis("time (s)"),
        Axis("row (name)"),
        bars=bars,
        categories=tuple(labels),
        size="wide",
        summary="Mean seconds of a run.",
    )


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else 0.0
