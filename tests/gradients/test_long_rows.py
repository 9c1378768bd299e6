"""Norms and sums of more values than float32 can add up."""

import pytest
import torch

from zetaclip.gradients.contributions import Dense, Outer, row_norms


@pytest.mark.parametrize("width", [1 << 22, (1 << 22) + 77])
def test_small_values_are_not_lost_beside_large_ones(width):
    """Sixty-four ones, and millions of values whose squares are too small to change a float32
    sum."""
    row = torch.full((1, width), 1e-4)
    row[0, :64] = 1.0
    exact = row.double().norm()
    assert float(torch.linalg.vector_norm(row, dim=1) / exact) < 1 - 2e-4  # what torch makes of it
    assert float(row_norms(row) / exact) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("make", ["dense", "single position", "long sequence"])
def test_a_record_adds_the_same_beside_any_others(make):
    """Four thousand aligned records before it: in float32 nothing would be left of a small one."""
    count = 4096
    g = torch.full((count, 1, 4), 1.0)
    g[-1] = 2.0**-13
    positions = 30 if make == "long sequence" else 1
    x = torch.ones(count, positions, 3) / positions
    parts = Outer(x, g.expand(-1, positions, -1).contiguous())
    if make == "dense":
        made = parts.dense()
        parts = Dense(made, made.shape[1:])
    sums = []
    for last in (0.0, 1.0):
        factors = torch.ones(count, dtype=torch.float64)
        factors[-1] = last
        total = torch.zeros(4, 3, dtype=torch.float64)
        parts.add_to(total, factors)
        sums.append(total)
    torch.testing.assert_close(
        sums[1] - sums[0], torch.full((4, 3), 2.0**-13).double(), rtol=1e-6, atol=0
    )
    kept = torch.full((4, 3), float(count - 1)) + 2.0**-13
    assert torch.equal(kept, torch.full((4, 3), float(count - 1)))  # one float32 addition loses it
