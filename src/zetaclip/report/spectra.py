"""Charts of the probed weights: exponents over the run, and spectra with their tails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..words import counted
from .captions import STEP, ZETA, told
from .figure import Axis, Band, Chart, Series, Value, points, share, thin
from .format import plain
from .lines import curve, last, number
from .read import Run

# Layers whose spectra are drawn, for a single run and for several. The chart of exponents shows all
# layers.
MAX_LAYERS = 3
MAX_LAYERS_OF_SEVERAL = 1

# Points of one series with error bars; more would cover one another.
MAX_READINGS = 80


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
