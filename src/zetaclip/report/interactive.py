"""A chart for the screen, drawn by plotly.js from the installed package ``plotly``.

Figures are plain data for plotly.js. Colours are names ("$0", "$ink"). The page replaces them with
those of a light or a dark screen, and again when the reader changes the theme.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from math import ceil, floor, log10
from typing import Any

from .colours import DASHES, LIGHT, dash, hue, symbol
from .figure import Axis, Band, Bars, Chart, Series, short
from .format import plain


@lru_cache(maxsize=1)
def bundle() -> str:
    """plotly.js. It contains no closing script tag, so it can be put inside a script element.

    Raises:
        RuntimeError: The installed version can't be put into a page.
    """
    code = (
        resources.files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")
    )
    if "</script" in code.lower() or "<!--" in code:
        raise RuntimeError("this version of plotly can't be put into a page; install plotly 7")
    return code


def safe(text: str) -> str:
    """Escapes a name: plotly renders some HTML, and a folder's name must not be read as HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def figure(chart: Chart) -> dict[str, Any]:
    """The chart as "data" and "layout" for ``Plotly.react``, and what sets its height."""
    traces = [_band(band) for band in chart.bands]
    traces += [_series(one, chart) for one in chart.series]
    traces += [_bars(part, chart.categories) for part in chart.bars]
    layout: dict[str, Any] = {
        "xaxis": _axis(chart.x, chart.series, 0),
        "yaxis": _axis(chart.y, chart.series, 1),
        "showlegend": chart.legend,
        "hovermode": "x unified" if _unified(chart) else "closest",
        "shapes": [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": rule.y,
                "y1": rule.y,
                "line": {"color": "$muted", "width": 1, "dash": "dash"},
            }
            for rule in chart.rules
        ],
        "annotations": [
            {
                "text": safe(rule.name),
                "xref": "paper",
                "x": 0.01,
                "y": log10(rule.y) if chart.y.log else rule.y,
                "xanchor": "left",  # curves meet their bounds at the right
                "yanchor": "bottom",
                "showarrow": False,
                "font": {"size": 11, "color": "$muted"},
            }
            for rule in chart.rules
        ],
    }
    if _unified(chart):
        layout["xaxis"]["unifiedhovertitle"] = {"text": f"{_bare(chart.x)} %{{x}}"}
    if chart.bars:
        layout |= {"barmode": "stack", "bargap": 0.35}
        # Two long names may be cut to the same text, so bars have numbers, and names as labels.
        places = list(range(len(chart.categories)))
        labels = [safe(short(name)) for name in chart.categories]
        layout["yaxis"] |= {
            "autorange": "reversed",
            "tickvals": places,
            "ticktext": labels,
            "ticksuffix": " ",
        }
    names = [one.name for one in chart.series if one.in_legend]
    names += [band.name for band in chart.bands] + [part.name for part in chart.bars]
    return {
        "data": traces,
        "layout": layout,
        "legend": [len(short(name)) for name in names] if chart.legend else [],
        "rows": len(chart.categories),
    }


def _axis(axis: Axis, series: tuple[Series, ...], which: int) -> dict[str, Any]:
    made: dict[str, Any] = {"title": {"text": axis.label}, "automargin": True}
    if axis.log:
        values = [
            v for one in series for v in (one.y if which else one.x) if v is not None and v > 0
        ]
        ticks = log_ticks(min(values, default=1.0), max(values, default=1.0))
        made |= {
            "type": "log",
            "tickvals": ticks,
            "ticktext": [tick_text(value) for value in ticks],
        }
    if axis.from_zero:
        made["rangemode"] = "tozero"
    if axis.limits:
        made["range"] = list(axis.limits)
    return made


def _unified(chart: Chart) -> bool:
    """Whether one box shows all values at an x: for few curves. Else it shows the nearest point."""
    return 1 < len(chart.series) <= 6 and not chart.x.log and not chart.bars


