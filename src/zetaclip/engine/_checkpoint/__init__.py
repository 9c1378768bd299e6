"""Checkpoints: a public file, a private one beside it, and a journal of what was executed since.

The public file holds no per-example value, no clipped sum, no index of a record, and nothing from
which noise or batches could be told: those keys are in ``<path>.private``. Both are written whole
or not at all.
"""

from ._errors import CheckpointError, Remedy
from ._files import load, read_private, restore, save, write_private
from ._format import collect, joined

__all__ = [
    "CheckpointError",
    "Remedy",
    "collect",
    "joined",
    "load",
    "read_private",
    "restore",
    "save",
    "write_private",
]
