"""The charts of one run, or of several runs for comparison."""

from __future__ import annotations

from collections.abc import Sequence

from ..words import counted
from .captions import CLIP, EPOCH, EPSILON, STEP, marked, told
from .figure import Axis, Bars, Chart, Rule, Series, Value, points, share
from .format import NAMES, epsilon_text, metric_text, plain, target_unit
from .lines import last, number
from .read import Run
from .spectra import spectrum_charts, zeta_chart

PARTS = ("setup", "train", "probe", "eval", "accounting", "saving")
PART_NAMES = {"setup": "setup", "train": "training", "probe": "probing", "eval": "evaluation"}


def charts_for(runs: Sequence[Run]) -> list[Chart]:
    """Every chart that has values, in the order of the page."""
    made = [
        epsilon_chart(runs),
        *metric_charts(runs),
        clip_chart(runs),
        rate_chart(runs),
        zeta_chart(runs),
        *spectrum_charts(runs),
        reliability_chart(runs),
        time_chart(runs),
    ]
    return [chart for chart in made if not chart.empty]


def epsilon_chart(runs: Sequence[Run]) -> Chart:
    """ε over training steps."""
    series = []
    for slot, run in enumerate(runs):
        pairs = [(number(line.get("step")), number(line.get("epsilon"))) for line in run.metrics]
        if run.result is None and (step := number(run.status.get("step"))) is not None:
            newest = number(run.status.get("epsilon"))
            if newest is not None and (not pairs or step > (pairs[-1][0] or 0)):
                pairs.append((step, newest))
        if any(value is not None for _, value in pairs):
            # Several curves often overlap: dashes tell them apart, symbols would not.
            series.append(
                points(
                    run.name, pairs, slot, "line" if len(runs) > 1 else "marked", share(len(runs))
                )
            )
    targets = {number(run.config.get("epsilon")) for run in runs} - {None}
    # A target far above the spent ε would flatten the curve.
    spent = max((value for one in series for value in one.y if value is not None), default=0.0)
    rules = [
        Rule(f"target ε = {plain(value)}", value)
        for value in targets
        if value is not None and value <= 3 * spent
    ]
    said = told(runs, [(one.name, f"ε = {epsilon_text(last(one.y))} at the end") for one in series])
    return Chart(
        "epsilon",
        "Privacy spent",
        Axis(STEP),
        Axis(EPSILON, from_zero=True),
        tuple(series),
        rules=tuple(rules[:1]) if len(targets) == 1 else (),
        summary=f"ε of everything released so far.{said}",
    )


def metric_charts(runs: Sequence[Run]) -> list[Chart]:
    """One chart per metric, because different metrics share no axis."""
    made = []
    for name in dict.fromkeys(run.metric_name for run in runs if run.metric_name):
        series = []
        shown = NAMES.get(name, name)
        units = {target_unit(run) for run in runs if run.metric_name == name} - {""}
        scale = 100.0 if name == "accuracy" else 1.0
        for slot, run in enumerate(runs):
            if run.metric_name == name:
                values = [
                    (number(line.get("epoch")), number(line.get("metric"))) for line in run.metrics
                ]
                series.append(
                    points(
                        run.name,
                        [(x, y and scale * y) for x, y in values],
                        slot,
                        marked(runs),
                        share(len(runs)),
                    )
                )
        unit = {"accuracy": "%", "auc": "no unit, 0.5 is guessing"}.get(
            name, units.pop() if len(units) == 1 else ""
        )
        label = f"{shown} ({unit or 'unit of the target'})"
        said = told(
            runs,
            [
                (run.name, metric_text(name, run.metric, target_unit(run)))
                for run in runs
                if run.metric_name == name
            ],
        )
        made.append(
            Chart(
                f"metric-{name if name in NAMES else 'other'}",
                f"{shown[0].upper()}{shown[1:]} over epochs",
                Axis(EPOCH),
                Axis(label),
                tuple(series),
                summary=f"{shown[0].upper()}{shown[1:]} on held-out data after each epoch.{said}",
            )
        )
    return made


def clip_path(run: Run) -> list[tuple[float | None, Value]]:
    """(step, C) from the finest record: probes, else the controller's changes, else epochs."""
    path: list[tuple[float | None, Value]] = []
    if run.probes and (first := number(run.probes[0].get("clip_before"))) is not None:
        path.append((0.0, first))
    source = run.probes or run.clips or run.metrics
    path += [(number(line.get("step")), number(line.get("clip"))) for line in source]
    if path and run.reach > (path[-1][0] or 0.0):
        path.append((run.reach, path[-1][1]))  # C stays until it is changed
    return path


