"""A trained run in use: load it, and predict with it."""

from ._run import Run, load_run

__all__ = ["Run", "load_run"]
