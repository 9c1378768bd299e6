"""Memory and time of a rank whose parameters are sharded, over one that holds everything.

    python bench/shards.py
    python bench/shards.py --ranks 2 --batch 2 --width 768 --layers 4

Two ranks with one thread each train a decoder by AdamW, once as it is and once after
``torch.distributed.fsdp.fully_shard`` of every block, of the table, the head and the rest. Memory
is the peak of a rank in its steps over what it had before the model was built (VmHWM, Linux only),
in a run in which freed memory goes back to the system at once. Time is the processor time of a step
on the busiest rank, in another run without that. A batch has one chunk. The second row is without
privacy: by ``fully_shard`` alone, and by ranks that hold everything and add up their gradients.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

from common import one_thread, table, write_json

one_thread()

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from sequences import Decoder
from torch.utils.data import DataLoader, TensorDataset

TOKENS, VOCABULARY = 64, 8192


def memory(what: str) -> float:
    """A line of this process's status, in MiB."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def train(rank: int, options: Any, sharded: bool, private: bool, layers: int, width: int) -> tuple:
    """The peak of this rank over what it had before, the time of a step, and the parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from zetaclip import PrivacyEngine

    torch.manual_seed(0)
    records = options.ranks * options.batch
    ids = torch.randint(0, VOCABULARY, (records, TOKENS + 1))
    mesh = init_device_mesh("cpu", (options.ranks,))
    before = memory("VmRSS")
    module: Any = Decoder(layers, width, width // 64, TOKENS, VOCABULARY)
    if sharded:
        for part in (*module.blocks, module.table, module.head):
            fully_shard(part, mesh=mesh)
        fully_shard(module, mesh=mesh)
    count = sum(p.numel() for p in module.parameters())
    optimizer: Any = torch.optim.AdamW(module.parameters(), lr=1e-4)
    loader: Any = [(ids[rank :: options.ranks],)]
    engine = PrivacyEngine(seed=0)
    if private:
        module, optimizer, loader = engine.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(ids), batch_size=records),
            noise_multiplier=1.0,
            clipping=1.0,
            num_examples=records,
        )
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    taken = []
    for _ in range(options.steps):
        begun = time.process_time()
        for (rows,) in loader:
            optimizer.zero_grad()
            F.cross_entropy(module(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
            if not (private or sharded):
                for parameter in module.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
        taken.append(time.process_time() - begun)
    peak = memory("VmHWM") - before
    if private:
        engine.detach()
    return peak, statistics.median(taken[1:]), count


def serve(rank: int, options: Any, sharded: bool, private: bool, pipe: Any) -> None:
    """One rank: trains a tiny model, for what torch imports on the way, and then the other one.

    Sends the figures of the second.
    """
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
    torch.set_num_threads(1)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, options.ranks, True, wait_for_workers=False)
        pipe.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), options.ranks, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    train(rank, options, sharded, private, 1, 64)
    pipe.send(train(rank, options, sharded, private, options.layers, options.width))
    dist.barrier()
    dist.destroy_process_group()


def run(options: Any, sharded: bool, private: bool, gives_back: bool) -> list[tuple]:
    """What every rank has sent."""
    os.environ.pop("MALLOC_MMAP_THRESHOLD_", None)
    if gives_back:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 17)
    context = mp.get_context("spawn")
    pipes, processes = [], []
    for rank in range(options.ranks):
        pipe, other = context.Pipe()
        process = context.Process(target=serve, args=(rank, options, sharded, private, other))
        process.start()
        pipes.append(pipe)
        processes.append(process)
    port = pipes[0].recv()
    for pipe in pipes[1:]:
        pipe.send(port)
    answers = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join(30)
    return answers


def measure(options: Any, sharded: bool, private: bool) -> dict[str, float]:
    """The figures of the rank that needs most."""
    peaks = run(options, sharded, private, True)
    times = run(options, sharded, private, False)
    return {
        "mib": max(answer[0] for answer in peaks),
        "seconds": max(answer[1] for answer in times),
        "parameters": peaks[0][2],
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384, help="a multiple of 64")
    parser.add_argument("--batch", type=int, default=4, help="records of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    rows, figures = [], []
    for private in (True, False):
        whole, parts = (measure(options, sharded, private) for sharded in (False, True))
        figures += [{"private": private, "whole": whole, "sharded": parts}]
        rows.append(
            [
                "private" if private else "without privacy",
                f"{whole['mib']:.0f} MiB",
                f"{parts['mib']:.0f} MiB",
                f"{parts['mib'] / whole['mib']:.2f}x",
                f"{parts['seconds'] / whole['seconds']:.2f}x",
            ]
        )
    count = figures[0]["whole"]["parameters"]
    write_json(options.json, {**vars(options), "figures": figures})
    print(f"{count:,.0f} parameters, {options.ranks} ranks, {options.batch} records each")
    head = ["training", "a rank with everything", "a rank with its part", "memory", "CPU time"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
