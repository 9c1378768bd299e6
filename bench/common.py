"""What the scripts share: one thread, tables, and a line that says where numbers were made."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def one_thread() -> None:
    """Call it before torch is imported: a second thread would measure the machine's other tenants."""
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
    """By linear interpolation, as numpy does it."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def write_json(path: str | None, values: dict[str, Any]) -> None:
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(
            json.dumps({"surroundings": surroundings(), **values}, indent=1) + "\n"
        )
