"""Tables: plain HTML, readable by a screen reader, and sortable where a script runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .figure import Chart, thin
from .words import plain

# Rows of the table that belongs to a chart.
MAX_ROWS = 60

# Columns of it: beyond, nobody listens to the end of a row.
MAX_COLUMNS = 20


@dataclass(frozen=True)
class Cell:
    """What is shown, and what it is sorted by if that is a number.

    ``html`` is trusted, ``text`` is escaped.
    """

    text: str
    key: float | None = None
    strong: bool = False
    title: str = ""
    html: str = ""


def table(
    head: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str, sortable: bool = False
) -> str:
    """A table in a frame of its own that scrolls, so that a wide one never widens the page."""
    numeric = [any(row[place].key is not None for row in rows) for place in range(len(head))]
    labels = "".join(
        f"<th scope=col{' class=number' * right}>{_head(label, sortable)}</th>"
        for label, right in zip(head, numeric)
    )
    lines = []
    for row in rows:
        first, *rest = row
        cells = [
            f"<th scope=row>{_content(first)}</th>",
            *(_data(*pair) for pair in zip(rest, numeric[1:])),
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    kind = " class=sortable" if sortable else ""
    return (
        "<div class=frame tabindex=0 role=group"
        f' aria-label="{escape(caption)}"><table{kind}><caption><span>{escape(caption)}</span></caption>'
        f"<thead><tr>{labels}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _head(label: str, sortable: bool) -> str:
    return f"<button type=button>{escape(label)}</button>" if sortable else escape(label)


def _content(cell: Cell) -> str:
    inner = cell.html or escape(cell.text)
    return f"<strong>{inner}</strong>" if cell.strong else inner


def _data(cell: Cell, right: bool) -> str:
    key = "" if cell.key is None else f' data-key="{cell.key!r}"'
    title = f' title="{escape(cell.title)}"' if cell.title else ""
    return f"<td{key}{' class=number' * right}{title}>{_content(cell)}</td>"


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """A list of names and values."""
    inner = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)
    return f"<dl>{inner}</dl>"


def chart_table(chart: Chart) -> str:
    """The numbers of a chart: a row per x, a column per series. Long ones are thinned, and say so."""
    if chart.bars:
        rows = [
            [
                Cell(name),
                *(Cell(plain(part.values[place]), part.values[place]) for part in chart.bars),
            ]
            for place, name in enumerate(chart.categories)
        ]
        shown = [rows[place] for place in thin(len(rows), MAX_ROWS)]
        return table(
            [chart.y.label, *(f"{part.name} (s)" for part in chart.bars)],
            shown,
            _caption(chart, len(shown), len(rows)),
        )
    series = chart.series[:MAX_COLUMNS]
    columns: list[tuple[str, dict[float, float | None]]] = []
    for one in series:
        columns.append((one.name, dict(zip(one.x, one.y))))
        if any(value is not None for value in one.error):
            columns.append((f"standard error of {one.name}", dict(zip(one.x, one.error))))
    places = sorted({x for one in series for x in one.x})
    chosen = [places[place] for place in thin(len(places), MAX_ROWS)]
    rows = [
        [Cell(plain(x, 6)), *(Cell(plain(values.get(x))) for _, values in columns)] for x in chosen
    ]
    note = (
        ""
        if len(series) == len(chart.series)
        else f" The first {len(series)} of {len(chart.series)} series."
    )
    return table(
        [chart.x.label, *(name for name, _ in columns)],
        rows,
        _caption(chart, len(rows), len(places)) + note,
    )


def _caption(chart: Chart, shown: int, there: int) -> str:
    thinned = f" {shown} of {there} rows, evenly spaced." if shown < there else ""
    return f"{chart.title}: {chart.y.label} by {chart.x.label}.{thinned}"
