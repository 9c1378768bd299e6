"""Norms after a map of every coordinate: right for every form, and never too short."""

from fractions import Fraction

import pytest
import torch
from helpers import looped_gradients, mean_loss, recorded
from networks import MODELS
from torch import nn

from zetaclip.gradients import mapped, products, rows
from zetaclip.gradients.contributions import Dense, Outer, Single


@pytest.fixture(params=["compiled", "torch"])
def way(request, monkeypatch):
    """Each test that asks for this runs with and without the compiled parts."""
    if request.param == "torch":
        monkeypatch.setattr(rows, "compiled", None)
        monkeypatch.setattr(products, "compiled", None)
    elif rows.compiled is None or products.compiled is None:
        pytest.skip("zetaclip was built without a C compiler")


def a_map(numel, left_out=0.3):
    random = torch.Generator().manual_seed(1)
    multiplier = torch.rand(numel, generator=random, dtype=torch.float64) * 3
    multiplier[torch.rand(numel, generator=random) < left_out] = 0
    shift = multiplier * torch.randn(numel, generator=random, dtype=torch.float64) * 0.05
    return multiplier, shift


@pytest.mark.parametrize("name", MODELS)
def test_mapped_norms_and_sums_are_those_of_the_loop(name, way):
    torch.manual_seed(0)
    make, data = MODELS[name]
    module, batch = make().eval(), (data(6), torch.arange(6) % 4)
    loop = looped_gradients(module, batch, mean_loss).double()
    chunk, layout, _ = recorded(module, batch, mean_loss)
    multiplier, shift = a_map(layout.numel)
    expected = loop * multiplier - shift
    factors = torch.linspace(0.1, 1.7, len(loop), dtype=torch.float64)
    total = torch.zeros(layout.numel, dtype=torch.float64)
    with torch.no_grad():
        norms = chunk.mapped_norms(multiplier, shift)
        chunk.add_weighted_sum(total, factors)
    total = multiplier * total - shift * factors.sum()
    largest = expected.norm(dim=1).max()
    assert (norms - expected.norm(dim=1)).abs().max() <= 1e-5 * largest
    assert (total - factors @ expected).norm() <= 1e-5 * largest


def squares_of(part, multiplier, shift, scale):
    found = torch.zeros(len(part.dense()), dtype=torch.float64)
    mapped.add_squares(found, part, multiplier, shift, scale)
    return found


