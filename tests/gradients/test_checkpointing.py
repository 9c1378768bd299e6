"""Gradient checkpointing in a plain private loop: it changes no released number."""

import pytest
import torch
import torch.nn.functional as F
from helpers import flat, private
from torch import nn
from torch.utils.checkpoint import checkpoint


class Blocks(nn.Module):
    """A small decoder with a recurrent layer, attention and a tied table."""

    def __init__(self, mode, dropout):
        super().__init__()
        self.mode, self.table = mode, nn.Embedding(11, 8)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head, self.drop = nn.Linear(8, 11, bias=False), nn.Dropout(dropout)
        self.head.weight = self.table.weight

    def mixed(self, x):
        h = self.recurrent(x)[0]
        return x + self.drop(self.attention(h, h, h, need_weights=False)[0])

    def fed(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, ids):
        x = self.table(ids)
        for part in (self.mixed, self.fed):
            x = part(x) if self.mode is None else checkpoint(part, x, use_reentrant=self.mode)
        return self.head(x)


def _weights(mode, dropout=0.0, physical=None, short=False):
    torch.manual_seed(0)
    ids = torch.randint(0, 11, (12, 6))
    _, module, optimizer, loader = private(
        Blocks(mode, dropout), (ids,), sigma=1.0, lr=0.1, physical_batch_size=physical
    )
    for _ in range(2):
        for (rows,) in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=short):
                out = module(rows)
            F.cross_entropy(out.flatten(0, 1).float(), rows.roll(1, 1).flatten()).backward()
            optimizer.step()
    return flat(module)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("physical", [None, 2])
def test_weights_are_the_same_bit_by_bit(dropout, physical):
    plain = _weights(None, dropout, physical)
    assert torch.equal(_weights(False, dropout, physical), plain)
    torch.manual_seed(0)
    assert (plain - flat(Blocks(None, dropout))).norm() > 0.1  # it was trained


@pytest.mark.parametrize("physical", [None, 2])
def test_the_reentrant_kind_rounds_its_first_forward_in_another_way(physical):
    """It runs without gradients, and so by torch's own kernels of attention and LSTM."""
    plain = _weights(None, physical=physical)
    torch.testing.assert_close(_weights(True, physical=physical), plain, rtol=0, atol=1e-5)


def test_in_half_precision_too():
    assert torch.equal(_weights(False, short=True), _weights(None, short=True))
    assert _weights(True, short=True).isfinite().all()  # not refused
