"""The page of one experiment: the paper's table beside our numbers, figures, and sources."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from ..experiments.spec import names
from ..words import counted
from .curves import figures
from .experiment_read import Experiment, Place
from .format import duration, epsilon_text, joined, plain
from .lines import number
from .page import Page, Section
from .runs import footer_text
from .table import Cell, facts, table


def page_for_experiment(experiment: Experiment) -> Page:
    """The page of the experiment."""
    charts = figures(experiment.runs, experiment.folders)
    first = "".join(f"<p>{escape(joined(sentence))}</p>" for sentence in sentences(experiment))
    head = (
        f"<h1>Experiment {escape(experiment.name)}</h1>"
        f"<p class=sentence>{escape(experiment.title)}</p>{first}"
    )
    of_the_paper = experiment.name in names()
    sections = [
        Section("summary", html=head),
        Section(
            "table",
            "The table" + ", ours and the paper's" * of_the_paper,
            "".join(_tables(experiment)),
        ),
    ]
    if charts:
        sections.append(
            Section(
                "figures",
                "Figures",
                "<p>Mean over seeds; bars are one standard deviation.</p>",
                tuple(charts),
            )
        )
    sections.append(
        Section("origin", "Where it comes from", facts(_origin(experiment)) + _notes(experiment))
    )
    if experiment.runs:
        sections.append(Section("runs", "Every run", _run_table(experiment)))
    return Page(f"{experiment.name}: zetaclip experiment", tuple(sections), footer_text())


def finished(experiment: Experiment) -> list[dict[str, str]]:
    """The finished runs, each folder once, because experiments and cells share runs."""
    done = [row for row in experiment.runs if row.get("state") == "finished"]
    return list({row.get("run") or str(place): row for place, row in enumerate(done)}.values())


def sentences(experiment: Experiment) -> list[str]:
    """Three sentences of a fixed form, so that the wording never depends on the results."""
    cells = [cell for line in experiment.lines for cell in line.cells if cell is not None]
    done = finished(experiment)
    seeds = max((cell.seeds for cell in cells), default=0)
    first = (
        f"Finished: {len(done)} of {counted(experiment.planned, 'planned run')} (up to"
        f" {counted(seeds, 'seed')} per cell){_budget(done)}."
    )
    compared = [cell for cell in cells if cell.interval is not None and cell.ours is not None]
    better = sum(cell.decided and cell.better is True for cell in compared)
    worse = sum(cell.decided and cell.better is False for cell in compared)
    second = (
        f"Compared with {experiment.baseline or 'the baseline'}: {better} of"
        f" {counted(len(compared), 'cell')} better, {worse} worse,"
        f" {len(compared) - better - worse} neither (by more than the smallest effect)."
    )
    both = [
        (cell.ours, cell.theirs)
        for cell in cells
        if cell.ours is not None and cell.theirs is not None
    ]
    above = sum(ours > theirs for ours, theirs in both)
    relative = [100 * abs(ours - theirs) / abs(theirs) for ours, theirs in both if theirs]
    middle = (
        f", and differs from it by {statistics.median(relative):.1f} % in the median"
        if relative
        else ""
    )
    third = (
        f"The paper reports {len(both)} of our cells: ours is higher in {above} and lower in"
        f" {len(both) - above}{middle}."
    )
    if not both:
        third = "The paper reports none of the cells that have been run."
    return [first, second, third]


def _budget(done: Sequence[dict[str, str]]) -> str:
    # Training without privacy has a δ in its settings too.
    private = [row for row in done if _float(row.get("epsilon")) is not None]
    deltas = sorted({value for row in private if (value := _float(row.get("delta"))) is not None})
    spent = [value for row in private if (value := _float(row.get("epsilon"))) is not None]
    if not spent:
        return ", without an ε"
    low, high = epsilon_text(min(spent)), epsilon_text(max(spent))
    told = f"ε = {low}" if low == high else f"ε from {low} to {high}"
    return f", {told} at δ = {', '.join(plain(delta) for delta in deltas)}, from their ledgers"


def _float(text: str | None) -> float | None:
    try:
        return number(float(text or ""))
    except ValueError:
        return None


def _tables(experiment: Experiment) -> list[str]:
    made = []
    for group in dict.fromkeys(line.group for line in experiment.lines):
        lines = [line for line in experiment.lines if line.group == group]
        shown = [
            place
            for place in range(len(experiment.columns))
            if any(line.cells[place] for line in lines)
        ]
        digits = {place: _digits([line.cells[place] for line in lines]) for place in shown}
        rows = [
            [
                Cell(line.label),
                *(_cell(experiment, line.cells[place], digits[place]) for place in shown),
            ]
            for line in lines
        ]
        caption = (
            "Ours: mean ± standard deviation over seeds, at the last epoch. Paper: as published,"
            " and how much ours is above or below."
        )
        if experiment.baseline:
            caption += (
                f" Bold: better than {experiment.baseline}, by the 95 % interval of the paired"
                " difference."
            )
        if any(cell is not None and cell.diverged for line in lines for cell in line.cells):
            caption += (
                " A seed that diverged has no value: the mean is over the other seeds, and the cell"
                " counts as neither better nor worse."
            )
        made.append(f"<h3>{escape(group)}</h3>" if group else "")
        made.append(
            table(
                ["row", *(experiment.columns[place] for place in shown)],
                rows,
                caption,
                sortable=True,
            )
        )
    return made


def _digits(cells: Sequence[Place | None]) -> int:
    sizes = [
        abs(value)
        for cell in cells
        if cell
        for value in (cell.ours, cell.theirs)
        if value is not None
    ]
    return 2 if max(sizes, default=0.0) >= 10 else 3


def _cell(experiment: Experiment, place: Place | None, digits: int) -> Cell:
    if place is None:
        return Cell("")
    spread = "" if place.spread is None else f" ± {place.spread:.{digits}f}"
    lost = f"{place.diverged} of {place.finished} diverged" if place.diverged else ""
    if place.ours is None:
        # Training without privacy has no C, and the baseline has no overhead.
        ours = lost or ("–" if place.finished else "not run")
    else:
        ours = f"{place.ours:.{digits}f}{spread}" + (f" ({lost})" if lost else "")
    if place.better is True and place.decided:
        ours = f"<strong>{ours}</strong>"
    parts = [ours]
    if place.theirs is not None:
        theirs = f"paper {place.theirs:.{digits}f}" + (
            "" if place.their_spread is None else f" ± {place.their_spread:.{digits}f}"
        )
        away = "" if place.ours is None else f"; ours {place.ours - place.theirs:+.{digits}f}"
        parts.append(f"<span class=cell-theirs>{theirs}{away}</span>")
    if place.difference is not None:
        within = (
            "one seed"
            if place.interval is None
            else f"{place.interval[0]:+.{digits}f} to {place.interval[1]:+.{digits}f}"
        )
        base = escape(experiment.baseline or "baseline")
        parts.append(
            f"<span class=cell-difference>vs {base} {place.difference:+.{digits}f}"
            f" ({within})</span>"
        )
    return Cell("", place.ours, html="".join(parts))


def _origin(experiment: Experiment) -> list[tuple[str, str]]:
    done = finished(experiment)
    there = sum(folder is not None for folder in experiment.folders)
    seconds = sum(_float(row.get("seconds_total")) or 0.0 for row in done)
    rows = [
        ("runs", f"{len(done)} finished of {experiment.planned} planned"),
        ("commit", experiment.commit),
        ("command", experiment.command),
        ("run folders", f"{there} of {len(experiment.folders)} rows have theirs beside this page"),
    ]
    accountants = sorted({row["accountant"] for row in done if row.get("accountant")})
    if accountants:
        rows.append(
            ("ε", f"recomputed from each run's ledger, accountant {', '.join(accountants)}")
        )
    return rows + ([("computing time", duration(seconds))] if seconds else [])


def _notes(experiment: Experiment) -> str:
    if not experiment.notes:
        return ""
    return (
        "<h3>Notes</h3><ul>"
        + "".join(f"<li>{escape(note)}</li>" for note in experiment.notes)
        + "</ul>"
    )


# Column of runs.csv: what the page calls it.
_COLUMNS = {
    "run": "run",
    "group": "group",
    "row": "row",
    "condition": "condition",
    "data": "data",
    "method": "method",
    "seed": "seed",
    "state": "state",
    "metric": "metric",
    "value": "value",
    "epsilon": "ε",
    "sigma": "σ",
    "clip_final": "last C",
    "seconds_total": "time (s)",
}


def _run_table(experiment: Experiment) -> str:
    shown = [name for name in _COLUMNS if any(row.get(name) for row in experiment.runs)]
    rows = [
        [
            Cell(row.get(shown[0], "")),
            *(Cell(_short(row.get(name, "")), _float(row.get(name))) for name in shown[1:]),
        ]
        for row in experiment.runs
    ]
    caption = "One line per run and cell of the table. Click a heading to sort."
    return table([_COLUMNS[name] for name in shown], rows, caption, sortable=True) if shown else ""


def _short(text: str) -> str:
    value = _float(text)
    return text if value is None else plain(value)
