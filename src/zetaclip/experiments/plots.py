"""PNG plots of an experiment. No other module of the experiments imports matplotlib."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import series
from .cells import is_private
from .measures import MEASURES, Run
from .planned import Plan

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX*<>"
_DASHES = ("-", "--", ":")
_PAPER = {"dp-sgd": "x:", "ww-dp-sgd": "+-."}  # the published rows that are drawn
_NOTHING = {"mean": float("nan"), "std": None}


def draw(plan: Plan, table: Mapping[str, Any], runs: Mapping[str, Run], folder: Path) -> list[str]:
    """Draws all plots of an experiment, if anything has run.

    Args:
        plan: The plan of the experiment.
        table: Its table.
        runs: The finished runs, by key.
        folder: Where the files go.

    Returns:
        The names of the files.
    """
    names = _ladders(table, folder)
    if not runs:
        return names
    names += _cells(plan, table, folder)
    for spec in plan.experiment.plots:
        names += _lines(plan, table, spec, folder)
    for spec in plan.experiment.series:
        names += _series(plan, runs, spec, folder)
    return names


def _figure(
    width: float, height: float, panels: int = 1, share: bool = False
) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False, sharey=share)[0]
    return figure, list(axes)


def _save(figure: Any, folder: Path, name: str) -> list[str]:
    file = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".png"
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / file, metadata={"Software": None})  # the same data give the same bytes
    return [file]


def _title(*parts: str) -> str:
    return " · ".join(part for part in parts if part)


def _cells(plan: Plan, table: Mapping[str, Any], folder: Path) -> list[str]:
    """A plot per group: a panel per judged column, with our values and the paper's by row."""
    names = []
    for group in dict.fromkeys(line["group"] for line in table["rows"]):
        lines = [line for line in table["rows"] if line["group"] == group]
        places = [
            place
            for place, detail in enumerate(table["column_details"])
            if detail["good"]
            and any(
                line["cells"][place]
                and line["cells"][place]["ours"]
                and is_private(plan, line["label"])
                for line in lines
            )
        ]
        if not places:
            continue
        figure, axes = _figure(
            2.2 + 3.2 * len(places), 1.2 + 0.28 * len(lines), len(places), share=True
        )
        for ax, place in zip(axes, places, strict=True):
            for what, offset, style in (("ours", 0.0, "o"), ("published", 0.25, "D")):
                chosen = [
                    (height, line["cells"][place][what])
                    for height, line in enumerate(lines)
                    if line["cells"][place]
                ]
                chosen = [(height, cell) for height, cell in chosen if cell]
                if not chosen:  # no entry in the legend
                    continue
                ax.errorbar(
                    [cell["mean"] for _, cell in chosen],
                    [height + offset for height, _ in chosen],
                    xerr=[cell["std"] or 0.0 for _, cell in chosen],
                    fmt=style,
                    markersize=5,
                    capsize=2,
                    color=_COLOURS[0] if what == "ours" else "#888888",
                    markerfacecolor=_COLOURS[0] if what == "ours" else "white",
                    label="here" if what == "ours" else "the paper",
                )
            ax.set_xlabel(table["columns"][place])
            ax.grid(axis="x", alpha=0.3)
        axes[0].set_yticks(range(len(lines)), [line["label"] for line in lines])
        axes[0].invert_yaxis()
        axes[0].legend(fontsize=8)
        figure.suptitle(_title(plan.experiment.title, group), fontsize=10)
        names += _save(figure, folder, f"cells {group}")
    return names