def exact_squares(x, g, multiplier, shift, scale):
    """Squared norms in rational numbers."""
    found = []
    for one_x, one_g in zip(x.tolist(), g.tolist(), strict=True):
        total = Fraction(0)
        for o, row in enumerate(multiplier.tolist()):
            for i, m in enumerate(row):
                value = Fraction(scale) * Fraction(m) * Fraction(one_g[o]) * Fraction(one_x[i])
                total += (value - Fraction(shift[o, i].item())) ** 2
        found.append(total)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_record_that_nearly_equals_the_shift_is_not_too_short(dtype, way):
    """Gradients that differ from the shift in their last digits: both squares are huge, their
    difference is not, and float64 can't tell it from zero. Compiled code works in float32, and
    adds as much as that can hide."""
    torch.manual_seed(0)
    inputs, outputs = 40, 7
    multiplier = torch.rand(outputs, inputs, dtype=torch.float64) * 1e4 + 1
    x, g = torch.randn(inputs, dtype=dtype), torch.randn(outputs, dtype=dtype)
    shift = 3.0 * multiplier * g.double().unsqueeze(1) * x.double()
    away = [x * (1 + step * 2.0**-20) for step in range(5)]
    records, sides = torch.stack(away), g.expand(5, -1).contiguous()
    found = squares_of(Single(records, sides), multiplier, shift, 3.0)
    naive = (
        (records.double().square() @ (3 * multiplier).square().t() * sides.double().square()).sum(1)
        - 2 * (records.double() @ (3 * multiplier * shift).t() * sides.double()).sum(1)
        + shift.square().sum()
    )
    exact = exact_squares(records, sides, multiplier, shift, 3.0)
    scale = float(shift.square().sum())
    short = products.takes(records, sides)
    hidden = 4 * 137 * 2.0**-24 if short else 1e-11
    for own, bound in zip(exact, found.tolist(), strict=True):
        assert own <= Fraction(bound)
        assert bound <= float(own) + hidden * scale
    # Without what is added for rounding, one of them would be too short.
    assert any(own > Fraction(value) for own, value in zip(exact, naive.tolist(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_inputs_beside_huge_gradients_are_seen(dtype, way):
    tiny, huge = (1e-38, 1e38) if dtype == torch.float32 else (1e-160, 1e152)
    x, g = torch.full((1, 3), tiny, dtype=dtype), torch.full((1, 2), huge, dtype=dtype)
    multiplier = torch.full((2, 3), 1e8, dtype=torch.float64)
    found = squares_of(Single(x, g), multiplier, torch.zeros_like(multiplier), 1.0)
    (exact,) = exact_squares(x, g, multiplier, torch.zeros_like(multiplier), 1.0)
    assert exact <= Fraction(found.item())


def test_stored_gradients_in_another_order(way):
    """The map follows the order in which a kernel stores the gradients."""
    values = torch.randn(5, 6)
    order = torch.tensor([2, 0, 5, 1, 4, 3])
    part = Dense(values, torch.Size((3, 2)), unpack=lambda stored: stored[:, order])
    multiplier = torch.rand(3, 2, dtype=torch.float64)
    shift = torch.randn(3, 2, dtype=torch.float64)
    expected = (2 * multiplier * part.dense().double() - shift).square().sum((1, 2))
    torch.testing.assert_close(squares_of(part, multiplier, shift, 2.0), expected)


def test_other_forms_are_made_alike_for_norm_and_sum():
    part = Outer(torch.randn(4, 30, 8), torch.randn(4, 30, 6))
    made = mapped.settled(part, 4, 48)
    total = torch.zeros(6, 8, dtype=torch.float64)
    made.add_to(total, torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64))
    one, zero = torch.ones(6, 8, dtype=torch.float64), torch.zeros(6, 8, dtype=torch.float64)
    torch.testing.assert_close(
        squares_of(made, one, zero, 1.0)[1], total.square().sum(), rtol=1e-14, atol=0
    )


class Partly(nn.Module):
    """One layer is not used, and a record can be made not finite."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


def test_what_is_not_finite_counts_as_a_gradient_of_zero(way):
    torch.manual_seed(0)
    module, x, y = Partly(), torch.randn(5, 4), torch.arange(5) % 3
    x[3, 1] = torch.inf
    chunk, layout, _ = recorded(module, (x, y), mean_loss)
    multiplier, shift = a_map(layout.numel, left_out=0)
    norms = chunk.mapped_norms(multiplier, shift)
    assert norms[3].item() == pytest.approx(float(shift.norm()), rel=1e-12)
    total = torch.zeros(layout.numel, dtype=torch.float64)
    chunk.add_weighted_sum(total, torch.tensor([0, 0, 0, 1, 0], dtype=torch.float64))
    assert bool((total == 0).all())


def test_parameters_without_a_gradient_count_with_their_shift(way):
    torch.manual_seed(0)
    module, batch = Partly(), (torch.randn(5, 4), torch.arange(5) % 3)
    loop = looped_gradients(module, batch, mean_loss).double()
    chunk, layout, _ = recorded(module, batch, mean_loss)
    multiplier, shift = a_map(layout.numel, left_out=0)
    expected = (loop * multiplier - shift).norm(dim=1)
    torch.testing.assert_close(chunk.mapped_norms(multiplier, shift), expected, rtol=1e-5, atol=0)


@pytest.mark.skipif(products.compiled is None, reason="zetaclip was built without a C compiler")
@pytest.mark.parametrize("bits", [128, 256, 512])
def test_every_set_of_instructions_agrees(bits):
    torch.manual_seed(0)
    widest = products.compiled.width()
    x, g = torch.randn(150, 131), torch.randn(150, 11)
    multiplier = torch.rand(11, 131, dtype=torch.float64)
    shift = torch.randn(11, 131, dtype=torch.float64)
    found = torch.ones(150, dtype=torch.float64)
    try:
        products.compiled.width(bits)
        products.add_mapped(found, x, g, multiplier, shift, 0.7)
    finally:
        products.compiled.width(widest)
    gradients = 0.7 * multiplier * (g.double().unsqueeze(2) * x.double().unsqueeze(1))
    exact = (gradients - shift).square().sum((1, 2))
    most = gradients.flatten(1).norm(dim=1).add(shift.norm()).square()
    over = (found - 1 - exact) / most
    assert float(over.min()) >= 0 and float(over.max()) <= 2 * 137 * 2.0**-24


@pytest.mark.skipif(products.compiled is None, reason="zetaclip was built without a C compiler")
def test_numbers_of_any_size_neither_overflow_nor_vanish():
    """Squares of these would overflow or underflow in float32."""
    torch.manual_seed(0)
    x, g = torch.randn(40, 30), torch.randn(40, 5)
    multiplier = torch.rand(5, 30, dtype=torch.float64)
    shift = torch.randn(5, 30, dtype=torch.float64) * 1e-3
    plain = squares_of(Single(x, g), multiplier, shift, 1.0)
    for power in (-100, 100):
        far = squares_of(Single(x * 2.0**power, g), multiplier, shift * 2.0**power, 1.0)
        torch.testing.assert_close(far * 4.0**-power, plain, rtol=1e-12, atol=0)
        far = squares_of(Single(x, g), multiplier * 2.0**power, shift * 2.0**power, 1.0)
        torch.testing.assert_close(far * 4.0**-power, plain, rtol=1e-12, atol=0)


@pytest.mark.skipif(products.compiled is None, reason="zetaclip was built without a C compiler")
def test_a_records_bound_depends_on_that_record_alone():
    torch.manual_seed(0)
    x, g = torch.randn(300, 131), torch.randn(300, 11)
    x[7, 3] = torch.nan
    multiplier = torch.rand(11, 131, dtype=torch.float64)
    shift = torch.randn(11, 131, dtype=torch.float64)
    together = squares_of(Single(x, g), multiplier, shift, 1.0)
    assert bool(together[7].isnan()) and int(together.isnan().sum()) == 1
    for row in (0, 6, 8, 47, 48, 287, 288, 299):
        alone = squares_of(Single(x[row : row + 1], g[row : row + 1]), multiplier, shift, 1.0)
        assert alone.item() == together[row].item()


@pytest.mark.skipif(products.compiled is None, reason="zetaclip was built without a C compiler")
def test_buffers_that_do_not_fit_are_refused():
    import numpy as np

    x, g = np.zeros((3, 4), np.float32), np.zeros((3, 2), np.float32)
    own, out = np.zeros(8), np.zeros(3)
    sizes, alone = (3, 4, 2), (0, 1)
    lengths = (1.0, 1.0, 1.0)
    products.compiled.add_mapped(x, g, own, own, out, lengths, sizes, alone)
    rows.compiled.mapped(x, own[:4], own[:4], out, 3)
    for bad in (
        (x[:2], g, own, own, out, lengths, sizes, alone),
        (x, g.astype(np.float64), own, own, out, lengths, sizes, alone),
        (x, g, own[:7], own, out, lengths, sizes, alone),
        (x, g, own, own[:7], out, lengths, sizes, alone),
        (x, g, own, own, out[:2], lengths, sizes, alone),
        (x, g, own, own, out, lengths[:2], sizes, alone),
        (x, g, own, own, out, lengths, (4, 4, 2), alone),
        (x, g, own, own, out, lengths, (3, 4, 0), alone),
        (x, g, own, own, out, lengths, (-3, 4, 2), alone),
        (x, g, own, own, out, lengths, sizes, (0, 0)),
    ):
        with pytest.raises((TypeError, ValueError)):
            products.compiled.add_mapped(*bad)
    for bad in (
        (x, own[:3], own[:4], out, 3),
        (x, own[:4], own[:3], out, 3),
        (x, own[:4], own[:4], out[:2], 3),
        (x, own[:4], own[:4], out, 0),
    ):
        with pytest.raises((TypeError, ValueError)):
            rows.compiled.mapped(*bad)
