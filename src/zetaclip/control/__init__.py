"""A released signal -> C."""

from .base import BoundProbe, ClipState, Constant, Controller, Probe, Released
from .open_loop import OpenLoopState, Replay, Schedule
from .released import MovingClip, Paced, PacedClip, Quantile, SlackControl
from .spectral import Spectral, SpectralState

__all__ = [
    "BoundProbe",
    "ClipState",
    "Constant",
    "Controller",
    "MovingClip",
    "OpenLoopState",
    "Paced",
    "PacedClip",
    "Probe",
    "Quantile",
    "Released",
    "Replay",
    "Schedule",
    "SlackControl",
    "Spectral",
    "SpectralState",
]