def clip_chart(runs: Sequence[Run]) -> Chart:
    """The clipping norm over training steps, with its bounds."""
    series = [
        points(run.name, path, slot, "steps", share(len(runs)))
        for slot, run in enumerate(runs)
        if (path := clip_path(run))
    ]
    series = [one for one in series if any(value is not None for value in one.y)]
    values = [value for one in series for value in one.y if value is not None]
    bounds = {bounds_of(run) for run in runs} - {None}
    rules: list[Rule] = []
    note = ""
    log = False
    if len(bounds) == 1 and values:
        low, high = next(pair for pair in bounds if pair is not None)
        # A bound far from every C would flatten the curve; the caption states it instead.
        near = [
            (what, bound)
            for what, bound in (("lower", low), ("upper", high))
            if min(values) / 6 <= bound <= 6 * max(values)
        ]
        rules = [Rule(f"{what} bound {plain(bound)}", bound) for what, bound in near]
        note = f" Bounds {plain(low)} to {plain(high)}."
        log = low > 0 and high / low > 20 and len(near) == 2 and min(values) > 0
    hits = sum(1 for run in runs for probe in run.probes if probe.get("hit"))
    # A flat line would get an axis of one unit around it, below zero for a small C.
    flat = bool(values) and min(values) == max(values) and not rules and not log
    said = told(runs, [(one.name, _moved(one)) for one in series])
    return Chart(
        "clip",
        "Clipping norm",
        Axis(STEP),
        Axis(CLIP, log=log, limits=(0.0, 2 * values[0]) if flat else None),
        tuple(series),
        rules=tuple(rules),
        summary=f"The norm to which each record's gradient is clipped.{said}{note}"
        + (f" {counted(hits, 'probe')} ended at a bound." if hits else ""),
    )


def _moved(one: Series) -> str:
    """How C moved, in words."""
    if len(set(one.y)) == 1:
        return f"C stayed at {plain(one.y[0])}"
    return f"C went from {plain(one.y[0])} to {plain(last(one.y))}"


def rate_chart(runs: Sequence[Run]) -> Chart:
    """The learning rate over training steps."""
    series = []
    for slot, run in enumerate(runs):
        path = [(number(line.get("step")), number(line.get("lr"))) for line in run.metrics]
        if any(value is not None for _, value in path):
            series.append(points(run.name, path, slot, marked(runs), share(len(runs))))
    said = told(
        runs,
        [(one.name, f"from {plain(one.y[0])} to {plain(last(one.y))}") for one in series],
    )
    return Chart(
        "rate",
        "Learning rate",
        Axis(STEP),
        Axis("learning rate (no unit)", from_zero=True),
        tuple(series),
        summary=f"The rate of the last update before each evaluation.{said}",
    )


def bounds_of(run: Run) -> tuple[float, float] | None:
    """The controller's bounds of C at the last probe."""
    stated = run.probes[-1].get("bounds") if run.probes else None
    if not isinstance(stated, list) or len(stated) != 2:
        return None
    low, high = number(stated[0]), number(stated[1])
    return None if low is None or high is None else (low, high)


def reliability_chart(runs: Sequence[Run]) -> Chart:
    """Accuracy by confidence, in bins."""
    series = []
    said = []
    for slot, run in enumerate(runs):
        bins = (run.result or {}).get("reliability")
        if not isinstance(bins, list):
            continue
        kept = [
            one for one in bins if isinstance(one, dict) and (number(one.get("count")) or 0) > 0
        ]
        rows = [
            (number(one.get("confidence")), number(one.get("accuracy")), number(one.get("count")))
            for one in kept
        ]
        rows = [(x, y, count) for x, y, count in rows if x is not None and y is not None]
        if rows:
            x, y, counts = zip(*rows)
            notes = tuple(counted(round(count), "record") for count in counts)
            series.append(
                Series(
                    run.name,
                    tuple(100 * v for v in x),
                    tuple(100 * v for v in y),
                    slot,
                    marked(runs),
                    notes=notes,
                )
            )
            ece = number(((run.result or {}).get("metrics") or {}).get("ece"))
            said.append((run.name, f"expected calibration error {plain(ece and 100 * ece, 3)} %"))
    if series:
        series.append(Series("perfectly calibrated", (0.0, 100.0), (0.0, 100.0), -1, "dashed"))
    return Chart(
        "reliability",
        "Reliability",
        Axis("confidence of the prediction (%)", limits=(0, 100)),
        Axis("share that was right (%)", limits=(0, 100)),
        tuple(series),
        summary="Below the diagonal the model is overconfident." + told(runs, said),
    )


def time_chart(runs: Sequence[Run]) -> Chart:
    """Seconds by part, a bar per run."""
    times = [(run.name, run.seconds) for run in runs]
    times = [(name, parts) for name, parts in times if parts]
    rows: dict[str, list[Value]] = {part: [parts.get(part) for _, parts in times] for part in PARTS}
    known = [sum(parts.get(part, 0.0) for part in PARTS) for _, parts in times]
    rest = [max(0.0, parts.get("total", 0.0) - sure) for (_, parts), sure in zip(times, known)]
    if any(value > 0.005 * sure for value, sure in zip(rest, known)):
        rows["other"] = list(rest)
    bars = [
        Bars(PART_NAMES.get(part, part), tuple(values), slot)
        for slot, (part, values) in enumerate(rows.items())
        if any(value for value in values)
    ]
    share = [
        (name, f"probing took {100 * (parts.get('probe') or 0) / sure:.1f} %")
        for (name, parts), sure in zip(times, known)
        if sure
    ]
    return Chart(
        "time",
        "Time by part",
        Axis("time (s)"),
        Axis("run (name)"),
        bars=tuple(bars),
        categories=tuple(name for name, _ in times),
        summary="Where the time went." + told(runs, share),
    )
