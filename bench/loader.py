"""An epoch of MNIST-sized data: Poisson loading, private step and loop, compared with Opacus.

    python bench/loader.py                  # a quarter of an epoch
    python bench/loader.py --share 1        # a whole one

The data are 60000 random images of 1x28x28 in a TensorDataset, the batch is 256, the network is
that of Opacus's MNIST example. Three loops take turns of ten batches: an ordinary DataLoader
without privacy, zetaclip, and Opacus's DPDataLoader in its fastest mode. "Loading" is the time
inside ``next()`` of each loader, "all" is loading and step together.

A second table is for wide records: a linear layer on 4097 features with 5000 records in a batch.
It compares the CPU time inside ``next()`` with that of one ``index_select`` into fresh memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from common import one_thread, table, write_json

one_thread()

import torch
import torch.nn.functional as F
from contenders import PEERS, opacus_private
from networks import MODELS, Model
from torch.utils.data import DataLoader, TensorDataset

RECORDS, BATCH, TURN = 60_000, 256, 10
FEATURES, WIDE_BATCH, WIDE_TURNS = 4097, 5000, 15


class Loop:
    """A training loop that can be run a few batches at a time."""

    def __init__(self, network: Any, optimizer: Any, loader: Any, criterion: Callable) -> None:
        self.network, self.optimizer, self.loader, self.criterion = (
            network,
            optimizer,
            loader,
            criterion,
        )
        self.batches: Iterator[Any] = iter(())
        self.loading: list[float] = []  # seconds per batch
        self.whole: list[float] = []

    def run(self, batches: int) -> None:
        """Trains on so many batches."""
        for _ in range(batches):
            start = time.perf_counter()
            batch = next(self.batches, None)
            if batch is None:
                self.batches = iter(self.loader)
                batch = next(self.batches)
            loaded = time.perf_counter()
            x, y = batch
            self.optimizer.zero_grad()
            self.criterion(self.network(x), y).backward()
            self.optimizer.step()
            self.loading.append(loaded - start)
            self.whole.append(time.perf_counter() - start)

    def forget(self) -> None:
        """Drops the times so far."""
        self.loading, self.whole = [], []


def plain(model: Model, data: TensorDataset) -> Loop:
    """The loop without privacy."""
    network = model.make()
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    return Loop(network, torch.optim.SGD(network.parameters(), lr=0.01), loader, F.cross_entropy)


def ours(model: Model, data: TensorDataset) -> Loop:
    """The loop with zetaclip."""
    from zetaclip import PrivacyEngine

    network = model.make()
    network, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.01),
        data_loader=DataLoader(data, batch_size=BATCH),
        noise_multiplier=1.0,
        clipping=1.0,
        sample_rate=BATCH / RECORDS,
        num_examples=RECORDS,
    )
    return Loop(network, optimizer, loader, F.cross_entropy)


def opacus(model: Model, data: TensorDataset, mode: str) -> Loop:
    """The loop with a mode of Opacus."""
    loader = DataLoader(data, batch_size=BATCH)
    network, optimizer, loader, criterion = opacus_private(
        model.make(), loader, mode, poisson_sampling=True
    )
    return Loop(network, optimizer, loader, criterion)


def wide() -> list[list[str]]:
    """Milliseconds of CPU time for a batch of wide records, at q = 1 and q = 1/2."""
    from zetaclip import PrivacyEngine

    rows = []
    for records in (WIDE_BATCH, 2 * WIDE_BATCH):
        x, y = torch.randn(records, FEATURES), torch.randint(0, 10, (records,))
        network = torch.nn.Linear(FEATURES, 10)
        network, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
            module=network,
            optimizer=torch.optim.SGD(network.parameters(), lr=0.01),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=WIDE_BATCH),
            noise_multiplier=1.0,
            clipping=1.0,
            sample_rate=WIDE_BATCH / records,
            num_examples=records,
        )
        times: dict[str, list[float]] = {"next": [], "step": [], "select": []}
        chosen = torch.arange(0, records, records // WIDE_BATCH)
        clock, batches = time.process_time, iter(())
        for _ in range(WIDE_TURNS):
            start = clock()
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)
                batch = next(batches)
            loaded = clock()
            optimizer.zero_grad()
            F.cross_entropy(network(batch[0]), batch[1]).backward()
            optimizer.step()
            stepped = clock()
            x.index_select(0, chosen)
            times["select"].append(clock() - stepped)
            times["step"].append(stepped - loaded)
            times["next"].append(loaded - start)
        own = {name: f"{1e3 * statistics.median(found):.1f} ms" for name, found in times.items()}
        rows.append([f"{WIDE_BATCH / records:g}", own["next"], own["select"], own["step"]])
    return rows


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--share", type=float, default=0.25, help="of an epoch of 235 batches (default 0.25)"
    )
    parser.add_argument("--model", choices=("mnist", "cnn"), default="mnist")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = MODELS[options.model]
    data = TensorDataset(*model.data(RECORDS))
    modes = {mode: opacus(model, data, mode) for mode in PEERS}
    for loop in modes.values():
        loop.run(5)
    best = min(PEERS, key=lambda mode: statistics.median(modes[mode].whole))
    loops = {
        "no privacy, DataLoader": plain(model, data),
        "zetaclip": ours(model, data),
        f"Opacus {best}": modes[best],
    }
    for loop in loops.values():
        loop.run(2)
        loop.forget()
    batches = max(TURN, round(options.share * 235))
    for done in range(0, batches, TURN):
        for loop in loops.values():
            loop.run(min(TURN, batches - done))

    base = statistics.median(next(iter(loops.values())).whole)
    rows, figures = [], {}
    for name, loop in loops.items():
        load, whole = statistics.median(loop.loading), statistics.median(loop.whole)
        figures[name] = {
            "loading_ms": round(1e3 * load, 3),
            "whole_ms": round(1e3 * whole, 3),
            "batches": len(loop.whole),
        }
        rows.append(
            [
                name,
                f"{1e3 * load:.2f} ms",
                f"{1e3 * whole:.1f} ms",
                f"{235 * whole:.1f} s",
                f"{whole / base:.2f}x",
            ]
        )
    print(
        table(
            [
                "loop",
                "loading a batch",
                "a batch in all",
                "an epoch of 235 batches",
                "over no privacy",
            ],
            rows,
        )
    )
    print(f"\nMedians over {batches} batches each; {model.title}.\n")
    wide_rows = wide()
    print(table(["q", "loading a batch", "index_select", "forward, backward, step"], wide_rows))
    print(f"\nMedians over {WIDE_TURNS} batches of {WIDE_BATCH} records of {FEATURES} features.")
    write_json(options.json, {"loader": figures, "model": options.model, "wide": wide_rows})


if __name__ == "__main__":
    main()
