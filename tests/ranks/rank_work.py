"""What the ranks of a pool are asked to do. Runs as well with no group at all: then it is the one
process to compare with."""

import contextlib
import random
import time

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from zetaclip import ClipRule, PrivacyEngine, methods
from zetaclip.engine._data_digest import stable_digest

SIZE, INPUTS, CLASSES = 40, 12, 4


def network(dropout=0.0, width=24):
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(INPUTS, width),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, CLASSES),
    )


def data(size=SIZE):
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(size, INPUTS, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (size,), generator=generator))


def make(
    method="dp-sgd",
    *,
    sigma=1.0,
    q=0.5,
    seed=3,
    steps=6,
    size=SIZE,
    module=None,
    options=None,
    lr=None,
    dataset=None,
    shard=None,
    **more,
):
    """(engine, module, optimizer, loader); ``shard`` spreads the parameters over the ranks."""
    if method == "auto":  # a network has no gain that is known by itself
        options = {"gain": 2.0, **(options or {})}
    chosen = methods.get(method, **(options or {})) if isinstance(method, str) else method
    module = network() if module is None else module
    if shard is not None:
        spread(module, shard)
    dataset = data(size) if dataset is None else dataset
    engine = PrivacyEngine(accountant="rdp", seed=seed)
    per_epoch = max(1, round(1 / q))
    made = engine.make_private(
        module=module,
        optimizer=chosen.optimizer(module.parameters(), lr),
        data_loader=DataLoader(dataset, batch_size=max(1, round(q * size))),
        noise_multiplier=sigma,
        method=chosen,
        sample_rate=q,
        num_examples=size,
        epochs=steps / per_epoch,
        target_delta=1e-5,
        **more,
    )
    return (engine, *made)


def loop(module, optimizer, loader, steps, chunks=None):
    done = 0
    while done < steps:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            if chunks is not None:
                chunks.append(len(y))
            done += optimizer.stepped
            if done >= steps:
                return