def _ladders(table: Mapping[str, Any], folder: Path) -> list[str]:
    """A plot per condition: what every learning rate came to on held-out records, by method."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, ladder in table["ladders"].items():
        method, _, where = name.partition(" · ")
        found.setdefault(where, {})[method] = ladder
    names = []
    for where, ladders in found.items():
        figure, (ax,) = _figure(8.5, 4.8)
        for number, (method, ladder) in enumerate(ladders.items()):
            points = [(p["lr"], p["value"]) for p in ladder["points"] if p["value"] is not None]
            style = _style(number)
            ax.plot([x for x, _ in points], [y for _, y in points], label=method, **style)
            best = [(x, y) for x, y in points if x == ladder["rate"]]
            ax.plot(
                [x for x, _ in best],
                [y for _, y in best],
                "o",
                color=style["color"],
                markersize=9,
                fillstyle="none",
            )
        ax.set_xscale("log")
        ax.set_xlabel("learning rate (ring: chosen)")
        ax.set_ylabel(f"{next(iter(ladders.values()))['metric']}, held-out records")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
        ax.set_title(_title("Learning rates", where), fontsize=10)
        names += _save(figure, folder, f"rates {where}")
    return names


def _lines(
    plan: Plan, table: Mapping[str, Any], spec: Mapping[str, Any], folder: Path
) -> list[str]:
    """A measure over the columns' x, with a line per row: a plot per group, or one of them all."""
    groups = list(dict.fromkeys(line["group"] for line in table["rows"]))
    if spec.get("together"):
        figure, axes = _figure(2.9 * len(groups), 3.6, len(groups))
        drawn = [
            _rows(plan, table, spec, group, ax) for group, ax in zip(groups, axes, strict=True)
        ]
        if not any(drawn):
            return []
        entries: dict[str, Any] = {}
        for group, ax in zip(groups, axes, strict=True):
            ax.set_title(group, fontsize=10)
            entries |= {label: line for line, label in zip(*ax.get_legend_handles_labels())}
        figure.legend(
            entries.values(), entries, fontsize=8, loc="outside lower center", ncols=len(entries)
        )
        figure.suptitle(spec["title"], fontsize=10)
        return _save(figure, folder, spec["title"])
    names = []
    for group in groups:
        figure, (ax,) = _figure(8.5, 4.8)
        if _rows(plan, table, spec, group, ax):
            ax.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
            ax.set_title(_title(spec["title"], group), fontsize=10)
            names += _save(figure, folder, f"{spec['title']} {group}")
    return names


def _rows(
    plan: Plan, table: Mapping[str, Any], spec: Mapping[str, Any], group: str, ax: Any
) -> bool:
    """The lines of one group; the paper's are dashed and grey, other published values stars.

    Returns:
        Whether more than training without privacy has run.
    """
    measure = spec.get("measure", table["column_details"][0]["measure"])
    places = [
        place
        for place, detail in enumerate(table["column_details"])
        if detail["measure"] == measure
    ]
    private = False
    for number, line in enumerate(line for line in table["rows"] if line["group"] == group):
        drawn = [(table["column_details"][place]["x"], line["cells"][place]) for place in places]
        # A cell that was not run leaves a gap in the line.
        ours = [(x, (cell and cell["ours"]) or _NOTHING) for x, cell in drawn]
        theirs = [(x, cell["published"]["mean"]) for x, cell in drawn if cell and cell["published"]]
        if all(cell is _NOTHING for _, cell in ours):
            continue
        ax.errorbar(
            [x for x, _ in ours],
            [cell["mean"] for _, cell in ours],
            yerr=[cell["std"] or 0.0 for _, cell in ours],
            label=line["label"],
            capsize=2,
            **_style(number),
        )
        private = private or is_private(plan, line["label"])
        if line["method"] in _PAPER and theirs:
            style, label = _PAPER[line["method"]], f"paper: {line['label']}"
            ax.plot(*zip(*theirs, strict=True), style, color="#777777", label=label)
    for label, x, y in spec.get("published", {}).get(group, ()):
        ax.plot([x], [y], "*", markersize=9, color="#777777", label="published elsewhere")
        ax.annotate(label, (x, y), xytext=(4, -9), textcoords="offset points", fontsize=6)
    if spec.get("x_log"):
        ax.set_xscale("log")
    # Ticks at the columns' values, because powers of ten don't suit an ε of 0.5, 2 and 8.
    ticks = sorted({table["column_details"][place]["x"] for place in places})
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlabel(spec.get("x_label", ""))
    ax.set_ylabel(MEASURES[measure].label)
    ax.grid(alpha=0.3)
    return private


