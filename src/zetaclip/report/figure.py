"""A chart as data: what is drawn, not how.

Each ``Chart`` is drawn three times: by plotly for the screen, by matplotlib for print, and as a
table for screen readers. All three use the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Value = float | None

# Points per series. A phone is 390 pixels wide and a desktop's chart about 600.
MAX_POINTS = 400

# With more series a legend would be larger than the chart. Names are then in the hover text and in
# the table only.
MAX_LEGEND = 16


@dataclass(frozen=True)
class Axis:
    """An axis.

    Args:
        label: The name with its unit.
        log: Whether the scale is logarithmic.
        limits: The ends of the axis; None fits them to the data.
        from_zero: Whether the axis starts at zero.
    """

    label: str
    log: bool = False
    limits: tuple[float, float] | None = None
    from_zero: bool = False


@dataclass(frozen=True)
class Series:
    """One line or one set of points.

    Args:
        name: The name in the legend.
        x: The positions.
        y: The values; None leaves a gap.
        slot: Chooses colour, dash and symbol; below 0 is grey.
        kind: line, marked (a line with symbols), steps or dashed; points, open (hollow) or cross.
        error: Half the length of each error bar.
        notes: A text per point, for the hover box.
        in_legend: Whether the legend lists it.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[Value, ...]
    slot: int = 0
    kind: str = "line"
    error: tuple[Value, ...] = ()
    notes: tuple[str, ...] = ()
    in_legend: bool = True


@dataclass(frozen=True)
class Band:
    """A shaded area between two curves, e.g. the healthy zone."""

    name: str
    x: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Rule:
    """A horizontal line with a name, e.g. a bound."""

    name: str
    y: float


@dataclass(frozen=True)
class Bars:
    """One part of stacked horizontal bars, with a value for each category."""

    name: str
    values: tuple[Value, ...]
    slot: int = 0


@dataclass(frozen=True)
class Chart:
    """A chart.

    Args:
        id: Letters, digits and "-"; unique on the page.
        title: The title.
        x: The horizontal axis.
        y: The vertical axis.
        series: Lines and points.
        bands: Shaded areas.
        rules: Horizontal lines.
        bars: Parts of stacked bars; then ``series`` is empty.
        categories: The names of the bars.
        summary: What the chart shows, in words.
        size: half, third or wide: the part of the page's width.
    """

    id: str
    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...] = ()
    bands: tuple[Band, ...] = ()
    rules: tuple[Rule, ...] = ()
    bars: tuple[Bars, ...] = ()
    categories: tuple[str, ...] = ()
    summary: str = ""
    size: str = "half"

    @property
    def legend(self) -> bool:
        """Whether there is a legend: for two to ``MAX_LEGEND`` entries."""
        shown = sum(one.in_legend for one in self.series) + len(self.bands) + len(self.bars)
        return 1 < shown <= MAX_LEGEND

    @property
    def empty(self) -> bool:
        """Whether there is no value to draw."""
        return not any(value is not None for one in self.series for value in one.y) and not any(
            value is not None for part in self.bars for value in part.values
        )


def thin(count: int, limit: int = MAX_POINTS) -> list[int]:
    """At most ``limit`` evenly spaced indices below ``count``, with the first and the last."""
    if count <= limit:
        return list(range(count))
    return sorted({round(place * (count - 1) / (limit - 1)) for place in range(limit)})


def short(name: str, length: int = 26) -> str:
    """A name cut to fit a legend: in the middle, because folders' names differ at the ends."""
    if len(name) <= length:
        return name
    return f"{name[: length // 2 - 1]}…{name[-(length - length // 2) :]}"


def share(series: int) -> int:
    """Points per series, so that a page of ten runs stays below six megabytes."""
    return max(40, min(MAX_POINTS, 1600 // max(1, series)))


def points(
    name: str,
    pairs: Sequence[tuple[float | None, Value]],
    slot: int = 0,
    kind: str = "line",
    limit: int = MAX_POINTS,
) -> Series:
    """A series from (x, y) pairs.

    Args:
        name: The name in the legend.
        pairs: Pairs without an x are dropped; a missing y leaves a gap.
        slot: See ``Series``.
        kind: See ``Series``.
        limit: The largest number of points; more are thinned evenly.
    """
    known = [(x, y) for x, y in pairs if x is not None]
    chosen = [known[place] for place in thin(len(known), limit)]
    return Series(name, tuple(x for x, _ in chosen), tuple(y for _, y in chosen), slot, kind)
