"""The numbers that trackers get: those of the run folder's public logs, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .lines import number

_EPOCH = ("epsilon", "metric", "accuracy", "auc", "rmse", "ece", "loss", "clip", "lr")
_PROBE = {
    "zeta": "zeta/reading",
    "smoothed": "zeta/smoothed",
    "phi": "control/phi",
    "clip": "control/clip",
}


def scalars(kind: str, line: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a line, by tag.

    Args:
        kind: "metrics", "probe" or "clip": a line of metrics.jsonl, probes.jsonl or clips.jsonl.
        line: The line.

    **Guarantee.** Only what those files contain is returned, so a tracker learns no more than a
    reader of the run folder.
    """
    found = {"metrics": _epoch, "probe": _probe, "clip": _clip}[kind](line)
    return {tag: known for tag, value in found if (known := number(value)) is not None}


def _epoch(line: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"epoch/{name}", line.get(name)) for name in _EPOCH)
    seconds = line.get("seconds")
    if isinstance(seconds, dict):
        yield from ((f"seconds/{part}", value) for part, value in seconds.items())


def _probe(line: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((tag, line.get(name)) for name, tag in _PROBE.items())
    layers = line.get("layers")
    for layer, fit in layers.items() if isinstance(layers, dict) else ():
        if isinstance(fit, dict) and fit.get("ok") is not False:
            yield f"zeta/{layer}", fit.get("zeta")


def _clip(line: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "control/clip", line.get("clip")
