"""What privacy costs per step: time of a private step over that of an ordinary one.

    python bench/step.py                 # all six models, with Opacus's three modes
    python bench/step.py --models cnn mlp --turns 31 --no-peers
    python bench/step.py --models decoder decoder-lora gpt2 vit-tiny wrn-16-4 lstm

A step is forward, backward, clip, noise and update, on one thread. Time is CPU time of the whole
process, so that work in other threads counts and other load on the machine does not. In every turn
each contender takes one step (cheap models: several), and each turn starts with another contender,
so that a machine that slows down slows all of them. A figure is the ratio of medians over the
turns; the range after it is the 10th to the 90th percentile of the ratios of single turns.

All contenders share one heap. By glibc's defaults it returns freed memory to the system at moments
that depend on what the contender before has left, and clearing the pages again takes up to a third
of a step. So freed memory is kept here, as `zetaclip train` keeps it; `--heap glibc` measures with
the defaults.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from common import one_thread, quantile, table, write_json

one_thread()

import contenders
import torch
from contenders import OPAKE, PEERS, Step, make, reason, replaced_by_opacus
from networks import MODELS, TABLE, Model

from zetaclip.cli.allocation import keep_freed_memory

# A turn of a contender lasts at least this long, so that clock and scheduler hardly matter.
LEAST_SECONDS = 0.02
TITLES = {
    "ours": "zetaclip",
    "hooks": "Opacus hooks",
    "functorch": "Opacus functorch",
    "ghost": "Opacus ghost",
    "opake": "Opake",
}


def measure(model: Model, kinds: tuple[str, ...], turns: int, slow_turns: int) -> dict[str, Any]:
    """Milliseconds of every turn by contender, or the reason why it can't run."""
    torch.manual_seed(0)
    x, y = model.data(model.batch)
    steps: dict[str, Step] = {}
    found: dict[str, Any] = {}
    repeats: dict[str, int] = {}
    for kind in kinds:
        try:
            step = make(kind, model, x, y)
            step()  # warm-up
            start = time.process_time()
            step()
            repeats[kind] = max(1, min(20, round(LEAST_SECONDS / (time.process_time() - start))))
            steps[kind], found[kind] = step, []
        except Exception as problem:
            found[kind] = reason(problem)
    order = list(steps)
    for turn in range(turns):
        for kind in order[turn % len(order) :] + order[: turn % len(order)]:
            if kind in PEERS and turn >= slow_turns:
                found[kind].append(None)
                continue
            start = time.process_time()
            for _ in range(repeats[kind]):
                steps[kind]()
            found[kind].append(1e3 * (time.process_time() - start) / repeats[kind])
    return found


def summarise(times: dict[str, Any]) -> dict[str, Any]:
    """For each contender: median ms, ratio to plain, and the range of ratios of single turns."""
    base = times["plain"]
    summary: dict[str, Any] = {"plain_ms": round(statistics.median(base), 3)}
    for kind, values in times.items():
        if kind == "plain":
            continue
        if isinstance(values, str):
            summary[kind] = {"fails": values}
            continue
        pairs = [
            (value, other) for value, other in zip(values, base, strict=True) if value is not None
        ]
        ratios = [value / other for value, other in pairs]
        ratio = statistics.median(v for v, _ in pairs) / statistics.median(o for _, o in pairs)
        summary[kind] = {
            "ratio": round(ratio, 3),
            "low": round(quantile(ratios, 0.1), 3),
            "high": round(quantile(ratios, 0.9), 3),
            "ms": round(statistics.median(v for v, _ in pairs), 3),
            "turns": len(pairs),
        }
    return summary


def cell(entry: dict[str, Any] | None) -> str:
    """The ratio with its range, or why there is none."""
    if entry is None:
        return "-"
    if "fails" in entry:
        return f"fails: {entry['fails']}"
    return f"{entry['ratio']:.2f}x ({entry['low']:.2f}-{entry['high']:.2f})"


def as_table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    kinds = [kind for kind in TITLES if any(kind in row for row in results.values())]
    rows = []
    for name, row in results.items():
        model = MODELS[name]
        mark = " *" if row.get("replaced") else ""
        opacus = set(PEERS) - set(OPAKE)
        cells = [cell(row.get(kind)) + (mark if kind in opacus else "") for kind in kinds]
        rows.append([f"{model.title}, batch {model.batch}", f"{row['plain_ms']:.1f} ms", *cells])
    text = table(["model", "no privacy", *(TITLES[kind] for kind in kinds)], rows)
    if any(row.get("replaced") for row in results.values()):
        text += (
            "\n\n\\* Opacus refuses torch's own attention or recurrent layer; measured after its"
            " ModuleValidator.fix replaced it."
        )
    return text


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(TABLE), metavar="NAME")
    parser.add_argument(
        "--turns", type=int, default=21, help="turns of plain and zetaclip (default 21)"
    )
    parser.add_argument(
        "--peer-turns",
        type=int,
        default=7,
        help="turns of Opacus's modes, which are slower (default 7)",
    )
    parser.add_argument(
        "--peers", action=argparse.BooleanOptionalAction, default=True, help="also measure Opacus"
    )
    parser.add_argument(
        "--heap",
        choices=("kept", "glibc"),
        default="kept",
        help="keep freed memory in the process (default), or leave that to glibc",
    )
    parser.add_argument(
        "--bfloat16",
        choices=("autocast", "model"),
        default="",
        help="plain and zetaclip under autocast, or with weights in bfloat16",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    if options.heap == "kept":
        keep_freed_memory()
    contenders.HALF = options.bfloat16
    kinds = ("plain", "ours", *(PEERS if options.peers else ()))
    results = {}
    for name in options.models:
        results[name] = summarise(measure(MODELS[name], kinds, options.turns, options.peer_turns))
        if options.peers:
            results[name]["replaced"] = replaced_by_opacus(MODELS[name])
        write_json(options.json, {"turns": options.turns, "heap": options.heap, "steps": results})
    print(as_table(results))


if __name__ == "__main__":
    main()
