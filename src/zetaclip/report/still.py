"""A chart for print, drawn by matplotlib on white: SVG, or PNG if the SVG would be too large."""

from __future__ import annotations

import base64
import io
import math
import warnings
from typing import TYPE_CHECKING, Any

from .colours import LIGHT, SYMBOLS, hue, symbol
from .figure import Bars, Chart, Series, short, thin
from .interactive import line_dash, log_ticks, tick_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTHS = {"half": 4.4, "third": 4.0, "wide": 6.5}
_DASHES: dict[str, Any] = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_MARKERS = dict(zip(SYMBOLS, ("o", "s", "D", "^", "*", "h"), strict=True))

# Points of all series together: paper has no zoom, and the size of a page is limited.
_POINTS = 1200

# Bytes. A larger SVG holds very many points and is smaller as a PNG.
_LONGEST = 40_000

# More bars than this don't fit on a sheet of paper.
_ROWS = 40


def picture(chart: Chart) -> str:
    """The chart as a ``data:`` URL for an ``<img>``."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    rows = min(len(chart.categories), _ROWS)
    width = _WIDTHS[chart.size]
    names = [one.name for one in chart.series if one.in_legend]
    names += [band.name for band in chart.bands] + [part.name for part in chart.bars]
    columns = max(
        1, min(3, int(width / (0.5 + 0.065 * max((len(short(name)) for name in names), default=1))))
    )
    legend = 0.17 * math.ceil(len(names) / columns) + 0.05 if chart.legend else 0.0
    height = (0.65 + 0.26 * rows if chart.bars else 2.7) + legend
    # Text stays text: it is smaller than outlines, can be searched in a PDF, and ζ̂ is drawn right.
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": chart.id,
        "font.size": 9,
        "font.family": "sans-serif",
        # A "$" in a folder's name starts no formula.
        "text.parse_math": False,
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # The browser has the glyph.
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")
        # Margins by hand: a layout engine draws every picture twice.
        figure = Figure(figsize=(width, height))
        FigureCanvasSVG(figure)
        left = (
            0.3 + 0.075 * max((len(short(name)) for name in chart.categories), default=0)
            if chart.bars
            else 0.6
        )
        left = min(left, 0.45 * width)
        frame = (
            left / width,
            (0.45 + legend) / height,
            1 - (left + 0.12) / width,
            1 - (0.57 + legend) / height,
        )
        axes = figure.add_axes(frame)
        if chart.bars:
            _draw_bars(axes, chart, rows)
        else:
            _draw_series(axes, chart)
        axes.set_xlabel(chart.x.label)
        # The names of bars need no label.
        axes.set_ylabel("" if chart.bars else chart.y.label)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if chart.legend:
            figure.legend(
                loc="lower center",
                ncols=columns,
                fontsize=8,
                frameon=False,
                borderpad=0,
                labelspacing=0.3,
            )
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        kind, data = "svg+xml", _trim(file.getvalue())
        if len(data) > _LONGEST:
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=150)
            kind, data = "png", file.getvalue()
    return f"data:image/{kind};base64," + base64.b64encode(data).decode("ascii")


def _trim(svg: bytes) -> bytes:
    """Drops what precedes the element: a declaration that names a remote DTD."""
    return svg[svg.index(b"<svg") :]


def _draw_series(axes: Axes, chart: Chart) -> None:
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    for band in chart.bands:
        axes.fill_between(
            band.x, band.low, band.high, color="0.5", alpha=0.2, linewidth=0, label=band.name
        )
    limit = max(20, _POINTS // max(1, len(chart.series)))
    for one in chart.series:
        _draw(axes, one, limit, small=chart.x.log)
    for rule in chart.rules:
        axes.axhline(rule.y, color="0.4", linewidth=0.8, linestyle="--")
        axes.annotate(
            rule.name,
            (0.01, rule.y),
            xycoords=("axes fraction", "data"),
            ha="left",
            va="bottom",
            fontsize=8,
            color="0.3",
        )
    if chart.x.log:
        axes.set_xscale("log")
        _log_labels(axes.xaxis, [x for one in chart.series for x in one.x])
    if chart.y.log:
        axes.set_yscale("log")
        _log_labels(axes.yaxis, [y for one in chart.series for y in one.y if y is not None])
    if chart.y.from_zero:
        axes.set_ylim(bottom=0)
    if chart.x.limits:
        axes.set_xlim(*chart.x.limits)
    if chart.y.limits:
        axes.set_ylim(*chart.y.limits)


def _log_labels(axis: Any, values: list[float]) -> None:
    """Labels as on the screen. Those of matplotlib are formulas, which are switched off here."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    positive = [value for value in values if value > 0]
    ticks = log_ticks(min(positive, default=1.0), max(positive, default=1.0))
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FixedFormatter([tick_text(value) for value in ticks]))
    axis.set_minor_locator(NullLocator())


def _draw(axes: Axes, one: Series, limit: int, small: bool) -> None:
    places = thin(len(one.x), limit)
    x = [one.x[place] for place in places]
    y = [float("nan") if (value := one.y[place]) is None else value for place in places]
    slot = max(0, one.slot)
    colour = "0.45" if one.slot < 0 else LIGHT[hue(slot)]
    style: dict[str, Any] = {"color": colour, "label": short(one.name) if one.in_legend else "_"}
    if one.kind in ("line", "steps", "dashed", "marked"):
        style |= {"zorder": 3, "linewidth": 1.4, "linestyle": _DASHES[line_dash(one)]}
        if one.kind == "marked" or len(x) == 1:
            style |= {"marker": _MARKERS[symbol(slot)], "markersize": 3.5}
        if one.kind == "steps":
            style["drawstyle"] = "steps-post"
    else:
        shape = "x" if one.kind == "cross" else _MARKERS[symbol(slot)]
        style |= {"linestyle": "", "marker": shape, "markersize": 2 if small else 3.5}
        if one.kind == "open":
            style["markerfacecolor"] = "none"
    if any(value is not None for value in one.error):
        error = [one.error[place] or 0.0 for place in places]
        axes.errorbar(x, y, yerr=error, elinewidth=0.7, **style)
    else:
        axes.plot(x, y, **style)


def _draw_bars(axes: Axes, chart: Chart, rows: int) -> None:
    left = [0.0] * rows
    places = list(range(rows))
    for part in chart.bars:
        widths = _widths(part, rows)
        axes.barh(
            places, widths, left=left, color=LIGHT[hue(part.slot)], label=part.name, height=0.65
        )
        left = [start + width for start, width in zip(left, widths)]
    axes.set_yticks(places, [short(name) for name in chart.categories[:rows]])
    axes.invert_yaxis()


def _widths(part: Bars, rows: int) -> list[float]:
    return [value or 0.0 for value in part.values[:rows]]
