"""What a second thread gains: the step of one thread over that of two, without and with privacy.

    python bench/threads.py
    python bench/threads.py --models cnn resnet --turns 21 --threads 2

Time is wall-clock time, so the machine must have as many free cores as threads. In every turn each
contender takes one step on one thread and one on several. A figure is the ratio of the shortest
times: other work on the machine only adds to a time.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from common import table, write_json

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))

import torch
from contenders import Step, make
from networks import MODELS

from zetaclip.cli.allocation import keep_freed_memory


def seconds(step: Step, threads: int) -> float:
    """The wall-clock time of one step on so many threads."""
    torch.set_num_threads(threads)
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(name: str, threads: int, turns: int) -> dict[str, Any]:
    """The shortest times in milliseconds, by contender and number of threads."""
    model = MODELS[name]
    torch.manual_seed(0)
    x, y = model.data(model.batch)
    steps = {kind: make(kind, model, x, y) for kind in ("plain", "ours")}
    counts = (1, threads)
    for step in steps.values():
        for count in counts:
            seconds(step, count)  # warm-up
    found: dict[tuple[str, int], list[float]] = {(k, c): [] for k in steps for c in counts}
    for turn in range(turns):
        for kind, count in sorted(found, reverse=bool(turn % 2)):
            found[kind, count].append(1e3 * seconds(steps[kind], count))
    return {kind: {str(count): min(found[kind, count]) for count in counts} for kind in steps}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["cnn", "resnet"])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    keep_freed_memory()
    results, rows = {}, []
    for name in options.models:
        results[name] = best = measure(name, options.threads, options.turns)
        write_json(options.json, {"threads": options.threads, "steps": results})
        several = str(options.threads)
        cells = []
        for kind in ("plain", "ours"):
            one, more = best[kind]["1"], best[kind][several]
            cells.append(f"{one:.1f} -> {more:.1f} ms: {one / more:.2f}x")
        rows.append([f"{MODELS[name].title}, batch {MODELS[name].batch}", *cells])
    print(table(["model", "no privacy", "zetaclip"], rows))


if __name__ == "__main__":
    main()
