"""A chart as data: what is drawn, not how.

One ``Chart`` is drawn three times: by plotly for the screen, by matplotlib for paper, and as a
table for screen readers. All three read the same numbers, so they can't disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Value = float | None

# Points per series. A phone is 390 pixels wide and a desktop's chart about 600.
MAX_POINTS = 400

# Above this many series a legend would be longer than the chart; names then stand in the hover and
# the table.
MAX_LEGEND = 16


@dataclass(frozen=True)
class Axis:
    """A name with its unit, as a reader sees it, and the scale."""

    label: str
    log: bool = False
    limits: tuple[float, float] | None = None
    from_zero: bool = False


@dataclass(frozen=True)
class Series:
    """One line or set of points.

    ``slot`` chooses colour and shape; ``error`` is a half width per point.

    ``kind``: line, marked (with points on it), steps, dashed; points, open (hollow), cross.
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
    """A shaded stretch between two curves, e.g. the healthy zone."""

    name: str
    x: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    slot: int = -1


@dataclass(frozen=True)
class Rule:
    """A horizontal line with a name, e.g. a bound."""

    name: str
    y: float


@dataclass(frozen=True)
class Bars:
    """Stacked horizontal bars: one ``Bars`` per part, one value per category."""

    name: str
    values: tuple[Value, ...]
    slot: int = 0


@dataclass(frozen=True)
class Chart:
    """``id`` is unique on the page and made of letters, digits and "-".

    ``summary`` says in words what is seen.
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
    size: str = "half"  # or "third", "wide"

    @property
    def legend(self) -> bool:
        shown = sum(one.in_legend for one in self.series) + len(self.bands) + len(self.bars)
        return 1 < shown <= MAX_LEGEND

    @property
    def empty(self) -> bool:
        return not any(value is not None for one in self.series for value in one.y) and not any(
            value is not None for part in self.bars for value in part.values
        )


def thin(count: int, limit: int = MAX_POINTS) -> list[int]:
    """At most ``limit`` evenly spaced places of ``count``; the first and the last are among them."""
    if count <= limit:
        return list(range(count))
    return sorted({round(place * (count - 1) / (limit - 1)) for place in range(limit)})


def short(name: str, length: int = 26) -> str:
    """A name that fits into a legend: the middle is left out, because folders differ at their ends."""
    return (
        name
        if len(name) <= length
        else f"{name[: length // 2 - 1]}…{name[-(length - length // 2) :]}"
    )


def share(series: int) -> int:
    """Points for each of so many series: what a page of ten runs can hold in its six megabytes."""
    return max(40, min(MAX_POINTS, 1600 // max(1, series)))


def points(
    name: str,
    pairs: Sequence[tuple[float | None, Value]],
    slot: int = 0,
    kind: str = "line",
    limit: int = MAX_POINTS,
) -> Series:
    """A series from (x, y); pairs without an x are dropped, a missing y stays a gap."""
    known = [(x, y) for x, y in pairs if x is not None]
    chosen = [known[place] for place in thin(len(known), limit)]
    return Series(name, tuple(x for x, _ in chosen), tuple(y for _, y in chosen), slot, kind)
