"""The charts of one run, or of several runs for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..words import counted
from .figure import MAX_LEGEND, Axis, Band, Bars, Chart, Rule, Series, Value, points, share, thin
from .format import NAMES, epsilon_text, metric_text, plain, target_unit
from .read import Run, curve, last, number

STEP = "training step (count)"
EPOCH = "epoch (count)"
EPSILON = "ε (no unit)"
CLIP = "C (unit of gradient norms)"
ZETA = "ζ (no unit)"

# Layers whose spectra are drawn, for a single run and for several. The chart of exponents shows all
# layers.
MAX_LAYERS = 3
MAX_LAYERS_OF_SEVERAL = 1

# Points of one series with error bars; more would cover one another.
MAX_READINGS = 80

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


def told(runs: Sequence[Run], sentences: Sequence[tuple[str, str]]) -> str:
    """What a caption says about the first three runs; a single run is not named."""
    shown = [text if len(runs) == 1 else f"{name}: {text}" for name, text in sentences[:3]]
    text = "; ".join(shown)
    # A sentence begins with a capital letter, but not ε or a run's name.
    return (
        f" {text[0].upper() + text[1:] if len(runs) == 1 and text[0].isascii() else text}."
        if text
        else ""
    )


def marked(runs: Sequence[Run]) -> str:
    """The kind of a line: with symbols, unless there are too many lines to see them."""
    return "marked" if len(runs) <= MAX_LEGEND else "line"


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
    said = told(
        runs,
        [(one.name, f"C went from {plain(one.y[0])} to {plain(last(one.y))}") for one in series],
    )
    return Chart(
        "clip",
        "Clipping norm",
        Axis(STEP),
        Axis(CLIP, log=log),
        tuple(series),
        rules=tuple(rules),
        summary=f"The norm to which each record's gradient is clipped.{said}{note}"
        + (f" {counted(hits, 'probe')} ended at a bound." if hits else ""),
    )


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


def zeta_chart(runs: Sequence[Run]) -> Chart:
    """One run: measured exponents with errors, ζ̂ and the zone.

    Several runs: ζ̂ of each, and the zone if they share it.
    """
    probed = [(slot, run) for slot, run in enumerate(runs) if run.probes]
    series: list[Series] = []
    zones = set()
    for slot, run in probed:
        if len(runs) == 1:
            series += readings(run)
        name = "ζ̂, smoothed" if len(runs) == 1 else run.name
        smoothed = [
            (number(probe.get("step")), number(probe.get("smoothed"))) for probe in run.probes
        ]
        series.append(points(name, smoothed, 0 if len(runs) == 1 else slot, limit=share(len(runs))))
        zones |= {
            (number(probe.get("center")), number(probe.get("radius"))) for probe in run.probes
        }
    bands = []
    reach = max((run.reach for _, run in probed), default=0.0)
    if len(zones) == 1 and reach:
        center, radius = zones.pop()
        if center is not None and radius is not None:
            ends = (0.0, reach)
            name = f"zone {plain(center - radius)} to {plain(center + radius)}"
            bands.append(Band(name, ends, (center - radius,) * 2, (center + radius,) * 2))
    weak = sum(
        1
        for _, run in probed
        for probe in run.probes
        for layer in layers_of(probe).values()
        if layer.get("weak")
    )
    failed = sum(
        1
        for _, run in probed
        for probe in run.probes
        for layer in layers_of(probe).values()
        if layer.get("ok") is False
    )
    ended = [
        (
            run.name,
            f"ζ̂ = {plain(last(number(p.get('smoothed')) for p in run.probes), 3)} at the end",
        )
        for _, run in probed
    ]
    return Chart(
        "zeta",
        "Tail exponent of the probed weights",
        Axis(STEP),
        Axis(ZETA),
        tuple(series),
        tuple(bands),
        summary=(
            f"Small: a few directions dominate; large: weights look random.{told(runs, ended)}"
            f" {counted(weak, 'weak fit')} (too few eigenvalues, or no different from random"
            f" weights), {counted(failed, 'failed fit')}."
        ),
    )


def layers_of(probe: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The fits of a probe by layer."""
    found = probe.get("layers")
    return found if isinstance(found, dict) else {}


def layer_names(run: Run) -> list[str]:
    """The layers that the run probed, in order of appearance."""
    return list(dict.fromkeys(name for probe in run.probes for name in layers_of(probe)))


def readings(run: Run) -> list[Series]:
    """Per layer: good fits filled, weak fits open, and a cross where the fit failed."""
    names = layer_names(run)
    made: list[Series] = []
    for place, layer in enumerate(names):
        kinds: dict[str, list[tuple[float, Value, Value, str]]] = {
            "points": [],
            "open": [],
            "cross": [],
        }
        for index in thin(len(run.probes), MAX_READINGS):
            probe = run.probes[index]
            step, fit = number(probe.get("step")), layers_of(probe).get(layer)
            if fit is None or step is None:
                continue
            value = number(fit.get("zeta"))
            if fit.get("ok") is False or value is None:
                level = number(fit.get("smoothed")) or number(probe.get("center"))
                kinds["cross"].append((step, level, None, str(fit.get("reason") or "no fit")))
            else:
                kind = "open" if fit.get("weak") else "points"
                kinds[kind].append(
                    (step, value, number(fit.get("stderr")), str(fit.get("reason") or ""))
                )
        of = f" of {layer}" if len(names) > 1 else ""
        for kind, label in (("points", "ζ"), ("open", "ζ, weak fit"), ("cross", "no fit")):
            rows = kinds[kind]
            if rows:
                x, y, error, notes = zip(*rows)
                made.append(Series(label + of, x, y, place + 1, kind, error, notes))
    return made


