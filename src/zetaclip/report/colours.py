"""Colours that colour-blind readers can tell apart, on white and on dark ground.

The hues start from Okabe and Ito's set. They were moved until any two differ well under each kind
of colour blindness, and each has a contrast of 3 to 1 with its ground (tests/report/test_colours.py
computes both). Dashes and symbols differ too, for print without colour.
"""

from __future__ import annotations

LIGHT = ("#0259a5", "#d55e00", "#02a86a", "#b6719f", "#633d12", "#2e3239")
DARK = ("#66a4f9", "#ff754a", "#03e0a0", "#d885be", "#e2cb2d", "#e7f0f3")

GROUNDS = {"light": "#ffffff", "dark": "#16191d"}

DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "star", "hexagon")


def hue(slot: int) -> int:
    """The index of the colour of the series with this number."""
    return slot % len(LIGHT)


def dash(slot: int) -> str:
    """The dash; together with the colour it differs for 24 series."""
    return DASHES[(slot + slot // 12) % len(DASHES)]


def symbol(slot: int) -> str:
    """The symbol; together with the colour it differs for 36 series."""
    return SYMBOLS[(slot + slot // len(LIGHT)) % len(SYMBOLS)]
