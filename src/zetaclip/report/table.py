"""Tables: plain HTML for screen readers, sortable where scripts run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .figure import Chart, thin
from .format import plain

# Rows of the table that belongs to a chart.
MAX_ROWS = 60

# Its columns: nobody listens to a longer row.
MAX_COLUMNS = 20


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        text: What is shown; it is escaped.
        key: The number to sort by, if any.
        html: Trusted HTML to show instead of ``text``.
    """

    text: str
    key: float | None = None
    html: str = ""


def table(
    head: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str, sortable: bool = False
) -> str:
    """A table in a frame that scrolls, so that a wide table does not widen the page.

    Args:
        head: The headings.
        rows: The cells; the first of a row is its heading.
        caption: The caption.
        sortable: Whether a click on a heading sorts.
    """
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
    kind, name = " class=sortable" if sortable else "", escape(caption)
    return (
        f'<div class=frame tabindex=0 role=group aria-label="{name}">'
        f"<table{kind}><caption><span>{name}</span></caption>"
        f"<thead><tr>{labels}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _head(label: str, sortable: bool) -> str:
    return f"<button type=button>{escape(label)}</button>" if sortable else escape(label)


def _content(cell: Cell) -> str:
    return cell.html or escape(cell.text)


def _data(cell: Cell, right: bool) -> str:
    key = "" if cell.key is None else f' data-key="{cell.key!r}"'
    return f"<td{key}{' class=number' * right}>{_content(cell)}</td>"


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """A list of names with values."""
    inner = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)
    return f"<dl>{inner}</dl>"


def chart_table(chart: Chart) -> str:
    """The numbers of a chart: a row per x, a column per series. A long table is thinned."""
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