def spread(module, how="parts"):
    """By fully_shard: every part that has parameters and then the rest, or all of it at once."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():  # the one process to compare with
        return module
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if how == "parts":
        for part in module.children():
            if any(True for _ in part.parameters()):
                fully_shard(part, mesh=mesh)
    elif how == "together":
        fully_shard([module[0], module[3]], mesh=mesh)
    elif how == "kept":
        fully_shard(module[0], mesh=mesh, reshard_after_forward=False)
    return fully_shard(module, mesh=mesh)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def flat(module):
    return torch.cat([whole(p.detach()).flatten() for p in module.parameters()]).clone()


def finish(engine):
    rows = [
        (r.step, r.batch, r.query, r.sensitivity, r.noise_multiplier, r.noise_std, r.sample_rate)
        for r in engine.ledger.rows()
    ]
    engine.detach()
    return rows


def train(rank, method, steps, more):
    """Weights, ledger and ε of a run."""
    engine, module, optimizer, loader = make(method, steps=steps, **more)
    loop(module, optimizer, loader, steps)
    clip = optimizer.clip
    return {
        "weights": flat(module),
        "rows": finish(engine),
        "epsilon": engine.get_epsilon(1e-5),
        "clip": clip,
    }


# -- what goes on inside a run


def watched(rank, steps, more):
    """Of every logical batch: this rank's records in each chunk, and the gradient that came out,
    with the weights before."""
    engine, module, optimizer, loader = make(steps=steps, lr=0.1, **more)
    run = engine._loop
    found, done = [], 0
    while done < steps:
        for x, y in loader:
            before = flat(module)
            chunks = [chunk.clone() for chunk in run.batch.chunks]
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            if optimizer.stepped:
                gradient = torch.cat([whole(p.grad).flatten() for p in module.parameters()]).clone()
                found.append({"chunks": chunks, "gradient": gradient, "weights": before})
                done += 1
                if done >= steps:
                    break
    finish(engine)
    return found


def counted_collectives(rank, physical):
    """Names of all collectives of one logical batch, and whether one ran in forward or backward."""
    import torch.distributed as dist

    calls, inside = [], []
    kept = {
        name: getattr(dist, name) for name in ("all_reduce", "broadcast", "all_gather", "barrier")
    }

    def noting(name):
        def call(*arguments, **options):
            calls.append(name)
            return kept[name](*arguments, **options)

        return call

    engine, module, optimizer, loader = make(q=1.0, steps=1, physical_batch_size=physical)
    for name in kept:
        setattr(dist, name, noting(name))
    try:
        for x, y in loader:
            optimizer.zero_grad()
            before = len(calls)
            F.cross_entropy(module(x), y).backward()
            inside.append(len(calls) - before)
            optimizer.step()
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
    payload = engine.ranks.payload
    finish(engine)
    return {
        "calls": calls,
        "inside": sum(inside),
        "chunks": len(inside),
        "payload": payload,
        "numel": flat(module).numel(),
    }


def wrong_on_one_rank(rank, what, **more):
    """Rank 1 is not as rank 0; every rank should hear of it."""
    if what == "sigma":
        make(sigma=1.0 + rank)
    elif what == "data":
        make(size=SIZE + rank)
    elif what == "split":  # with a generator that was not seeded alike
        split = torch.Generator().manual_seed(rank)
        make(dataset=random_split(data(2 * SIZE), [SIZE, SIZE], generator=split)[0])
    elif what == "order":
        x, y = data().tensors
        make(dataset=TensorDataset(x.flip(0), y.flip(0)) if rank else data())
    elif what == "files":
        make(dataset=Lazy(rank))
    elif what == "units":  # by ids that every process numbers in its own way, as hash() does
        owners = (torch.arange(SIZE) // 2 + 7 * rank) % (SIZE // 2)
        augmented = Lazy(augment="own")  # looks different every time, so records tell nothing
        make(dataset=augmented, size=SIZE // 2, units=owners, rows_per_unit=2)
    elif what == "network":
        make(module=network() if rank == 0 else nn.Linear(INPUTS, CLASSES))
    elif what == "weights":
        engine, module, optimizer, loader = make(q=0.5)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            if rank == 1:  # between the batches: while one is out, the guard sees it first
                with torch.no_grad():
                    module[3].weight[0, 0] += 1e-6
    elif what == "rule":
        engine, module, optimizer, loader = make(_Liar(rank == 1), **more)
        try:
            loop(module, optimizer, loader, 1)
        finally:
            engine.detach()
    elif what == "grad":
        engine, module, optimizer, loader = make(**more)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(module(x), y)
            if rank == 1:
                module[0].weight.grad = torch.zeros_like(module[0].weight)
            loss.backward()
            try:
                optimizer.step()
            finally:
                engine.detach()


class Lazy(Dataset):
    """Not in memory. ``other`` moves the labels, ``augment`` says whose generator makes every look
    another one."""

    def __init__(self, other=0, augment=None):
        self.rows, self.other, self.augment = data(), other, augment
        self.own = numpy.random.default_rng()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        x, y = self.rows[i]
        if self.augment == "unreadable":
            raise OSError("not on this machine")
        noise = {
            "torch": lambda: torch.randn(1).item(),
            "numpy": numpy.random.randn,
            "python": random.random,
            "own": self.own.standard_normal,
        }.get(self.augment, lambda: 0.0)
        return x + 1e-3 * float(noise()), (y + self.other) % CLASSES


def loses_what_it_was_told(rank, path, shard):
    """Rank 1 is interrupted between its update and the next C, and both go on: with a batch, and
    after a checkpoint was loaded. What was said, and the weights before and after it."""
    engine, module, optimizer, loader = make("quantile", shard=shard, options={"clip": 1.0})
    loop(module, optimizer, loader, 1)
    engine.save(path)
    conclude = engine.ranks.conclude

    def interrupted(*arguments, **options):
        told = conclude(*arguments, **options)
        engine.ranks.conclude = conclude
        if rank == 1:
            raise KeyboardInterrupt
        return told

    engine.ranks.conclude = interrupted
    with contextlib.suppress(KeyboardInterrupt):
        loop(module, optimizer, loader, 1)
    clip, before, said = optimizer.clip, flat(module), ""
    try:
        loop(module, optimizer, loader, 1)
    except RuntimeError as error:
        said = str(error)
    after = flat(module)
    engine.load(path)
    loop(module, optimizer, loader, 1)
    updates = engine.updates
    finish(engine)
    return {"clip": clip, "said": said, "before": before, "after": after, "updates": updates}


def joins(rank, augment):
    """Ranks whose data are the same, and look different at every look; whether streams outside are
    as they were."""
    module = network()
    random.seed(rank), numpy.random.seed(rank), torch.manual_seed(rank)
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    engine, *_ = make(dataset=Lazy(augment=augment), module=module)
    digest = stable_digest(engine._loop.batches.dataset)
    finish(engine)
    after = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    return digest, before == after


def _Liar(lies):
    from dataclasses import dataclass

    from zetaclip import Method

    @dataclass(frozen=True)
    class Rule(ClipRule):
        name: str = "liar"

        def factors(self, norms, clip, generator):
            return torch.full_like(norms, 1e6 if lies else 1e-6)

        def sensitivity(self, clip):
            return clip

        def __repr__(self):
            return "Rule()"

    return Method("toy-liar", rule=Rule())


def starts_apart(rank):
    """Other initial weights on every rank: rank 0's are sent."""
    torch.manual_seed(100 + rank)
    module = nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    module.register_buffer("scale", torch.rand(3) + rank)
    before = flat(module)
    engine, module, *_ = make(module=module)
    finish(engine)
    return before, flat(module), module.scale.clone()


