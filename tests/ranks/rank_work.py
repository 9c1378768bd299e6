"""What the ranks of a pool are asked to do. Runs as well with no group at all: then it is the one process to compare with."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zetaclip import PrivacyEngine, methods

SIZE, INPUTS, CLASSES = 40, 12, 4


def network(dropout=0.0):
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(INPUTS, 24), nn.Tanh(), nn.Dropout(dropout), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, CLASSES)
    )


def data(size=SIZE):
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(size, INPUTS, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (size,), generator=generator))


def make(method="dp-sgd", *, sigma=1.0, q=0.5, seed=3, steps=6, size=SIZE, module=None, options=None, lr=None, **more):
    """(engine, module, optimizer, loader)"""
    chosen = methods.get(method, **(options or {})) if isinstance(method, str) else method
    module = network() if module is None else module
    dataset = data(size)
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


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()]).clone()


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
    return {"weights": flat(module), "rows": finish(engine), "epsilon": engine.get_epsilon(1e-5), "clip": clip}
