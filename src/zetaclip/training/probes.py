"""What a run writes about its probes and its C."""

from __future__ import annotations

import statistics
from typing import Any

from ..spectrum.null import random_null


def describe_probe(reading: Any, before: Any, after: Any, controller: Any) -> dict[str, Any]:
    """One line of probes.jsonl: enough to fit the tails and compute the next C again.

    Args:
        reading: The spectra and their fits.
        before: The controller's state before the probe.
        after: Its state after the probe.
        controller: The controller.
    """
    k = getattr(controller.probe, "k", None)
    layers = {}
    for name, fit in reading.fits.items():
        null = random_null(reading.shapes[name], controller.fit, k)
        layers[name] = {
            "shape": list(reading.shapes[name]),
            "zeta": fit.zeta,
            "stderr": fit.stderr,
            "lambda_min": fit.lambda_min,
            "n_tail": fit.n_tail,
            "ks": fit.ks,
            "ok": fit.ok,
            "weak": fit.weak,
            "reason": fit.reason,
            "smoothed": after.smoothed.get(name),
            "center": controller.center_for(reading, name),
            "null_low": null.low if null.ok else None,
            "null_high": null.high if null.ok else None,
            "eigenvalues": reading.spectra[name].tolist(),
        }
    return {
        "probe": after.probes,
        "step": reading.step,
        "layers": layers,
        "zeta": after.zeta,
        "smoothed": after.zeta_hat,
        "error": after.error,
        "phi": after.phi,
        "clip_before": before.clip,
        "clip": after.clip,
        "hit": after.hit,
        "in_zone": after.error is not None and abs(after.error) <= 1.0,
        "center": controller.center,
        "radius": controller.radius,
        "bounds": None if controller.bounds is None else list(controller.bounds),
    }


def clip_figures(clips: list[float], probes: list[dict[str, Any]]) -> dict[str, Any]:
    """Statistics of C over the updates, and how often a probe ended at a bound."""
    return {
        "median": statistics.median(clips),
        "mean": statistics.fmean(clips),
        "min": min(clips),
        "max": max(clips),
        "hits_min": sum(line["hit"] == "min" for line in probes),
        "hits_max": sum(line["hit"] == "max" for line in probes),
    }


def clip_lines_every(planned_steps: int) -> int:
    """Every how many steps a change of C is written: a long run keeps at most about 2000 lines."""
    return max(1, planned_steps // 1000)


def probe_summary(probes: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of the probes and of their fits."""
    fits = [layer for line in probes for layer in line["layers"].values()]
    return {
        "count": len(probes),
        "in_zone_share": sum(line["in_zone"] for line in probes) / len(probes),
        "weak_fits": sum(fit["weak"] for fit in fits),
        "failed_fits": sum(not fit["ok"] for fit in fits),
        "layers": list(probes[-1]["layers"]),
    }


def clip_path(first: float, lines: list[dict[str, Any]], steps: int) -> list[float]:
    """C of each update.

    Args:
        first: C at the start.
        lines: The lines of probes.jsonl or clips.jsonl that changed it.
        steps: The number of updates.
    """
    changes = [(0, first), *((line["step"], line["clip"]) for line in lines)]
    clips: list[float] = []
    for (start, clip), end in zip(
        changes, [step for step, _ in changes[1:]] + [steps], strict=True
    ):
        clips += [clip] * max(0, min(end, steps) - start)
    return clips
