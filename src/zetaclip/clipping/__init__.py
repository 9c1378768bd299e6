"""Clip rules: how long each record's gradient may be, and how far it can then move the sum."""

from ._base import Affine, ClipRule, Extra, Flat
from ._rules import AutoS, Counted, Psac, Slack, Thinned
from ._whitening import Important, Moments, Whitened

__all__ = [
    "Affine",
    "AutoS",
    "ClipRule",
    "Counted",
    "Extra",
    "Flat",
    "Important",
    "Moments",
    "Psac",
    "Slack",
    "Thinned",
    "Whitened",
]
