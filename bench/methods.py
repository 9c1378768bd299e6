"""What each method costs per step, over DP-SGD in the same run.

    python bench/methods.py                              # the CNN and the MLP
    python bench/methods.py --models cnn --methods dp-sam quantile --seconds 20

A step is a whole update on one thread: forward, backward, clip, noise, update and what else the
method does; with two passes it is both. In every turn each method takes some steps right before or
right after DP-SGD, so that a machine that slows down slows both. A figure is the median over the
turns of the ratio of the two. A spectral probe, which happens every 50 steps, is timed separately
and spread over them. Freed memory is kept in the process, as `zetaclip train` keeps it; see
`bench/step.py`.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

from common import one_thread, quantile, table, write_json

one_thread()

import torch
import torch.nn.functional as F
from networks import MODELS, Model
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from zetaclip import PrivacyEngine, methods
from zetaclip.cli.allocation import keep_freed_memory

# The clock and the load of a machine change within tenths of a second, so turns are short and many.
TURN_SECONDS = 0.01
LEAST_TURNS = 15
clock = time.perf_counter
# Enough planned updates for any number of turns. The options keep noise until the end of a decay,
# and make a first stage one step long.
EPOCHS = 20_000
OPTIONS: dict[str, dict[str, Any]] = {
    "adp-adamw": {"ratio": 0.99999},
    "adadpigu": {"warmup": 1 / EPOCHS},
    "dp-sam same": {"ascent_batch": "same"},
}
NAMES = [*methods.names(private=True), "dp-sam same"]
# The most that a method may cost over DP-SGD.
GOALS: dict[str, float] = dict.fromkeys(
    ("auto-s", "dp-psac", "ww-dp-sgd", "dp-sat", "slaclip", "quantile", "bounded-adaptive"), 1.05
)
GOALS |= dict.fromkeys(("dp-adam", "dp-adam-bc", "dp-adamw", "adp-adamw", "dp-adam-ac"), 1.15)
GOALS |= {"dp-sam": 2.1, "dp-sam same": 2.1, "dp-is": 1.3, "adaclip": 2.0, "adadpigu": 2.0}


def make(name: str, model: Model, x: Tensor, y: Tensor) -> tuple[Callable[[], None], float]:
    """A function that takes one update, and the seconds of a rare probe spread over updates."""
    method = methods.get(name.split()[0], **OPTIONS.get(name, {}))
    torch.manual_seed(0)
    network = model.make()
    probe_seconds = _probe_seconds(method, network)
    network, optimizer, loader = PrivacyEngine(accountant="rdp", seed=0).make_private(
        module=network,
        optimizer=method.optimizer(network.parameters(), lr=1e-3),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        noise_multiplier=100.0,
        method=method,
        sample_rate=1.0,
        num_examples=len(x),
        decouple_lr=True,
        epochs=EPOCHS,
        target_delta=1e-5,
    )

    def step() -> None:
        for inputs, labels in loader:  # q = 1: an epoch is one update
            optimizer.zero_grad()
            F.cross_entropy(network(inputs), labels).backward()
            optimizer.step()

    return step, probe_seconds


def _probe_seconds(method: methods.Method, network: Any) -> float:
    period = getattr(method.controller, "period", None)
    if period is None:
        return 0.0
    controller: Any = method.controller
    probe = controller.probe.bind(network, dict(network.named_parameters()))
    # The controller's own period decides when it reads, so time a step at which it does.
    times = []
    for _ in range(7):
        start = clock()
        controller.update(probe.read(network, period), controller.init())
        times.append(clock() - start)
    controller.probe.period = 10**9  # timed here, so not in the turns
    return statistics.median(times) / period


def measure(model: Model, names: list[str], seconds: float) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds per update of each method, and of DP-SGD beside it, in every turn."""
    torch.manual_seed(0)
    x, y = model.data(model.batch)
    made = {name: make(name, model, x, y) for name in names}
    repeats = {}
    for name, (step, _) in made.items():
        for _ in range(3):  # warm-up
            step()
        start = clock()
        step()
        repeats[name] = max(1, round(TURN_SECONDS / (clock() - start)))

    def taken(name: str) -> float:
        step, seldom = made[name]
        start = clock()
        for _ in range(repeats[name]):
            step()
        return 1e3 * ((clock() - start) / repeats[name] + seldom)

    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    turns = max(LEAST_TURNS, round(seconds / (2e-3 * taken("dp-sgd") * repeats["dp-sgd"])))
    for turn in range(turns):
        for name in names:
            pair = [taken(who) for who in ((name, "dp-sgd") if turn % 2 else ("dp-sgd", name))]
            found[name].append((pair[0], pair[1]) if turn % 2 else (pair[1], pair[0]))
    return found


def summarise(times: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Medians and quartiles by method."""
    summary: dict[str, Any] = {}
    for name, pairs in times.items():
        ratios = [own / base for own, base in pairs]
        summary[name] = {
            "ms": round(statistics.median(own for own, _ in pairs), 3),
            "ratio": round(statistics.median(ratios), 3),
            "low": round(quantile(ratios, 0.25), 3),
            "high": round(quantile(ratios, 0.75), 3),
        }
    return summary


def as_table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    models = list(results)
    rows = []
    for name in results[models[0]]:
        goal = GOALS.get(name)
        cells = []
        for model in models:
            entry = results[model][name]
            cells.append(f"{entry['ratio']:.2f}x ({entry['low']:.2f}-{entry['high']:.2f})")
        rows.append([name, *cells, f"{goal:.2f}x" if goal else "-"])
    head = [
        f"{MODELS[model].title}, DP-SGD {results[model]['dp-sgd']['ms']:.1f} ms" for model in models
    ]
    return table(["method", *head, "at most"], rows)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=["cnn", "mlp"], metavar="NAME"
    )
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument(
        "--seconds",
        type=float,
        default=6.0,
        help="time for each method and network (default: 6)",
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="measure CPU time, for a machine with other load",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    keep_freed_memory()
    global clock
    clock = time.process_time if options.cpu else time.perf_counter
    names = list(dict.fromkeys(["dp-sgd", *options.methods]))
    results = {}
    for model in options.models:
        results[model] = summarise(measure(MODELS[model], names, options.seconds))
        write_json(
            options.json, {"seconds": options.seconds, "cpu": options.cpu, "methods": results}
        )
    print(as_table(results))


if __name__ == "__main__":
    main()
