"""A released signal -> C."""

from .base import ClipState, Constant, Controller, Probe, Released
from .open_loop import OpenLoopState, Replay, Schedule
from .spectral import Spectral, SpectralState

__all__ = [
    "ClipState",
    "Constant",
    "Controller",
    "OpenLoopState",
    "Probe",
    "Released",
    "Replay",
    "Schedule",
    "Spectral",
    "SpectralState",
]
