"""The private file beside a checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ...files import replace_file


def private_path(path: Path, private: str | os.PathLike[str] | None) -> Path:
    """``<path>.private``, or where the user wants it."""
    return path.with_name(path.name + ".private") if private is None else Path(private)


def read_private(hidden: Path) -> dict[str, Any]:
    """The secrets by the identity of their checkpoint; empty if there is no such file."""
    try:
        values = json.loads(hidden.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def write_private(hidden: Path, values: dict[str, Any]) -> None:
    """Readable by its owner alone, whole or not at all."""
    with replace_file(hidden, mode=0o600) as file:
        file.write(json.dumps(values).encode())
