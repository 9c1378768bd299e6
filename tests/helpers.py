"""What many tests need: the loop over examples that everything is compared with, and small private
runs."""

import re
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zetaclip import PrivacyEngine
from zetaclip.gradients import CaptureBuffer, Chunk, Layout, make_shadows

ROOT = Path(__file__).resolve().parent.parent


def code_of(page):
    """The Python of a page, all its blocks as one text."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks, page
    return "\n".join(blocks)


def looped_gradients(module, batch, loss_fn):
    """Autograd one example at a time, as (examples, parameters) in the parameters' dtype."""
    params = [p for p in module.parameters() if p.requires_grad]
    rows = []
    for i in range(len(batch[0])):
        one = [t[i : i + 1] for t in batch]
        grads = torch.autograd.grad(loss_fn(module, one), params, allow_unused=True)
        rows.append(
            torch.cat(
                [
                    (torch.zeros_like(p) if g is None else g).flatten()
                    for p, g in zip(params, grads, strict=True)
                ]
            )
        )
    return torch.stack(rows)


def clipped_sum(module, batch, clip):
    """Autograd one example at a time, each clipped, added up."""
    loop = looped_gradients(module, batch, mean_loss)
    return (loop * (clip / loop.norm(dim=1, keepdim=True).clamp_min(clip))).sum(0)


def recorded(module, batch, loss_fn, scale=None):
    """The chunk that one forward and backward leaves, and what it was recorded with."""
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    recorder, layout = CaptureBuffer(), Layout.of(named)
    shadows, refusals = make_shadows(module, set(named.values()), recorder)
    assert not refusals, refusals
    for shadow in shadows:
        shadow.attach()
    try:
        rows = len(batch[0])
        recorder.open(rows)
        loss_fn(module, batch).backward()
        assert all(p.grad is None for p in named.values())
        return (
            Chunk(recorder.take(), layout, rows, float(rows) if scale is None else scale),
            layout,
            shadows,
        )
    finally:
        recorder.close()
        for shadow in shadows:
            shadow.detach()


def mean_loss(module, batch):
    return F.cross_entropy(module(batch[0]), batch[1])


def square_loss(module, batch):
    """Any module that returns a tensor: a mean over rows of a fixed function of the output."""
    out = module(*batch)
    out = out[0] if isinstance(out, tuple) else out
    flat = out.flatten(1)
    weights = torch.linspace(-1, 1, flat.shape[1], dtype=flat.dtype)
    return (flat.square() * 0.5 + flat * weights).sum(1).mean()


def assert_parity(module, batch, loss_fn, tolerance):
    """Norms, clipped sum and the gradients themselves, against the loop."""
    loop = looped_gradients(module, batch, loss_fn).double()
    chunk, layout, _ = recorded(module, batch, loss_fn)
    with torch.no_grad():
        dense = torch.cat(list(chunk.pieces())).double()
        norms = chunk.norms()
        factors = torch.linspace(0.1, 1.7, len(loop), dtype=torch.float64)
        total = torch.ones(layout.numel, dtype=torch.float64)
        chunk.add_weighted_sum(total, factors)
    expected = factors @ loop + 1
    size = loop.norm()
    assert (dense - loop).norm() <= tolerance * size
    assert (norms - loop.norm(dim=1)).abs().max() <= tolerance * loop.norm(dim=1).max()
    assert (total - expected).norm() <= tolerance * expected.norm()


def private(
    module,
    data,
    *,
    sigma=1.0,
    clipping=1.0,
    q=0.5,
    lr=1.0,
    seed=0,
    optimizer=torch.optim.SGD,
    accountant="rdp",
    num_examples=None,
    loader_options=None,
    **options,
):
    """(engine, module, optimizer, loader) on tensors; N is declared as it is unless told
    otherwise."""
    dataset = data if not isinstance(data, tuple) else TensorDataset(*data)
    size = len(dataset)
    loader = DataLoader(dataset, batch_size=max(1, round(q * size)), **(loader_options or {}))
    engine = PrivacyEngine(accountant=accountant, seed=seed)
    params = [p for p in module.parameters() if p.requires_grad]
    opt = optimizer(params, lr=lr) if isinstance(optimizer, type) else optimizer
    made = engine.make_private(
        module=module,
        optimizer=opt,
        data_loader=loader,
        noise_multiplier=sigma,
        clipping=clipping,
        sample_rate=q,
        num_examples=size if num_examples is None else num_examples,
        **options,
    )
    return (engine, *made)


def train(module, optimizer, loader, loss_fn=mean_loss, steps=None, epochs=1):
    """The ordinary loop; counts updates, not chunks."""
    done = 0
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss_fn(module, batch).backward()
            optimizer.step()
            done += optimizer.stepped
            if steps is not None and done >= steps:
                return done
    return done


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def tiny(inputs=6, classes=3, dtype=None):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, classes)).to(
        dtype or torch.float32
    )


def toy_data(size=24, inputs=6, classes=3, dtype=None):
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(size, inputs, generator=generator, dtype=dtype or torch.float32)
    return x, torch.randint(0, classes, (size,), generator=generator)


def without_warnings(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)
