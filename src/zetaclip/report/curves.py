"""The figures of an experiment: what happened during its runs, averaged over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .charts import CLIP, EPOCH, EPSILON, PART_NAMES, PARTS, STEP, ZETA, clip_path
from .figure import Axis, Bars, Chart, Series, Value, thin
from .read import Follower, Run, number

# Panels (data set and condition) per kind of figure; the table has them all.
MAX_PANELS = 6

Pairs = list[tuple[float, float]]
Panel = tuple[str, str]


def figures(rows: Sequence[dict[str, str]], folders: Sequence[Path | None]) -> list[Chart]:
    """C, ζ̂, accuracy against ε, ECE and time; each where its runs have something to show."""
    runs: dict[Path, Run] = {}
    panels: dict[Panel, dict[str, list[Run]]] = {}
    for row, folder in zip(rows, folders):
        if folder is None:
            continue
        run = runs.setdefault(folder, Follower(folder).read())
        panel = (row.get("group") or row.get("data", ""), row.get("condition", ""))
        panels.setdefault(panel, {}).setdefault(row.get("row") or row.get("method", ""), []).append(run)
    made: list[Chart] = []
    made += _over_panels(panels, "clip", "Clipping norm", Axis(STEP), Axis(CLIP), _clips, "steps")
    made += _over_panels(panels, "zeta", "Smoothed tail exponent ζ̂", Axis(STEP), Axis(ZETA), _zetas, "line")
    made += budget_charts(panels)
    made += _over_panels(
        panels, "ece", "Expected calibration error", Axis(EPOCH), Axis("ECE (%)"), _eces, "marked", bars=True
    )
    made.append(time_chart(panels))
    return [chart for chart in made if not chart.empty]


def _clips(run: Run) -> Pairs:
    # A constant C needs no picture of its own.
    path = [(x, y) for x, y in clip_path(run) if x is not None and y is not None]
    return path if run.probes or run.clips else []


def _zetas(run: Run) -> Pairs:
    found = ((number(probe.get("step")), number(probe.get("smoothed"))) for probe in run.probes)
    return [(x, y) for x, y in found if x is not None and y is not None]


def _eces(run: Run) -> Pairs:
    found = ((number(line.get("epoch")), number(line.get("ece"))) for line in run.metrics)
    return [(x, 100 * y) for x, y in found if x is not None and y is not None]


def mean_curve(curves: Sequence[Pairs]) -> tuple[tuple[float, ...], tuple[Value, ...], tuple[Value, ...]]:
    """Mean and standard deviation over seeds at every x; a seed holds its last value until its next point."""
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
                    summary=f"Mean of up to {seeds} seeds.",
                )
            )
    return made


def slots_of(panels: dict[Panel, dict[str, list[Run]]]) -> dict[str, int]:
    """A method has one colour on the whole page."""
    return {row: slot for slot, row in enumerate(dict.fromkeys(row for rows in panels.values() for row in rows))}


def _titled(title: str, panel: Panel) -> str:
    return ", ".join(part for part in (title, *panel) if part)


def budget_charts(panels: dict[Panel, dict[str, list[Run]]]) -> list[Chart]:
    """The metric against ε with error bars: one chart per data set, its conditions joined."""
    slots = slots_of(panels)
    groups: dict[tuple[str, str], dict[str, Pairs]] = {}
    errors: dict[tuple[str, str, str, float], Value] = {}
    for (group, _), rows in panels.items():
        for row, runs in rows.items():
            known = [(run.epsilon, run.metric) for run in runs if run.result is not None]
            pairs = [(spent, value) for spent, value in known if spent is not None and value is not None]
            if not pairs:
                continue
            name = next(run.metric_name for run in runs if run.metric is not None)
            scale = 100.0 if name == "accuracy" else 1.0
            values = [scale * value for _, value in pairs]
            spent = statistics.fmean(spent for spent, _ in pairs)
            groups.setdefault((group, name), {}).setdefault(row, []).append((spent, statistics.fmean(values)))
            errors[group, name, row, spent] = statistics.stdev(values) if len(values) > 1 else None
    made = []
    for place, ((group, name), methods) in enumerate(groups.items()):
        series = []
        for row, points in methods.items():
            ordered = sorted(points)
            series.append(
                Series(
                    row,
                    tuple(x for x, _ in ordered),
                    tuple(y for _, y in ordered),
                    slots[row],
                    "marked" if len(ordered) > 1 else "points",
                    tuple(errors[group, name, row, x] for x, _ in ordered),
                )
            )
        unit = {"accuracy": "accuracy (%)", "auc": "AUC (no unit)"}.get(name, f"{name.upper()} (unit of the target)")
        title = _titled(
            f"{unit.partition(' (')[0]} against ε".capitalize() if name == "accuracy" else f"{name.upper()} against ε",
            (group, ""),
        )
        made.append(
            Chart(f"budget-{place}", title, Axis(EPSILON), Axis(unit), tuple(series), summary="ε from the ledgers.")
        )
    return made[:MAX_PANELS]


def time_chart(panels: dict[Panel, dict[str, list[Run]]]) -> Chart:
    """Mean seconds by part, a bar per row and panel."""
    labels: list[str] = []
    times: list[dict[str, float]] = []
    for panel, rows in panels.items():
        for row, runs in rows.items():
            measured = [run.seconds for run in runs if run.result is not None]
            if measured and len(labels) < 40:
                labels.append(", ".join(part for part in (row, *(panel if len(panels) > 1 else ())) if part))
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
