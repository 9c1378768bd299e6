"""The time of a private step if freed memory is kept, over its time if glibc returns it.

    python bench/allocation.py
    python bench/allocation.py --models resnet cnn --rounds 7

`zetaclip train` keeps it (`zetaclip.cli.allocation`). Each measurement has its own process, because
the setting can't be undone. The two take turns, and the figure is the median over rounds of the
ratio within a round. Page faults are those of a step.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

from common import one_thread, table, write_json

one_thread()

from contenders import make
from networks import MODELS

from zetaclip.cli.allocation import keep_freed_memory

SECONDS = 4.0


def measure(name: str, keep: bool) -> dict[str, float]:
    """Milliseconds and page faults of one step, and the peak of resident memory in MiB."""
    import torch

    if keep and not keep_freed_memory():
        raise SystemExit(
            "freed memory can't be kept: there is no glibc, or the environment has settings for it"
        )
    torch.manual_seed(0)
    model = MODELS[name]
    step = make("ours", model, *model.data(model.batch))
    for _ in range(3):
        step()
    before, began, steps = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        step()
        steps += 1
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "ms": 1e3 * seconds / steps,
        "faults": (after.ru_minflt - before.ru_minflt) / steps,
        "peak": after.ru_maxrss / 1024,
    }


def apart(name: str, keep: bool) -> dict[str, float]:
    """The measurement in its own process."""
    words = [sys.executable, "-W", "ignore", __file__, "--one", name, *(["--keep"] if keep else [])]
    found: dict[str, float] = json.loads(
        subprocess.run(words, check=True, capture_output=True, text=True).stdout
    )
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=list(MODELS), default=["mnist", "cnn", "resnet"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--one", choices=list(MODELS), help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.keep)))
        return
    rows, found = [], {}
    for name in arguments.models:
        rounds = [(apart(name, True), apart(name, False)) for _ in range(arguments.rounds)]
        ratios = sorted(kept["ms"] / given["ms"] for kept, given in rounds)
        middle = {
            what: [statistics.median(pair[i][what] for pair in rounds) for i in (0, 1)]
            for what in ("faults", "peak")
        }
        found[name] = {"ratios": ratios, **middle}
        rows.append(
            [
                name,
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
                *(f"{kept:,.0f} / {given:,.0f}" for kept, given in middle.values()),
            ]
        )
    print(table(["model", "time kept / given back", "page faults a step", "peak MiB"], rows))
    if arguments.json:
        write_json(arguments.json, found)


if __name__ == "__main__":
    main()
