"""What the scripts share: one thread, tables, and where numbers were measured."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def one_thread() -> None:
    """Limits torch to one thread; call it before torch is imported.

    With a second thread, other work on the machine would be measured too.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)


def surroundings() -> dict[str, str]:
    """Versions and processor, without anything that names a machine."""
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "opacus": version("opacus"),
        "zetaclip": version("zetaclip"),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile by linear interpolation, as numpy computes it."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def write_json(path: str | None, values: dict[str, Any]) -> None:
    """Writes the values with the surroundings; nothing without a path."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(
            json.dumps({"surroundings": surroundings(), **values}, indent=1) + "\n"
        )
