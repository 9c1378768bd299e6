"""Two ranks with one thread each, compared with one process: time of a logical step, bytes sent.

    python bench/ranks.py
    python bench/ranks.py --models resnet resnet18 --turns 15 --ranks 2
    python bench/ranks.py --batches 128 512

Both draw Poisson batches of the same q from the same data, so a step has the same expected number
of records. In every turn one process trains an epoch of ten steps while the ranks wait, then the
ranks train one while it waits. The ratio is that of the medians over turns; the range is the 10th
to the 90th percentile of the ratios of single turns. The ranks' time includes the comparison of
weights at the end of an epoch. A batch larger than the model's own is processed in physical batches
of that size, in all processes. The bench needs as many free cores as ranks; with fewer it measures
the scheduler.

"Ceiling" is the same ratio for as many processes that share the records, work at the same time and
never communicate: the limit of cores that share memory and clock. "Less processor time" compares
the busiest rank with one process. It says less, but hardly depends on other load.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from common import one_thread, quantile, table, write_json

one_thread()

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from networks import MODELS
from torch.utils.data import DataLoader, TensorDataset

STEPS = 10  # of an epoch


def serve(rank: int, ranks: int, name: str, batch: int, pipe: Any, joined: bool) -> None:
    """One process: trains an epoch on request, and sends how long it took.

    Args:
        rank: Its rank.
        ranks: How many there are.
        name: The model.
        batch: The expected logical batch size.
        pipe: Where requests come from.
        joined: Whether the processes train together; else each has its share of the records.
    """
    from zetaclip import PrivacyEngine

    torch.set_num_threads(1)
    share = 1 if joined else ranks
    ranks = ranks if joined else 1
    if ranks > 1:
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, ranks, True, wait_for_workers=False)
            pipe.send(store.port)
        else:
            store = dist.TCPStore("127.0.0.1", pipe.recv(), ranks, False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    model = MODELS[name]
    torch.manual_seed(0)
    x, y = model.data(STEPS * batch // share)
    module = model.make()
    engine = PrivacyEngine(accountant="rdp", seed=0)
    module, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.01),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=batch // share),
        physical_batch_size=model.batch,
        noise_multiplier=1.0,
        clipping=1.0,
        sample_rate=1 / STEPS,
        num_examples=len(x),
    )
    while pipe.recv():
        before = 0 if engine.ranks is None else engine.ranks.payload
        start, busy = time.perf_counter(), time.process_time()
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(module(inputs), labels).backward()
            optimizer.step()
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        sent = 0 if engine.ranks is None else engine.ranks.payload - before
        pipe.send(
            (
                seconds / STEPS,
                busy / STEPS,
                sent / STEPS,
                sum(4 * p.numel() for p in module.parameters()),
            )
        )
    if ranks > 1:
        dist.destroy_process_group()


def start(ranks: int, name: str, batch: int, joined: bool = True) -> tuple[list[Any], list[Any]]:
    """Starts the processes; returns their pipes and themselves."""
    context = mp.get_context("spawn")
    pipes, processes = [], []
    for rank in range(ranks):
        pipe, other = context.Pipe()
        process = context.Process(
            target=serve, args=(rank, ranks, name, batch, other, joined), daemon=True
        )
        process.start()
        pipes.append(pipe)
        processes.append(process)
    if ranks > 1 and joined:
        port = pipes[0].recv()
        for pipe in pipes[1:]:
            pipe.send(port)
    return pipes, processes


def turn(pipes: list[Any]) -> tuple[float, float, float, int]:
    """Seconds, CPU time and bytes of a step, by the slowest rank, and the parameters' bytes."""
    for pipe in pipes:
        pipe.send(True)
    answers = [pipe.recv() for pipe in pipes]
    return (
        max(a[0] for a in answers),
        max(a[1] for a in answers),
        max(a[2] for a in answers),
        answers[0][3],
    )


def measure(name: str, batch: int, ranks: int, turns: int) -> dict[str, Any]:
    """The figures of one model and batch."""
    groups = [
        start(1, name, batch),
        start(ranks, name, batch),
        start(ranks, name, batch, joined=False),
    ]
    for pipes, _ in groups:
        turn(pipes)  # warm-up
    turned = []
    for number in range(turns):
        order = range(len(groups)) if number % 2 == 0 else reversed(range(len(groups)))
        taken = {who: turn(groups[who][0]) for who in order}
        turned.append([taken[who] for who in range(len(groups))])
    for pipes, processes in groups:
        for pipe in pipes:
            pipe.send(False)
        for process in processes:
            process.join(20)
    ones, manys, aparts = ([taken[who][0] for taken in turned] for who in range(len(groups)))
    ratios = [one / many for one, many in zip(ones, manys, strict=True)]
    return {
        "model": name,
        "batch": batch,
        "one_ms": 1e3 * statistics.median(ones),
        "ranks_ms": 1e3 * statistics.median(manys),
        "faster": statistics.median(ones) / statistics.median(manys),
        "low": quantile(ratios, 0.1),
        "high": quantile(ratios, 0.9),
        "ceiling": statistics.median(ones) / statistics.median(aparts),
        "processor": (
            statistics.median(one[1] for one, _, _ in turned)
            / statistics.median(many[1] for _, many, _ in turned)
        ),
        "sent": statistics.median(many[2] for _, many, _ in turned),
        "parameters": turned[0][1][3],
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["resnet"], metavar="NAME")
    parser.add_argument(
        "--batches",
        nargs="+",
        type=int,
        metavar="L",
        help="expected logical batches; without it the model's own",
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    results = [
        measure(name, batch, options.ranks, options.turns)
        for name in options.models
        for batch in options.batches or [MODELS[name].batch]
    ]
    write_json(options.json, {"ranks": options.ranks, "turns": options.turns, "models": results})
    rows = [
        [
            f"{MODELS[row['model']].title}, expected batch {row['batch']}",
            f"{row['one_ms']:.1f} ms",
            f"{row['ranks_ms']:.1f} ms",
            f"{row['faster']:.2f}x ({row['low']:.2f}-{row['high']:.2f})",
            f"{row['ceiling']:.2f}x",
            f"{row['processor']:.2f}x",
            f"{row['sent'] / row['parameters']:.4f}x",
        ]
        for row in results
    ]
    head = [
        "model",
        "one process",
        f"{options.ranks} ranks",
        "faster",
        "ceiling",
        "less processor time",
        "bytes per step / bytes of parameters",
    ]
    print(table(head, rows))


if __name__ == "__main__":
    main()