def refused(rank, kind):
    """What is said of a module that is distributed in another way."""
    from torch.distributed.device_mesh import init_device_mesh

    module = network()
    if kind == "ddp":
        module = nn.parallel.DistributedDataParallel(module)
    elif kind == "tensor-parallel":
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        module = parallelize_module(module, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    make(module=module)


def literal(rank, steps, more):
    """The paper's literal forms, which claim no ε: weights, and how many updates were released."""
    engine, module, optimizer, loader = make(
        steps=steps, normalize="realized", empty="skip", **more
    )
    while engine.updates < steps:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
    return flat(module), len(finish(engine))


def looks_first(rank, seeds):
    """Takes the first batch, runs it forward, and starts the epoch again; one of the ranks may seed
    torch in between."""
    engine, module, optimizer, loader = make(module=network(0.5))
    x, _ = next(iter(loader))
    module(x)
    if seeds and rank == 1:
        torch.manual_seed(9)
    loop(module, optimizer, loader, 2)
    return flat(module), finish(engine)


def drawn_in_the_loop(rank):
    """What torch draws while a batch is out, and what after it, from one public seed."""
    _, module, optimizer, loader = make()
    torch.manual_seed(1)
    (x, y) = next(iter(loader))
    inside = torch.rand(3)
    torch.nn.functional.cross_entropy(module(x), y).backward()
    optimizer.step()
    return inside, torch.rand(3)


class Nameless(ClipRule):
    """A clip rule whose text is its address."""

    name = "nameless"

    def factors(self, norms, clip, generator):
        return clip / (norms + 1.0)

    def sensitivity(self, clip):
        return clip


def with_nameless_rule(rank):
    from zetaclip import Method

    engine, module, optimizer, loader = make(Method("toy-nameless", rule=Nameless()))
    loop(module, optimizer, loader, 2)
    return flat(module), finish(engine)


# -- saving and loading


def saved_and_gone_on(rank, path, method, cut, steps, more):
    """Saves after ``cut`` updates, goes on to ``steps``: what a replay must come to."""
    engine, module, optimizer, loader = make(method, steps=steps, module=network(0.2), **more)
    torch.manual_seed(50 + rank)
    loop(module, optimizer, loader, cut)
    engine.save(path, extra={"cut": cut})
    loop(module, optimizer, loader, steps - cut)
    return flat(module), finish(engine)


def loaded_and_gone_on(rank, path, method, cut, steps, replay, more):
    engine, module, optimizer, loader = make(method, steps=steps, module=network(0.2), **more)
    torch.manual_seed(77)
    extra = engine.load(path, replay=replay)
    assert extra == {"cut": cut} and engine.updates == cut
    loop(module, optimizer, loader, steps - cut)
    return flat(module), finish(engine)


def saved_twice(rank, first, second):
    """Into two folders, and gone on from the first: the second one's journal hears nothing of
    it."""
    engine, module, optimizer, loader = make(seed=None)
    loop(module, optimizer, loader, 1)
    engine.save(first)
    engine.save(second)
    finish(engine)
    return replays(rank, first)


def replays(rank, path):
    engine, module, optimizer, loader = make(seed=None)
    engine.load(path, replay=True)
    loop(module, optimizer, loader, 1)
    return flat(module), finish(engine)


def replays_another_loop(rank, path, early, shard=None):
    """A replay whose loss is another one than the run's; ``early`` if it was loaded before the run
    went on.

    Its weights before, after it was refused, and after the batch was taken again; what was said;
    and the releases.
    """

    def other_loss():
        for x, y in loader:
            optimizer.zero_grad()
            (0.5 * F.cross_entropy(module(x), y)).backward()
            optimizer.step()
            return

    first, other, own, batches = make(seed=None, shard=shard)
    loop(other, own, batches, 1)
    first.save(path)
    if not early:
        loop(other, own, batches, 1)
    engine, module, optimizer, loader = make(seed=None, shard=shard)
    engine.load(path, replay=True)
    if early:
        loop(other, own, batches, 1)
    before, said = flat(module), ""
    try:
        other_loss()
    except RuntimeError as error:
        said = str(error)
    refused = flat(module), all(p.grad is None for p in module.parameters()), engine.updates
    other_loss()
    finish(first)
    return {
        "before": before,
        "refused": refused,
        "said": said,
        "after": flat(module),
        "rows": finish(engine),
    }


def saves_alone(rank, path):
    """Rank 0 saves and rank 1 goes on training: a mistake that must not hang."""
    from zetaclip.engine._group import _presence as presence

    presence.POLL = 0.1
    engine, module, optimizer, loader = make(steps=6)
    loop(module, optimizer, loader, 2)
    if rank == 0:
        engine.save(path)
    loop(module, optimizer, loader, 4)


def comes_late(rank, late):
    """One rank reaches ``make_private`` long after the others have begun to look around."""
    from zetaclip.engine._group import _presence as presence

    poll, silent = presence.POLL, presence.SILENT
    # Well above what a busy machine delays a process by, and well below the delay.
    presence.POLL, presence.SILENT = 0.1, 4.0
    try:
        if rank == late:
            time.sleep(6.0)
        engine, module, optimizer, loader = make(steps=2)
        loop(module, optimizer, loader, 2)
        return flat(module), finish(engine)
    finally:
        presence.POLL, presence.SILENT = poll, silent


def trains_forever(rank, pipe_path, shard=None):
    from zetaclip.engine._group import _presence as presence

    presence.GONE, presence.POLL, presence.BEAT = 1.5, 0.3, 0.2
    _, module, optimizer, loader = make(steps=10**6, shard=shard)
    with open(f"{pipe_path}.{rank}", "w") as file:
        file.write("running")
    loop(module, optimizer, loader, 10**6)


# -- the command


def command(rank, words, signal_at=None):
    """``zetaclip ...`` on this rank: its exit code and what it printed."""
    import io
    import os
    import signal

    from zetaclip.cli import main
    from zetaclip.training.steps import PrivateSteps

    moved = PrivateSteps.moved

    def interrupted(self, clip=None):
        moved(self, clip)
        if signal_at is not None and rank == 1 and self.done == signal_at:
            os.kill(os.getpid(), signal.SIGTERM)

    PrivateSteps.moved = interrupted
    os.environ["RANK"] = str(rank)  # as torchrun does
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
    finally:
        PrivateSteps.moved = moved
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def page(rank, text):
    """The code of a page of the docs, as it stands there: what it printed."""
    import io

    out = io.StringIO()
    names = {"__name__": "docs"}
    with contextlib.redirect_stdout(out):
        exec(compile(text, "page", "exec"), names)
    names["engine"].detach()
    return out.getvalue(), flat(names["model"])
