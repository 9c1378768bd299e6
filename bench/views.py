"""What views cost: time of a private step with K augmented views over one without.

    python bench/views.py
    python bench/views.py --models cnn --views 4 --turns 15

A step is forward, backward, clip, noise and update on one thread, with the shifts that `zetaclip
train --views` takes. Time is CPU time. Each turn takes one step of every contender. A figure is the
ratio of medians, then the 10th to the 90th percentile of the ratios of single turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

from common import one_thread, quantile, table, write_json

one_thread()

import torch
from contenders import Step, ours
from networks import MODELS, Model

from zetaclip.cli.allocation import keep_freed_memory
from zetaclip.data.augment import Shift


def measure(model: Model, counts: list[int], turns: int) -> dict[int, list[float]]:
    """Milliseconds of every turn, by number of views."""
    torch.manual_seed(0)
    x, y = model.data(model.batch)
    steps: dict[int, Step] = {1: ours(model, x, y)}
    for count in counts:
        steps[count] = ours(model, x, y, views=count, augment=Shift())
    times: dict[int, list[float]] = {count: [] for count in steps}
    for turn in range(turns + 1):
        for count, step in steps.items():
            start = time.process_time()
            step()
            if turn:  # the first is a warm-up
                times[count].append(1e3 * (time.process_time() - start))
    return times


def main() -> None:
    """Measures, prints a table and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["cnn", "resnet"], choices=MODELS)
    parser.add_argument("--views", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    arguments = parser.parse_args()
    keep_freed_memory()
    rows, found = [], {}
    for name in arguments.models:
        times = measure(MODELS[name], arguments.views, arguments.turns)
        median = {count: statistics.median(values) for count, values in times.items()}
        row = [MODELS[name].title, f"{median[1]:.0f}"]
        for count in arguments.views:
            ratios = [a / b for a, b in zip(times[count], times[1], strict=True)]
            spread = f"{quantile(ratios, 0.1):.2f} to {quantile(ratios, 0.9):.2f}"
            row.append(f"{median[count] / median[1]:.2f} ({spread})")
        rows.append(row)
        found[name] = median
    print(table(["model", "one view, ms", *(f"{n} views" for n in arguments.views)], rows))
    write_json(arguments.json, {"ms": found})


if __name__ == "__main__":
    main()
