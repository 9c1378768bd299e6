"""What ranks do that hold parts of the parameters; with no group at all, nothing is spread."""

import contextlib

import rank_work
import torch
import torch.nn.functional as F
from rank_work import CLASSES, INPUTS, finish, flat, loop, make, network
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from zetaclip.control import ClipState, Controller
from zetaclip.gradients import layout

WIDTH = 28  # 1292 parameters: their grid is finer than that of half of them


def train(rank, method, steps, more, bucket=None):
    """As ``rank_work.train``; ``bucket`` is how many numbers are added up at a time."""
    usual = layout.BUCKET
    layout.BUCKET = bucket or usual
    try:
        return rank_work.train(rank, method, steps, more)
    finally:
        layout.BUCKET = usual


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def one_release(rank, more):
    """One release of a float64 network: what this rank owns of it, and what its noise came from."""
    x, y = rank_work.data().tensors
    dataset = TensorDataset(x.double(), y)
    engine, module, optimizer, loader = make(
        module=network(width=WIDTH).double(), dataset=dataset, q=1.0, steps=1, **more
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        draw = engine._loop.batch.mechanism.draw
        optimizer.step()
    row = next(iter(engine.ledger.rows()))
    finish(engine)
    return {
        "own": [local(p.grad).clone() for p in module.parameters()],
        "key": draw.sum_key,
        "coins": draw.coin_key,
        "grid": row.grid,
        "std": row.noise_std,
    }


def held(rank):
    """How many numbers this rank holds of everything that is as long as the parameters."""
    engine, module, optimizer, loader = make("dp-adam", q=1.0, steps=1, shard="parts")
    loop(module, optimizer, loader, 1)
    found = {
        "weights": sum(local(p).numel() for p in module.parameters()),
        "sum": engine._loop.model.room.zeros().numel(),
        "gradient": len(engine._loop.model.room.gradient()),
        "moments": sum(
            local(value).numel()
            for state in optimizer.state.values()
            for name, value in state.items()
            if name.startswith("exp_avg")
        ),
    }
    finish(engine)
    return found


# -- layers of every kind


class Text(nn.Module):
    """Attention over tokens; the table of the tokens is the last layer, too."""

    def __init__(self, tied=True):
        super().__init__()
        self.table, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x):
        h = self.table((4 * x).long() % 16)
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0])
        return self.head(h).mean(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.LSTM(3, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.cells(x.view(len(x), -1, 3))[0][:, -1])


class Bent(nn.Module):
    """No rule: a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.bend = nn.Parameter(torch.linspace(-1, 1, INPUTS))

    def forward(self, x):
        return torch.tanh(x * self.bend) + self.bend


class Adapted(nn.Module):
    """A frozen layer beside two thin ones."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(INPUTS, CLASSES).requires_grad_(False)
        self.down, self.up = nn.Linear(INPUTS, 3, bias=False), nn.Linear(3, CLASSES, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Again(nn.Module):
    """Its inner layers are run again in backward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(INPUTS, 9), nn.Linear(9, CLASSES)

    def forward(self, x):
        inner = checkpoint(lambda h: torch.tanh(self.first(h)), x, use_reentrant=False)
        return self.second(inner)


MODELS = {
    "text": Text,
    "untied": lambda: Text(tied=False),
    "picture": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)),
        nn.Conv2d(3, 5, 2, padding=1),
        nn.GroupNorm(1, 5),
        nn.Flatten(),
        nn.Linear(45, CLASSES),
    ),
    "recurrent": Recurrent,
    "no rule": lambda: nn.Sequential(Bent(), nn.Linear(INPUTS, CLASSES)),
    "adapters": Adapted,
    "checkpointed": Again,
}


def model_trained(rank, name, shard):
    """Weights after three updates by all records, and one chunk in the middle that was looked at
    without gradients."""
    torch.manual_seed(3)
    module = MODELS[name]()
    engine, module, optimizer, loader = make(
        module=module, q=1.0, sigma=0.0, steps=3, lr=0.1, shard=shard, physical_batch_size=15
    )
    seen = []
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            with torch.no_grad():  # gathers the weights once more, before they move
                seen.append(float(module(torch.ones(2, INPUTS)).square().sum()))
            optimizer.step()
    weights = flat(module)
    paths = [(one.parameter, one.layer, one.path) for one in engine.describe()]
    finish(engine)
    return {"weights": weights, "seen": seen, "paths": paths}


# -- what is refused, and trouble


def refused(rank, kind):
    """What is said of a module that is spread in a way that is not supported."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    count = dist.get_world_size()
    mesh = init_device_mesh("cpu", (count,))
    module, options, how = network(), {}, {}
    if kind == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    elif kind == "precision":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    elif kind == "columns":
        options["shard_placement_fn"] = lambda p: Shard(p.ndim - 1)
    elif kind == "hybrid":
        mesh = init_device_mesh("cpu", (1, count), mesh_dim_names=("replicate", "shard"))
    elif kind == "reversed":
        mesh = torch.distributed.device_mesh.DeviceMesh("cpu", list(reversed(range(count))))
    elif kind == "replicas":
        module = nn.DataParallel(module)
    elif kind == "ddp":
        module = nn.parallel.DistributedDataParallel(module)
    if kind == "partly":
        fully_shard(module[0], mesh=mesh)
    elif kind == "inside":
        module = nn.Sequential(Bent(), nn.Linear(INPUTS, CLASSES))
        module[0].inner = nn.Linear(2, 2)
        fully_shard(module[0].inner, mesh=mesh)
        fully_shard(module, mesh=mesh)
    elif kind == "spectral norm":
        nn.utils.spectral_norm(module[0])
        fully_shard(module, mesh=mesh)
    else:
        fully_shard(module, mesh=mesh, **options)
    if kind in ("dp-sat", "adaclip", "dp-sam"):
        how["method"] = kind
    make(module=module, **how)


def refusal_of_a_number(rank):
    from dataclasses import replace

    from zetaclip.engine._sharding import _group_refusal, _groups

    module = rank_work.spread(network(), "whole")
    assert _group_refusal(module) is None
    (group,) = _groups(module)
    group.post_forward_mesh_info = replace(group.mesh_info)
    group.post_forward_mesh_info.shard_mesh_size = 1
    return _group_refusal(module)


def disk_full_on_one_rank(rank):
    """One rank can't write its rows: weights before and after, updates, and what was said."""
    engine, module, optimizer, loader = make(shard="parts")
    loop(module, optimizer, loader, 1)
    before, write = flat(module), engine._loop.log.write

    def full(rows):
        if rank == 1:
            raise OSError("no space left")
        return write(rows)

    engine._loop.log.write = full
    said = ""
    try:
        loop(module, optimizer, loader, 1)
    except (OSError, RuntimeError) as error:
        said = str(error)
    engine._loop.log.write = write
    after, updates = flat(module), engine.updates
    loop(module, optimizer, loader, 1)  # the batch is begun again
    return {
        "before": before,
        "after": after,
        "updates": updates,
        "said": said,
        "moved": flat(module),
        "rows": finish(engine),
    }


def spread_apart(rank, hows):
    """Each rank shards the module in its own way."""
    make(shard=hows[rank])


def interrupted(rank, first):
    """Ranks are interrupted in one update: ``first`` when it has used its part, the other before.

    What is said when they go on, and whether weights moved then.
    """
    engine, module, optimizer, loader = make(shard="parts")
    loop(module, optimizer, loader, 1)
    use = engine._loop._use

    def cut(*arguments, **options):
        engine._loop._use = use
        if rank == first:
            use(*arguments, **options)
        raise KeyboardInterrupt

    engine._loop._use = cut
    with contextlib.suppress(KeyboardInterrupt):
        loop(module, optimizer, loader, 1)
    before, updates, said = flat(module), engine.updates, ""
    try:
        loop(module, optimizer, loader, 1)
    except RuntimeError as error:
        said = str(error)
    after = flat(module)
    finish(engine)
    return {"said": said, "updates": updates, "before": before, "after": after}


def penalised(rank, ranks, sync):
    """Some ranks have a penalty on a weight that the root keeps gathered after forward."""
    engine, module, optimizer, loader = make(shard="whole")
    module.set_requires_gradient_sync(sync)
    try:
        for x, y in loader:
            loss = F.cross_entropy(module(x), y)
            if rank in ranks:
                loss = loss + module[0].weight.square().sum()
            loss.backward()
            for parameter in module.parameters():
                assert parameter.grad is None or not local(parameter.grad).any()
            optimizer.step()
    finally:
        engine.detach()


def writes(module, inputs):
    """A forward hook that keeps something of the records in a weight, while that is gathered."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            module.weight.add_(1e-3 * inputs[0].mean())


def wrong(rank, what):
    """Rank 1 must refuse its batch."""
    if what == "rule, counted":
        literal = {"normalize": "realized", "empty": "skip"}
        rank_work.wrong_on_one_rank(rank, "rule", shard="parts", **literal)
        return
    if what != "forward":
        rank_work.wrong_on_one_rank(rank, what, shard="parts")
        return
    module = network()
    if rank == 1:
        module[0].register_forward_pre_hook(writes)
    engine, module, optimizer, loader = make(module=module, shard="whole")
    try:
        loop(module, optimizer, loader, 1)
    finally:
        engine.detach()


def steps_that_meet(rank, shard):
    """An optimizer whose step needs all ranks: it scales the update by the length of a weight."""

    class Trust(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    length = rank_work.whole(p).norm() / rank_work.whole(p.grad).norm()
                    p.add_(p.grad * float(length), alpha=-1e-3)

    module = network()
    if shard:
        rank_work.spread(module)
    from zetaclip import PrivacyEngine

    engine = PrivacyEngine(seed=1)
    module, optimizer, loader = engine.make_private(
        module=module,
        optimizer=Trust(module.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(rank_work.data(), batch_size=rank_work.SIZE),
        noise_multiplier=0.0,
        clipping=1.0,
        num_examples=rank_work.SIZE,
        criterion=F.cross_entropy,
    )
    loop(module, optimizer, loader, 2)
    weights = flat(module)
    finish(engine)
    return weights


def by_unit(rank, shard):
    """Three rows for each of some units, in chunks."""
    owners = torch.arange(rank_work.SIZE) // 3
    engine, module, optimizer, loader = make(
        size=int(owners[-1]) + 1,
        dataset=rank_work.data(),
        units=owners,
        rows_per_unit=3,
        q=1.0,
        sigma=0.0,
        lr=0.1,
        steps=2,
        shard=shard,
        physical_batch_size=9,
    )
    loop(module, optimizer, loader, 2)
    weights = flat(module)
    finish(engine)
    return weights


class Largest:
    """A probe: the largest weight, at every update."""

    def bind(self, module, trained):
        return self

    def read(self, module, step):
        return max(float(p.detach().abs().max()) for p in module.parameters())


class Following(Controller):
    """C is what the probe reads."""

    probe = Largest()

    def init(self):
        return ClipState(1.0)

    def update(self, reading, state):
        return ClipState(reading)


def probed(rank, shard):
    engine, module, optimizer, loader = make(
        q=1.0, sigma=0.0, lr=0.1, steps=3, shard=shard, clipping=Following()
    )
    clips = []
    for _ in range(3):
        loop(module, optimizer, loader, 1)
        clips.append(optimizer.clip)
    finish(engine)
    return clips


def in_bfloat16(rank, shard, half):
    module, (x, y) = network(), rank_work.data().tensors
    if half == "model":
        module, x = module.bfloat16(), x.bfloat16()
    engine, module, optimizer, loader = make(
        module=module, dataset=TensorDataset(x, y), shard=shard, q=1.0, sigma=0.0, lr=0.1, steps=2
    )
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=half == "autocast"):
                out = module(x)
            F.cross_entropy(out.float(), y).backward()
            optimizer.step()
    weights = flat(module).float()
    finish(engine)
    return weights
