"""Numbers and runs as text for readers."""

from __future__ import annotations

import math
import re
from typing import Any

from .lines import number
from .read import Run

NAMES = {"accuracy": "accuracy", "auc": "AUC", "rmse": "RMSE", "ece": "ECE", "loss": "loss"}

STATES = {
    "finished": "finished",
    "running": "running",
    "stopped": "stopped",
    "failed": "failed",
    "unknown": "not started",
}


def metric_text(name: str, value: float | None, unit: str = "") -> str:
    """The metric in words: "96.1 % accuracy", "AUC 0.912", "RMSE 0.31 kWh".

    Args:
        name: accuracy, auc or rmse; "" if unknown.
        value: The value, or None if it was not measured.
        unit: The unit of a regression's target.
    """
    if value is None:
        return f"{NAMES.get(name, name)} not measured" if name else "nothing measured"
    if name == "accuracy":
        return f"{100 * value:.1f} % accuracy"
    return f"{NAMES.get(name, name)} {value:.4g}" + (f" {unit}" if unit else "")


def metric_cell(name: str, value: float | None) -> str:
    """The value for a cell of a table."""
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if name == "accuracy" else f"{value:.4g}"


def epsilon_text(value: float | None) -> str:
    """ε with two decimals (four below 0.1), rounded up.

    **Guarantee.** A page never states a smaller ε than was spent, apart from a slack of 1e-6.
    """
    if value is None:
        return "∞"
    places = 2 if value >= 0.1 else 4
    scale = 10**places
    # Without the slack, 3.0000000001 (3 to every accountant) would become 3.01.
    return f"{math.ceil(value * scale - 1e-6 * scale) / scale:.{places}f}"


def plain(value: float | None, digits: int = 4) -> str:
    """A number for people: 1e-05 is written 1e-5."""
    if value is None:
        return "–"
    text = f"{value:.{digits}g}"
    mantissa, mark, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if mark else text


def duration(seconds: float | None) -> str:
    """A time for people: "9.5 s", "3 min 07 s", "2 h 05 min"."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def privacy_text(run: Run) -> str:
    """The guarantee with δ and the neighbouring relation, or a statement that there is none."""
    claim = run.get("claim", "")
    if isinstance(claim, str) and claim.startswith("none"):
        return "no privacy is claimed" + (f": {claim[5:].strip()}" if claim[5:].strip() else "")
    if run.epsilon is None:
        if run.result is None and not run.metrics:
            return "nothing released yet"
        return "without privacy"
    adjacency = run.get("adjacency", "add/remove one record")
    delta = number(run.get("delta"))
    return f"ε = {epsilon_text(run.epsilon)}, δ = {plain(delta)}, {adjacency}"


def summary(run: Run) -> str:
    """The run in one line: "96.1 % accuracy at ε = 0.83, δ = 1e-5, add/remove one record"."""
    measured = metric_text(run.metric_name, run.metric, target_unit(run))
    promise = privacy_text(run)
    if promise.startswith("ε"):
        sentence = f"{measured} at {promise}"
    elif promise.startswith("without"):
        sentence = f"{measured}, trained {promise}"
    else:
        sentence = f"{measured}; {promise}"
    if run.state == "running":
        return f"Running, {progress(run)}" + (f": {sentence}" if run.metrics else "")
    if run.state != "finished":
        begun = STATES[run.state].capitalize() + (
            "" if run.state == "unknown" else f" {progress(run)}"
        )
        return begun if run.metric is None and run.epsilon is None else f"{begun}: {sentence}"
    return sentence


def joined(text: str) -> str:
    """The text with spaces and powers that don't break: a value stays whole, beside its name."""
    text = re.sub(r"(?<=\de-)(?=\d)", "\u2060", text)
    return text.replace(" = ", "\u00a0=\u00a0").replace(" %", "\u00a0%")


def progress(run: Run) -> str:
    """How far the run got: "at step 40 of 120"."""
    step, steps = number(run.status.get("step")), number(run.status.get("steps"))
    if not step:
        return "before the first step"
    return f"at step {step:.0f} of {steps:.0f}" if steps else f"at step {step:.0f}"


def target_unit(run: Run) -> str:
    """The unit of a regression's error, e.g. kWh."""
    stated = (run.result or {}).get("metric")
    unit = stated.get("unit") if isinstance(stated, dict) else None
    return unit if isinstance(unit, str) else ""


def zone_share(run: Run) -> float | None:
    """The share of probes whose ζ̂ was inside the zone."""
    stated = (run.result or {}).get("probes")
    if isinstance(stated, dict) and number(stated.get("in_zone_share")) is not None:
        return number(stated["in_zone_share"])
    known = [
        bool(probe.get("in_zone")) for probe in run.probes if probe.get("smoothed") is not None
    ]
    return sum(known) / len(known) if known else None


def final_clip(run: Run) -> float | None:
    """The last clipping norm that is known."""
    stated = (run.result or {}).get("clip")
    if isinstance(stated, dict):
        return number(stated.get("final"))
    current = number(run.status.get("clip"))
    return (
        current
        if current is not None
        else number(run.metrics[-1].get("clip"))
        if run.metrics
        else None
    )


def cell(value: Any) -> str:
    """A configuration value as a user would type it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return plain(value, 6)
    if isinstance(value, dict):
        return ", ".join(f"{key} = {cell(inner)}" for key, inner in value.items()) or "–"
    if isinstance(value, list | tuple):
        return ", ".join(cell(inner) for inner in value) or "–"
    return str(value)


def state_mark(run: Run) -> str:
    """The state of a run, as a coloured mark."""
    return f'<span class="state {run.state}">{STATES[run.state]}</span>'
