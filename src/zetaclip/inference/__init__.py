"""A trained run in use: load it, predict with it, export it."""

from ._export import ENDINGS, FORMATS, export
from ._run import Run, load_run

__all__ = ["ENDINGS", "FORMATS", "Run", "export", "load_run"]