def spectrum_charts(runs: Sequence[Run]) -> list[Chart]:
    """The spectra at the first, middle and last probe, for layers that all probed runs share."""
    probed = [(slot, run) for slot, run in enumerate(runs) if run.probes]
    if not probed:
        return []
    shared = [
        name
        for name in layer_names(probed[0][1])
        if all(name in layer_names(run) for _, run in probed)
    ]
    made = []
    for place, layer in enumerate(
        shared[: MAX_LAYERS if len(runs) == 1 else MAX_LAYERS_OF_SEVERAL]
    ):
        moments = (
            [("first", 0), ("middle", -2), ("last", -1)]
            if any(len(run.probes) > 2 for _, run in probed)
            else [("last", -1)]
        )
        for moment, which in moments:
            chart = _spectrum(
                probed, layer, moment, which, f"spectrum-{place}-{moment}", alone=len(runs) == 1
            )
            made.append(chart)
    return made


def _spectrum(
    probed: Sequence[tuple[int, Run]], layer: str, moment: str, which: int, key: str, alone: bool
) -> Chart:
    series: list[Series] = []
    bands: list[Band] = []
    said: list[tuple[str, str]] = []
    steps = set()
    runs_shown = [run for _, run in probed] if not alone else [probed[0][1]]
    for slot, run in probed[:10]:
        probe = run.probes[len(run.probes) // 2 if which == -2 else which]
        fit = layers_of(probe).get(layer)
        drawn = curve(fit["eigenvalues"], share(2 * len(probed))) if fit else []
        if fit is None or not drawn:
            continue
        steps.add(number(probe.get("step")))
        name = "eigenvalues" if alone else run.name
        series.append(
            Series(
                name,
                tuple(p[0] for p in drawn),
                tuple(p[1] for p in drawn),
                1 if alone else slot,
                "points",
            )
        )
        zeta, start = number(fit.get("zeta")), number(fit.get("lambda_min"))
        tail = number(fit.get("n_tail"))
        if fit.get("ok") is False or zeta is None or not start or start <= 0 or zeta <= 1:
            said.append((run.name, "no fit"))
            continue
        top = drawn[0][0]
        at = share_above(drawn, start, tail)
        label = f"fit ζ = {zeta:.2f}" if alone else f"{run.name}, fit"
        series.append(
            Series(
                label,
                *tail_line(start, top, at, zeta),
                0 if alone else slot,
                "line",
                in_legend=alone,
            )
        )
        low, high = number(fit.get("null_low")), number(fit.get("null_high"))
        known = low is not None and high is not None
        said.append(
            (
                run.name,
                f"ζ = {zeta:.2f}"
                + (f"; random weights of this shape: {low:.2f} to {high:.2f}" if known else ""),
            )
        )
        if alone and low is not None and high is not None and low > 1:
            x, upper = tail_line(start, top, at, low)
            _, lower = tail_line(start, top, at, high)
            bands.append(Band(f"random weights {low:.2f} to {high:.2f}", x, lower, upper))
    when = (
        f"step {steps.pop():.0f}"
        if len(steps) == 1 and None not in steps
        else "each run's own step"
    )
    return Chart(
        key,
        f"Spectrum of {layer}, {moment} probe ({when})",
        Axis("eigenvalue λ (squared weight)", log=True),
        Axis("share at or above λ (fraction)", log=True),
        tuple(series),
        tuple(bands),
        summary=told(runs_shown, said).strip(),
        size="third",
    )


def share_above(drawn: Sequence[Sequence[float]], start: float, tail: float | None) -> float:
    """The share of eigenvalues in the tail: the height at which the fitted line begins.

    Args:
        drawn: Points (λ, share at or above λ).
        start: Where the tail begins.
        tail: The number of eigenvalues in the tail, used if no point is above ``start``.
    """
    above = [share for value, share in drawn if value >= start * (1 - 1e-9)]
    return max(above) if above else (tail or 1.0) / max(1, len(drawn))


def tail_line(
    start: float, top: float, at: float, zeta: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The fitted line: a density λ^-ζ leaves a share of (λ / λ_min)^(1 - ζ) above λ.

    Args:
        start: λ_min, where the tail begins.
        top: The largest eigenvalue.
        at: The share at ``start``.
        zeta: The exponent.

    Returns:
        The positions and the shares.
    """
    x = (
        tuple(start * (top / start) ** (place / 8) for place in range(9))
        if top > start
        else (start, start * 1.01)
    )
    return x, tuple(at * (value / start) ** (1.0 - zeta) for value in x)


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
