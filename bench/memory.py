"""Memory of privacy: the peak of a private step over that of an ordinary one, same physical batch.

    python bench/memory.py                        # all six models
    python bench/memory.py --models cnn --no-peers

Every figure comes from its own process. It takes a step on two records with another network, so
that code and the kernels' buffers are loaded. It builds the network, the data and the optimizer,
notes its resident memory, resets the operating system's high-water mark, processes four physical
batches, and reads the mark. The peak is the difference: activations, gradients and what privacy
adds. The last columns repeat it for zetaclip with a logical batch of 1 and of 4 physical batches.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import one_thread, table, write_json

one_thread()

from contenders import PEERS, make, ours, reason
from networks import MODELS, TABLE

# Physical batches per figure: four steps of one, or one step of four.
CHUNKS = 4
TITLES = {
    "ours": "zetaclip",
    "hooks": "Opacus hooks",
    "functorch": "Opacus functorch",
    "ghost": "Opacus ghost",
    "opake": "Opake",
}


def _status(field: str) -> float:
    """A field of /proc/self/status, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {field} in /proc/self/status; this bench needs Linux")


def child(name: str, kind: str, chunks: int) -> float:
    """Peak MiB of one contender above the state after building; runs in its own process."""
    import torch

    model = MODELS[name]
    torch.manual_seed(0)
    make(kind, model, *model.data(2))()
    x, y = model.data(model.batch * chunks)
    step = ours(model, x, y, model.batch) if chunks > 1 else make(kind, model, x, y)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    for _ in range(CHUNKS // chunks):
        step()
    return max(0.0, _status("VmHWM") - before)


def measure(name: str, kind: str, chunks: int = 1) -> float | str:
    """The peak in MiB, or why there is none."""
    # Large blocks are returned when they are freed; else the figure would contain malloc's reserve.
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "131072",
        "MALLOC_TRIM_THRESHOLD_": "131072",
    }
    command = [sys.executable, __file__, "--child", name, kind, str(chunks)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = done.stdout.splitlines()
    if not lines:
        return f"ended with code {done.returncode}"
    value: float | str = json.loads(lines[-1])
    return value


def as_table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    kinds = [kind for kind in TITLES if any(kind in row for row in results.values())]
    rows = []
    for name, row in results.items():
        base = row["plain"]
        cells = []
        for kind in kinds:
            value = row.get(kind, "-")
            cells.append(value if isinstance(value, str) else f"{value / base:.2f}x")
        flat = row["logical"]
        cells += ["-" if isinstance(v, str) else f"{v:.0f} MiB" for v in (flat["1"], flat["4"])]
        rows.append(
            [f"{MODELS[name].title}, batch {MODELS[name].batch}", f"{base:.0f} MiB", *cells]
        )
    head = [
        "model",
        "no privacy",
        *(TITLES[kind] for kind in kinds),
        "logical batch x1",
        "logical batch x4",
    ]
    return table(head, rows)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(TABLE), metavar="NAME")
    parser.add_argument(
        "--peers", action=argparse.BooleanOptionalAction, default=True, help="also measure Opacus"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, kind, chunks = options.child
        try:
            print(json.dumps(child(name, kind, int(chunks))))
        except Exception as problem:
            print(json.dumps(f"fails: {reason(problem)}"))
        return
    results: dict[str, Any] = {}
    for name in options.models:
        row: dict[str, Any] = {kind: measure(name, kind) for kind in ("plain", "ours")}
        if options.peers:
            row |= {kind: measure(name, kind) for kind in PEERS}
        row["logical"] = {"1": row["ours"], "4": measure(name, "ours", 4)}
        results[name] = row
        write_json(options.json, {"peak_mib": results})
    print(as_table(results))


if __name__ == "__main__":
    main()
