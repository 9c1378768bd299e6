"""A table that is also the output layer, against autograd one record at a time."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_parity, recorded
from torch import nn

from zetaclip.gradients.contributions import Lookup, Outer
from zetaclip.gradients.grams import LONGEST_GRAM
from zetaclip.gradients.tied import Tied


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.middle = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.middle(self.table(ids))))


def _loss(module, batch):
    out = module(batch[0])
    return F.cross_entropy(out.flatten(0, 1), batch[0].roll(1, 1).flatten())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
@pytest.mark.parametrize("tokens", [1, 7, 40, LONGEST_GRAM + 1])
def test_a_tied_table_agrees_with_the_loop(dtype, tolerance, tokens):
    torch.manual_seed(0)
    assert_parity(Model().to(dtype), (torch.randint(0, 11, (5, tokens)),), _loss, tolerance)


def test_its_gradients_are_not_made():
    chunk, *_ = recorded(Model(), (torch.randint(0, 11, (5, 7)),), _loss)
    kinds = [type(part) for parts in chunk.parts.values() for part in parts]
    assert Tied in kinds


def _parts(scale=1.0):
    """Both uses of one record cancel but for a part of ``scale``; the norm is in the third row."""
    x = torch.tensor([[[1e4, 0.0]], [[1.0, 0.0]]])
    g = torch.tensor([[[1e4, 0.0, scale]], [[1.0, 0.0, 2.0]]])
    ids, e = torch.tensor([[0], [0]]), torch.tensor([[[-1e8, 0.0]], [[3.0, 4.0]]])
    return Tied(Lookup(ids, e, torch.Size((3, 2))), Outer(x, g))


def test_norms_of_uses_that_cancel_are_not_believed():
    norms = _parts(1e-4).norms()
    assert norms[0].isnan()
    # (1 + 3, 4), (0, 0) and (2, 0)
    assert norms[1].item() == pytest.approx(6.0, rel=1e-12)
    assert _parts(1e-4).double().take(slice(0, 1)).dense().norm() == pytest.approx(1.0, rel=1e-6)


def test_sums_and_blanks():
    parts = _parts()
    out = torch.zeros(3, 2, dtype=torch.float64)
    parts.blank(torch.tensor([0])).add_to(out, torch.tensor([5.0, 0.5], dtype=torch.float64))
    assert out.tolist() == [[2.0, 2.0], [0.0, 0.0], [1.0, 0.0]]
    assert torch.equal(parts.dense()[1], torch.tensor([[4.0, 4.0], [0.0, 0.0], [2.0, 0.0]]))
