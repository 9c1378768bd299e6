"""A released signal -> C."""

from .base import ClipState, Constant, Controller, Probe, Released

__all__ = ["ClipState", "Constant", "Controller", "Probe", "Released"]
