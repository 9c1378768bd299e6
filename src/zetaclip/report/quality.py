"""What a model does on held-out records: curves, residuals, and the table of confusions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..words import counted
from .captions import marked, told
from .figure import Axis, Chart, Series
from .format import plain, target_unit
from .lines import number
from .read import Run
from .table import Cell, table

# Ids of the charts of this module.
IDS = ("roc", "precision-recall", "predictions", "residuals")

NOTE = (
    "<p>All of this is measured on held-out records. ε covers the training records and what the"
    " weights tell about them. It does not cover what these figures tell about the held-out"
    " records.</p>"
)

# Words of a class in the table; a longer name would widen it.
_LONGEST = 18
_MOST_LINES = 12  # classes in one chart; more can't be told apart


def quality_charts(runs: Sequence[Run]) -> list[Chart]:
    """The charts, of which some may be empty."""
    return [_roc(runs), _precision_recall(runs), _predictions(runs), _residuals(runs)]


def _found(run: Run, key: str) -> Any:
    stated = (run.result or {}).get("evaluation")
    return stated.get(key) if isinstance(stated, dict) else None


def _curve(runs: Sequence[Run], key: str) -> list[Series]:
    """A series in per cent for each run that has the curve; of a single run one for each class."""
    if len(runs) == 1 and 2 < len(parts := _by_class(runs[0])) <= _MOST_LINES:
        named = [(name, part.get(key)) for name, part in parts]
    else:
        named = [(run.name, _found(run, key)) for run in runs]
    made = []
    for slot, (name, pairs) in enumerate(named):
        rows = [
            (number(pair[0]), number(pair[1]))
            for pair in (pairs if isinstance(pairs, list) else [])
            if isinstance(pair, list) and len(pair) == 2
        ]
        known = [(100 * x, 100 * y) for x, y in rows if x is not None and y is not None]
        if known:
            x, y = zip(*known)
            made.append(Series(name, x, y, slot, "line"))
    return made


def _by_class(run: Run) -> list[tuple[str, dict[str, Any]]]:
    """(name, what was measured) of each class."""
    names, parts = _found(run, "classes"), _found(run, "per_class")
    if not isinstance(names, list) or not isinstance(parts, list) or len(names) != len(parts):
        return []
    return [(str(name), part) for name, part in zip(names, parts) if isinstance(part, dict)]


def _whose(runs: Sequence[Run]) -> tuple[str, str, str]:
    """What curves are about: the class that is looked for, the others, and a sentence."""
    if all(len(_by_class(run)) == 2 for run in runs):
        return "class 1", "class 0", ""
    if len(runs) == 1 and 2 < len(_by_class(runs[0])) <= _MOST_LINES:
        return "the class", "the others", " Each class against all others."
    return "the class", "the others", " Over all pairs of a record and a class."


def _roc(runs: Sequence[Run]) -> Chart:
    series = _curve(runs, "roc")
    said = [(run.name, _area(run)) for run in runs if _found(run, "roc")]
    one, rest, how = _whose(runs)
    if series:
        series.append(Series("guessing", (0.0, 100.0), (0.0, 100.0), -1, "dashed"))
    return Chart(
        "roc",
        "ROC curve",
        Axis(f"false positives (% of {rest})", limits=(0, 100)),
        Axis(f"true positives (% of {one})", limits=(0, 100)),
        tuple(series),
        summary=f"The higher above the diagonal, the better.{how}" + told(runs, said),
    )


def _area(run: Run) -> str:
    measured = (run.result or {}).get("metrics")
    area = number(measured.get("auc")) if isinstance(measured, dict) else None
    if area is None:
        return f"mean area {plain(number(_found(run, 'auc')))}"
    return f"area {plain(area)}"


def _precision_recall(runs: Sequence[Run]) -> Chart:
    series = _curve(runs, "precision_recall")
    one, _, how = _whose(runs)
    shares = {share for run in runs if (share := _positives(run)) is not None}
    if series and len(shares) == 1:
        level = 100 * shares.pop()
        series.append(Series("guessing", (0.0, 100.0), (level, level), -1, "dashed"))
    return Chart(
        "precision-recall",
        "Precision and recall",
        Axis(f"recall (% of {one})", limits=(0, 100)),
        Axis("precision (%)", limits=(0, 100)),
        tuple(series),
        summary=f"Of what is called {one}, the share that is right (precision), by the share of "
        f"{one} that is found (recall).{how}",
    )


def _positives(run: Run) -> float | None:
    """The share of class 1 among the held-out records."""
    rows = _rows(run)
    if len(rows) != 2 or not sum(count for _, count, _ in rows):
        return None
    return rows[1][1] / sum(count for _, count, _ in rows)


def _predictions(runs: Sequence[Run]) -> Chart:
    series: list[Series] = []
    for slot, run in enumerate(runs):
        bins = (_found(run, "residuals") or {}).get("by_target")
        rows = [
            (number(one.get("target")), number(one.get("prediction")), number(one.get("count")))
            for one in (bins if isinstance(bins, list) else [])
            if isinstance(one, dict)
        ]
        known = [(x, y, n or 0.0) for x, y, n in rows if x is not None and y is not None]
        if known:
            x, y, counts = zip(*known)
            notes = tuple(counted(round(count), "record") for count in counts)
            series.append(Series(run.name, x, y, slot, marked(runs), notes=notes))
    if series:
        ends = [value for one in series for value in one.x]
        line = (min(ends), max(ends))
        series.append(Series("perfect", line, line, -1, "dashed"))
    unit = _unit(runs)
    return Chart(
        "predictions",
        "Prediction by target",
        Axis(f"target ({unit})"),
        Axis(f"mean prediction ({unit})"),
        tuple(series),
        summary="Records in 40 bins of the target; each point is the mean of a bin.",
    )


def _residuals(runs: Sequence[Run]) -> Chart:
    series = []
    said = []
    for slot, run in enumerate(runs):
        found = _found(run, "residuals") or {}
        bars = found.get("histogram")
        if not isinstance(bars, dict):
            continue
        edges = [number(edge) for edge in bars.get("edges") or []]
        counts = [number(count) for count in bars.get("counts") or []]
        total = sum(count or 0.0 for count in counts)
        if None in edges or len(edges) != len(counts) + 1 or not total:
            continue
        x = tuple(edge for edge in edges if edge is not None)
        y = tuple(100 * (count or 0.0) / total for count in (*counts, counts[-1]))
        series.append(Series(run.name, x, y, slot, "steps"))
        off, mean = number(found.get("absolute")), number(found.get("mean"))
        said.append((run.name, f"mean {plain(mean, 3)}, mean absolute error {plain(off, 3)}"))
    return Chart(
        "residuals",
        "Residuals",
        Axis(f"prediction minus target ({_unit(runs)})"),
        Axis("records (%)", from_zero=True),
        tuple(series),
        summary="How far predictions are off." + told(runs, said),
    )


def _unit(runs: Sequence[Run]) -> str:
    units = {target_unit(run) for run in runs} - {""}
    return units.pop() if len(units) == 1 else "unit of the target"


def _rows(run: Run) -> list[tuple[str, int, float | None]]:
    """(class, records, accuracy) of each class."""
    return [
        (name, round(number(part.get("records")) or 0), number(part.get("accuracy")))
        for name, part in _by_class(run)
    ]


def confusions(run: Run) -> str:
    """The table of classes, with the confusions of up to 30 classes, as HTML; "" if there is none.

    The cells of a row are shaded by their share of it.
    """
    rows = _rows(run)
    if not rows:
        return ""
    counts = _found(run, "confusion")
    square = isinstance(counts, list) and [
        len(line) if isinstance(line, list) else 0 for line in counts
    ] == [len(rows)] * len(rows)
    head = ["class", "records", "right"]
    lines = []
    for place, (name, records, right) in enumerate(rows):
        line = [
            Cell(_short(name)),
            Cell(str(records), float(records)),
            Cell("–" if right is None else f"{100 * right:.1f} %", right),
        ]
        if square:
            line += [_shaded(number(count) or 0.0, records) for count in counts[place]]
        lines.append(line)
    if square:
        head += [f"→ {_short(name)}" for name, _, _ in rows]
    caption = "Accuracy by class" + (
        ", and how often each class (row) was taken for which (column)." if square else "."
    )
    return table(head, lines, caption, sortable=not square)


def _shaded(count: float, records: int) -> Cell:
    share = count / records if records else 0.0
    text = f"{count:.0f}"
    return Cell(text, count, f'<span class=shade style="--share:{45 * share:.0f}%">{text}</span>')


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