def _series(
    plan: Plan, runs: Mapping[str, Run], spec: Mapping[str, Any], folder: Path
) -> list[str]:
    """Values per epoch or probe: the mean over seeds, and a band of one standard deviation."""
    names = []
    found = series.points(plan, runs, spec)
    for group, condition, value in series.panels(found, spec):
        figure, (ax,) = _figure(8.5, 4.8)
        rows = series.means(found, group, condition, value)
        for number, (row, line) in enumerate(rows.items()):
            places = sorted(line)
            middle = [statistics.fmean(line[place]) for place in places]
            spread = [
                statistics.stdev(line[place]) if len(line[place]) > 1 else 0.0 for place in places
            ]
            style = _style(number)
            ax.plot(places, middle, label=row, **{**style, "marker": None})
            low, high = _band(middle, spread)
            ax.fill_between(places, low, high, color=style["color"], alpha=0.15, linewidth=0)
            paper = spec.get("published", {}).get(value, {}).get(row)
            if paper:
                ax.plot(
                    range(1, len(paper) + 1),
                    paper,
                    ":",
                    color=style["color"],
                    label=f"paper: {row}",
                )
        zone = _zone(plan, group, condition, rows) if value == "smoothed" else None
        if zone is not None:
            ax.axhspan(*zone, color="#000000", alpha=0.05, label=f"zone {zone[0]:g} to {zone[1]:g}")
        ax.set_xlabel(series.KINDS[spec["kind"]][1])
        ax.xaxis.get_major_locator().set_params(integer=True)  # epochs and probes are counted
        ax.set_ylabel(series.LABELS.get(value, value))
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
        ax.set_title(_title(spec["title"], group, condition), fontsize=10)
        names += _save(figure, folder, f"{spec['name']} {value} {group} {condition}")
    return names


def _zone(
    plan: Plan, group: str, condition: str, rows: Iterable[str]
) -> tuple[float, float] | None:
    """The target zone, if all rows of a plot have the same one."""
    zones = set()
    for row in rows:
        key = next(iter(plan.cells[group, row, condition].values()))
        told = plan.by_key[key].config.get("spectral", {})
        center, radius = told.get("center"), told.get("radius")
        fixed = center is not None and radius is not None and told.get("zone", "fixed") == "fixed"
        zones.add((center - radius, center + radius) if fixed else None)
    return zones.pop() if len(zones) == 1 else None


def _band(middle: Sequence[float], spread: Sequence[float]) -> tuple[list[float], list[float]]:
    return [a - b for a, b in zip(middle, spread)], [a + b for a, b in zip(middle, spread)]


def _style(number: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": _DASHES[number // len(_COLOURS) % len(_DASHES)],
        "linewidth": 1.4,
        "markersize": 4,
    }


def draw_regret(lines: Sequence[Mapping[str, Any]], methods: Sequence[str], path: Path) -> None:
    """Regret of each method over all tasks, sorted, with its median.

    Args:
        lines: One line per cell.
        methods: The methods to draw.
        path: Where the picture goes.
    """
    figure, (axis,) = _figure(8, 4.2)
    for number, method in enumerate(methods):
        ran = [line["regret"][method][0] for line in lines if method in line["regret"]]
        if not ran:
            continue
        values = sorted(max(0.01, value) for value in ran)
        middle = statistics.median(values)
        shares = [100 * (place + 1) / len(values) for place in range(len(values))]
        colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
        label = f"{method} (median {middle:.2g}, worst {values[-1]:.3g})"
        axis.plot(values, shares, marker, color=colour, markersize=4, linestyle="-", label=label)
    axis.set(xscale="log", xlabel="regret in points (0.01 and less at the left)", ylim=(0, 101))
    axis.set_ylabel("share of tasks and ε with at most this regret, %")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
