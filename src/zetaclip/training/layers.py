"""Settings from files and flags, and which of them wins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError


def read_file(path: str | Path) -> dict[str, Any]:
    """The settings of a .toml or .json file.

    Raises:
        ConfigError: The file can't be read or is not valid.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    try:
        values = json.loads(text) if path.suffix == ".json" else parse_toml(text)
    except ValueError as error:
        raise ConfigError(
            f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must contain a table of settings")
    return values


def parse_toml(text: str) -> dict[str, Any]:
    """The content of a TOML text."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef]
    return tomllib.loads(text)


def read_settings(words: Sequence[str]) -> dict[str, Any]:
    """The values of ``--set key=value``.

    A key may be dotted. A value is TOML, or else plain text.

    Raises:
        ConfigError: A word is not key=value, or uses a value as a table.
    """
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set takes key=value, not {word!r}")
        try:
            value = parse_toml(f"value = {text}")["value"]
        except ValueError:
            value = text
        *tables, last = [part.replace("-", "_") for part in key.strip().split(".")]
        place = values
        for table in tables:
            place = place.setdefault(table, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {word}: {table} is a value already, not a table")
        place[last] = value
    return values


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Later layers override earlier ones; tables are joined key by key."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            name = key.replace("-", "_")
            old = merged.get(name)
            merged[name] = (
                {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value
            )
    return merged
