"""Growing files of JSON lines, and the few values that a report keeps of each."""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Points of a spectrum on a page; more can't be told apart.
SPECTRUM_POINTS = 160

# Bytes before the last position that are compared, to notice that a file was replaced.
_TAIL = 256


def number(value: Any) -> float | None:
    """A finite number, or None for everything else (null, NaN, a string, true)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond every float
        return None


def last(values: Iterable[float | None]) -> float | None:
    """The last value that is not None."""
    found = None
    for value in values:
        found = value if value is not None else found
    return found


class Lines:
    """A growing file of JSON lines.

    Args:
        path: The file.
        key: The field that orders the lines.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self._forget()

    def _forget(self) -> None:
        self._rows: dict[Any, dict[str, Any]] = {}
        self._offset, self._before, self._inode = 0, b"", -1
        self._rest = b""
        self._bad = 0

    def update(self) -> tuple[dict[str, Any], ...]:
        """Reads what is new, or everything if the file was replaced.

        Returns:
            The rows so far, ordered by ``key``. Of two with the same key (a repeated epoch), the
            later one counts.
        """
        try:
            with open(self.path, "rb") as file:
                if not self._continues(file):
                    self._forget()
                    self._inode = os.fstat(file.fileno()).st_ino
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            self._forget()
            return ()
        except OSError:
            self._bad += 1
            return self._sorted()
        if data:
            self._offset += len(data)
            self._before = (self._before + data)[-_TAIL:]
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._take(line)
        return self._sorted()

    def _continues(self, file: Any) -> bool:
        if os.fstat(file.fileno()).st_ino != self._inode:
            return False
        file.seek(self._offset - len(self._before))
        return bool(file.read(len(self._before)) == self._before)

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        row = parse_object(line)
        place = number(row.get(self.key)) if row is not None else None
        if row is None or place is None:
            self._bad += 1
        else:
            self._rows[place] = slim(row)

    def _sorted(self) -> tuple[dict[str, Any], ...]:
        return tuple(self._rows[place] for place in sorted(self._rows))

    def problems(self, growing: bool) -> list[str]:
        """What could not be read; an unfinished last line is normal while the file is growing."""
        found = []
        if self._bad:
            found.append(
                f"{self._bad} unreadable line{'s' * (self._bad > 1)} of {self.path.name} left out"
            )
        if self._rest.strip() and not growing:
            found.append(f"the last line of {self.path.name} is cut off and left out")
        return found


def parse_object(text: bytes) -> dict[str, Any] | None:
    """A JSON object, or None. NaN and Infinity are kept; ``number`` drops them."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def slim(row: dict[str, Any]) -> dict[str, Any]:
    """The row with each layer's eigenvalues as an array: 8 bytes each instead of 32."""
    layers = row.get("layers")
    if not isinstance(layers, dict):
        return row
    kept = {}
    for name, layer in layers.items():
        if isinstance(layer, dict):
            values = layer.get("eigenvalues")
            kept[str(name)] = layer | {
                "eigenvalues": _array(values if isinstance(values, list) else [])
            }
    return row | {"layers": kept}


def _array(values: list[Any]) -> array[float]:
    try:
        return array("d", values)
    except (TypeError, OverflowError):  # one of them is no number
        return array("d", [value for value in map(number, values) if value is not None])


def curve(eigenvalues: Iterable[float], limit: int = SPECTRUM_POINTS) -> list[tuple[float, float]]:
    """(λ, share of the eigenvalues that are at least λ), from the largest down.

    A long spectrum is thinned evenly in the logarithm of the rank, because the tail matters most.
    """
    ordered = sorted((value for value in eigenvalues if 0 < value < math.inf), reverse=True)
    count = len(ordered)
    ranks: Iterable[int] = range(1, count + 1)
    limit = min(limit, SPECTRUM_POINTS)
    if count > limit:
        step = math.log(count) / (limit - 1)
        ranks = sorted({min(count, round(math.exp(step * place))) for place in range(limit)})
    return [(ordered[rank - 1], rank / count) for rank in ranks]
