"""Colours that stay apart for colour-blind readers, on white and on dark ground.

The hues follow Okabe and Ito's set, darkened for white paper and lightened for a dark screen until every line has
a contrast of 3 to 1 with its ground (tests/report/test_colours.py computes both). Dashes and shapes change too, for print without colour.
"""

from __future__ import annotations

LIGHT = ("#0072b2", "#d55e00", "#00805c", "#b5569a", "#8a6a00", "#4a4a4a")
DARK = ("#4fb0f0", "#ff8a3d", "#2fc79b", "#e79ac6", "#e8c547", "#c9c9c9")

GROUNDS = {"light": "#ffffff", "dark": "#16191d"}

DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "star", "hexagon")


def hue(slot: int) -> int:
    return slot % len(LIGHT)


def dash(slot: int) -> str:
    return DASHES[slot % len(DASHES)]


def symbol(slot: int) -> str:
    return SYMBOLS[slot % len(SYMBOLS)]
