"""The small files of a results folder: read as a whole, replaced at once."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CommandError
from ..words import wrapped


def read_json(path: Path) -> dict[str, Any]:
    """The table in a JSON file.

    Raises:
        ValueError: The file contains something else.
    """
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} contains no table")
    return value


def read_own(path: Path) -> dict[str, Any]:
    """A file of the results folder that can't be made again.

    Raises:
        CommandError: It can't be read.
    """
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise CommandError(
            f"{path} can't be read ({error}). Restore its last good copy, or choose another folder"
            " with --out"
        ) from error


def read_cache(path: Path) -> dict[str, Any]:
    """A file that only saves time; empty if it can't be read."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replaces a file by a table as JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replaces a file at once: a reader sees the old content or the new one.

    The prose of a page of Markdown is broken into lines.
    """
    if path.suffix == ".md":
        text = wrapped(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
