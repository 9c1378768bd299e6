"""Rows that are one unit: their joint gradient against autograd, for every kind of layer."""

import pytest
import torch
from helpers import looped_gradients, mean_loss, recorded
from networks import MODELS

from zetaclip.gradients import Chunk
from zetaclip.gradients.units import by_unit

COUNTS = torch.tensor([1, 3, 2, 5, 1])  # groups of 1, of 2, of 3 and 4, of 5 to 8


def of_units(received, layout, counts, mean, scale):
    """What the groups of units say together: norms in their order, and a weighted sum."""
    norms, total = [], torch.zeros(layout.numel, dtype=torch.float64)
    dense = []
    for parts, units in by_unit(received, counts, mean):
        chunk = Chunk(parts, layout, units, scale)
        dense.append(torch.cat(list(chunk.pieces())).double())
        norms.append(chunk.norms())
        chunk.add_weighted_sum(total, (0.3 / norms[-1]).clamp(max=1))
    return torch.cat(dense), torch.cat(norms), total


def joined(rows, counts, mean):
    parts = rows.split(counts.tolist())
    units = torch.stack([part.mean(0) if mean else part.sum(0) for part in parts])
    order = torch.argsort(counts.double().log2().ceil(), stable=True)
    return units[order]


@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("name", list(MODELS))
def test_a_units_gradient_is_that_of_its_rows_alone(name, mean):
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    module, rows = build(), int(COUNTS.sum())
    batch = inputs(rows), torch.randint(0, 10, (rows,))
    expected = joined(looped_gradients(module, batch, mean_loss).double(), COUNTS, mean)
    chunk, layout, _ = recorded(module, batch, mean_loss)
    with torch.no_grad():
        dense, norms, total = of_units(chunk.parts, layout, COUNTS, mean, float(rows))
    lengths = expected.norm(dim=1)
    assert (dense - expected).norm() <= 3e-5 * expected.norm()
    assert (norms - lengths).abs().max() <= 3e-5 * lengths.max()
    clipped = (expected * (0.3 / lengths).clamp(max=1).unsqueeze(1)).sum(0)
    assert (total - clipped).norm() <= 3e-5 * clipped.norm()
    # Clipping each row by itself is something else, so the comparison has power.
    single = looped_gradients(module, batch, mean_loss).double()
    alone = (single * (0.3 / single.norm(dim=1)).clamp(max=1).unsqueeze(1)).sum(0)
    assert (total - alone).norm() > 1e-2 * clipped.norm()


def test_units_of_one_row_are_left_as_they_are():
    module = torch.nn.Linear(4, 3)
    chunk, _, _ = recorded(module, (torch.randn(5, 4), torch.randint(0, 3, (5,))), mean_loss)
    ((parts, units),) = by_unit(chunk.parts, torch.ones(5, dtype=torch.int64), True)
    assert parts is chunk.parts and units == 5


@pytest.mark.parametrize("name", ["mlp", "cnn", "words", "gru"])
def test_a_row_that_is_not_finite_spoils_its_own_unit_only(name):
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    module, rows = build(), int(COUNTS.sum())
    x = inputs(rows)
    batch = x, torch.randint(0, 10, (rows,))

    def loss(module, batch):
        each = torch.nn.functional.cross_entropy(module(batch[0]), batch[1], reduction="none")
        return (each * torch.where(torch.arange(rows) == 2, torch.inf, 1.0)).mean()

    clean, layout, _ = recorded(module, batch, mean_loss)
    broken, _, _ = recorded(module, batch, loss)
    with torch.no_grad():
        _, norms, _ = of_units(broken.parts, layout, COUNTS, True, float(rows))
        _, expected, _ = of_units(clean.parts, layout, COUNTS, True, float(rows))
    order = torch.argsort(COUNTS.double().log2().ceil(), stable=True)
    bad = (order == 1).nonzero().item()  # the unit of rows 1 to 3
    assert norms[bad] == 0
    others = torch.arange(len(norms)) != bad
    assert torch.allclose(norms[others], expected[others], rtol=1e-6)