def log_ticks(low: float, high: float) -> list[float]:
    """About four to nine round values between ``low`` and ``high``.

    plotly's own labels drop the power of ten on a short logarithmic axis.
    """
    first, final = floor(log10(low)), ceil(log10(high))
    decades = [10.0**place for place in range(first, final + 1)]
    if len(decades) > 6:
        return decades[:: ceil(len(decades) / 6)]
    steps = (1, 2, 5) if len(decades) <= 4 else (1,)
    found = [step * decade for decade in decades for step in steps]
    return [float(f"{value:.6g}") for value in found if low / 2.1 <= value <= high * 2.1]


def tick_text(value: float) -> str:
    """The label of a tick of a logarithmic axis."""
    place = round(log10(value))
    return plain(value) if 1e-3 <= value < 1e4 else f"1e{place}"


def _colour(slot: int) -> str:
    return "$muted" if slot < 0 else f"${hue(slot)}"


def _series(one: Series, chart: Chart) -> dict[str, Any]:
    colour = _colour(one.slot)
    trace: dict[str, Any] = {
        "type": "scatter",
        "name": safe(short(one.name)),
        "x": [_short(value) for value in one.x],
        "y": [_short(value) for value in one.y],
        "showlegend": one.in_legend,
        "hovertemplate": _hover(one, chart),
    }
    if any(one.notes):
        trace["text"] = [safe(note) for note in one.notes]
    if one.kind in ("line", "steps", "dashed", "marked"):
        trace["mode"] = "lines+markers" if one.kind == "marked" or len(one.x) == 1 else "lines"
        trace["line"] = {
            "color": colour,
            "width": 2,
            "dash": line_dash(one),
        }
        trace["marker"] = {"color": colour, "size": 5, "symbol": symbol(max(0, one.slot))}
        if one.kind == "steps":
            trace["line"]["shape"] = "hv"
    else:
        shape = {"points": symbol(one.slot), "open": f"{symbol(one.slot)}-open", "cross": "x"}[
            one.kind
        ]
        trace["mode"] = "markers"
        trace["marker"] = {"color": colour, "size": 4 if chart.x.log else 6, "symbol": shape}
    if any(value is not None for value in one.error):
        trace["error_y"] = {
            "type": "data",
            "array": [_short(value) for value in one.error],
            "color": colour,
            "thickness": 1,
            "width": 0,
        }
    return trace


def line_dash(one: Series) -> str:
    """The dash of a line.

    Lines without symbols often overlap, so each has its own dash. Lines with symbols are dashed
    only when the colours are used up.
    """
    if one.kind == "dashed":
        return "dash"
    slot = max(0, one.slot)
    return DASHES[slot // len(LIGHT) % len(DASHES)] if one.kind == "marked" else dash(slot)


def _hover(one: Series, chart: Chart) -> str:
    spread = " ± %{error_y.array:.2~g}" if any(value is not None for value in one.error) else ""
    value = f"%{{y:.4~g}}{spread}" + (" (%{text})" if any(one.notes) else "")
    if _unified(chart):
        return value  # the box already names x and the series
    return (
        f"{_bare(chart.x)}: %{{x:.4~g}}<br>{_bare(chart.y)}:"
        f" {value}<extra>%{{fullData.name}}</extra>"
    )


def _bare(axis: Axis) -> str:
    """The label without its unit."""
    return safe(axis.label.partition(" (")[0])


def _band(band: Band) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": safe(short(band.name, 34)),
        "x": [_short(value) for value in (*band.x, *reversed(band.x))],
        "y": [_short(value) for value in (*band.high, *reversed(band.low))],
        "mode": "lines",
        "line": {"width": 0, "color": "$band"},
        "fill": "toself",
        "fillcolor": "$band",
        "hoverinfo": "skip",
    }


def _bars(part: Bars, categories: tuple[str, ...]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": safe(short(part.name)),
        "y": list(range(len(categories))),
        "text": [safe(name) for name in categories],
        "textposition": "none",
        "x": [_short(value) for value in part.values],
        "marker": {"color": _colour(part.slot)},
        "hovertemplate": "%{text}<br>%{fullData.name}: %{x:.3~g} s<extra></extra>",
    }


def _short(value: float | None) -> float | None:
    """Six digits: more than a screen shows, at a third of the size of sixteen."""
    return None if value is None else float(f"{value:.6g}")
