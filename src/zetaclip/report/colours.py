"""Colours that stay apart for colour-blind readers, on white and on dark ground.

The hues follow Okabe and Ito's set, moved until any two stay well apart under every kind of colour
blindness, and every line has a contrast of 3 to 1 with its ground (tests/report/test_colours.py
computes both). Dashes and shapes change too, for print without colour.
"""

from __future__ import annotations

LIGHT = ("#0259a5", "#d55e00", "#02a86a", "#b6719f", "#633d12", "#2e3239")
DARK = ("#66a4f9", "#ff754a", "#03e0a0", "#d885be", "#e2cb2d", "#e7f0f3")

GROUNDS = {"light": "#ffffff", "dark": "#16191d"}

DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "star", "hexagon")


def hue(slot: int) -> int:
    return slot % len(LIGHT)


def dash(slot: int) -> str:
    return DASHES[slot % len(DASHES)]


def symbol(slot: int) -> str:
    return SYMBOLS[slot % len(SYMBOLS)]
