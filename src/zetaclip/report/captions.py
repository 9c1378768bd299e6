"""Axes and captions that all charts share."""

from __future__ import annotations

from collections.abc import Sequence

from .figure import MAX_LEGEND
from .read import Run

STEP = "training step (count)"
EPOCH = "epoch (count)"
EPSILON = "ε (no unit)"
CLIP = "C (unit of gradient norms)"
ZETA = "ζ (no unit)"


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
