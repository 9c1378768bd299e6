"""The loop behind ``zetaclip train``: a configuration in, a run folder out.

Names are loaded when they are first used, so that the command line can read settings before it
imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Config": "config",
    "ConfigError": ".errors",
    "FolderError": "folder",
    "Interrupted": "signals",
    "RunFolder": "folder",
    "train": "start",
}

if TYPE_CHECKING:
    from ..errors import ConfigError
    from .config import Config
    from .folder import FolderError, RunFolder
    from .signals import Interrupted
    from .start import train

__all__ = ["Config", "ConfigError", "FolderError", "Interrupted", "RunFolder", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zetaclip.training' has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
