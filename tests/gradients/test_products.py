"""Compiled per-record gradients: torch's values, and a record's own whatever is beside it."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from zetaclip.gradients import products
from zetaclip.gradients.contributions import Outer, Single
from zetaclip.gradients.convolution import (
    ConvGram,
    ConvPieces,
    Geometry,
    _gradients,
    _window_grams,
    convolution_contribution,
)
from zetaclip.threads import ALONE, team

pytestmark = pytest.mark.skipif(
    products.compiled is None, reason="zetaclip was built without a C compiler"
)
library = products.compiled


@pytest.fixture(params=[128, 256, 512])
def width(request):
    """Each set of instructions that this processor has."""
    if library.width(request.param) != request.param:
        pytest.skip(f"this processor has no vectors of {request.param} bits")
    yield request.param
    library.width(512)  # the widest that there is


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layers():
    """Convolutions of all kinds, with the gradients of single records by torch in float64."""
    kinds = itertools.product(
        [(3, 5), (16, 9), (32, 17), (1, 8)],
        [(3, 3), (1, 1), (2, 5)],
        [((1, 1), (1, 1)), ((2, 3), (0, 2)), ((1, 2), (2, 0))],
        [(1, 1), (2, 1)],
    )
    for (inputs, outputs), kernel, (stride, padding), dilation in kinds:
        x = values(3, inputs, 9, 11)
        weight = torch.empty(outputs, inputs, *kernel, dtype=torch.float64)
        y = F.conv2d(x.double(), weight, None, stride, padding, dilation)
        g = values(*y.shape, seed=1)
        exact = torch.stack(
            [
                torch.nn.grad.conv2d_weight(
                    a[None].double(), weight.shape, b[None].double(), stride, padding, dilation
                )
                for a, b in zip(x, g, strict=True)
            ]
        )
        yield x, g, Geometry(kernel, stride, padding, dilation, 1), exact


def agree(part, exact):
    norms = exact.flatten(1).norm(dim=1)
    torch.testing.assert_close(part.norms(), norms, rtol=2e-6, atol=0)
    factors = torch.rand(len(exact), dtype=torch.float64)
    total = torch.ones(exact.shape[1:], dtype=torch.float64)
    part.add_to(total, factors)
    wanted = 1 + torch.einsum("b...,b->...", exact, factors)
    torch.testing.assert_close(total, wanted, rtol=1e-5, atol=2e-6 * float(norms.max()))


def test_convolutions_agree_with_torch(width):
    for x, g, geometry, exact in layers():
        for part in (ConvPieces(x, g, geometry), ConvGram(x, g, geometry)):
            agree(part, exact)
        stored = _gradients(x, g, geometry)
        agree(stored, exact)
        torch.testing.assert_close(
            stored.dense(), exact.float(), rtol=1e-4, atol=2e-6 * float(exact.norm())
        )


@pytest.mark.parametrize("inputs", [5, 16, 50])
@pytest.mark.parametrize("outputs", [1, 8, 19])
def test_sequences_and_single_vectors_agree_with_torch(width, inputs, outputs):
    x, g = values(6, 7, inputs), values(6, 7, outputs, seed=1)
    exact = torch.bmm(g.double().transpose(1, 2), x.double())
    agree(Outer(x, g), exact)
    rows = Single(x[:, 0], g[:, 0])
    total = torch.zeros(outputs, inputs, dtype=torch.float64)
    factors = torch.rand(6, dtype=torch.float64)
    rows.add_to(total, factors)
    torch.testing.assert_close(
        total, (g[:, 0] * factors[:, None]).t() @ x[:, 0].double(), rtol=1e-14, atol=1e-15
    )


@pytest.mark.parametrize("records", [1, 128, 300])
@pytest.mark.parametrize("inputs", [5, 16, 257, 700])
def test_few_outputs_and_many_inputs(monkeypatch, width, inputs, records):
    """Up to twelve outputs have a kernel of their own; it prefetches columns."""
    monkeypatch.setattr(products, "SHARED", 0)
    for outputs in range(1, 15):
        x, g = values(records, inputs), values(records, outputs, seed=1)
        factors = torch.rand(records, dtype=torch.float64)
        wanted = 1 + (g.double() * factors[:, None]).t() @ x.double()
        for several in (1, 3):
            monkeypatch.setattr(torch, "get_num_threads", lambda several=several: several)
            total = torch.ones(outputs, inputs, dtype=torch.float64)
            Single(x, g).add_to(total, factors)
            torch.testing.assert_close(total, wanted, rtol=1e-12, atol=1e-12)


def test_convolutions_in_one_dimension(width):
    x, g = values(4, 16, 30), values(4, 6, 13, seed=1)
    exact = torch.stack(
        [
            torch.nn.grad.conv1d_weight(a[None].double(), (6, 16, 5), b[None].double(), 2)
            for a, b in zip(x, g, strict=True)
        ]
    )
    agree(ConvPieces(x, g, Geometry((5,), (2,), (0,), (1,), 1)), exact)


def test_norm_and_sum_are_of_the_same_numbers(width):
    """A record alone, with factor 1: the sum's length is the norm, to the rounding of a square."""
    for x, g, geometry, _ in layers():
        part = ConvPieces(x[:1], g[:1], geometry)
        total = torch.zeros(part.shape, dtype=torch.float64)
        part.add_to(total, torch.ones(1, dtype=torch.float64))
        stored = _gradients(x[:1], g[:1], geometry).dense()[0]
        assert torch.equal(total.float(), stored) and torch.equal(total, stored.double())
        assert float(total.norm()) == pytest.approx(float(part.norms()), rel=2e-7)


def test_a_record_is_the_same_beside_any_others(width):
    """Bit for bit: alone, in another place, in a larger batch, and in several threads."""
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)
    x, g = values(40, 16, 6, 6), values(40, 24, 6, 6, seed=1)
    whole = ConvPieces(x, g, geometry).norms()
    picked = torch.tensor([39, 7, 7, 0])
    assert torch.equal(ConvPieces(x[picked], g[picked], geometry).norms(), whole[picked])
    sums = []
    for rows in (slice(7, 8), slice(0, 40), slice(5, 9)):
        factors = torch.zeros(40, dtype=torch.float64)
        factors[7] = 0.3
        total = torch.zeros(24, 16, 3, 3, dtype=torch.float64)
        ConvPieces(x[rows], g[rows], geometry).add_to(total, factors[rows])
        sums.append(total)
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])


@pytest.mark.parametrize("inputs", [3, 16, 20])  # rows of pixels, channels last, neither
def test_threads_change_nothing(monkeypatch, width, inputs):
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)
    x, g = values(13, inputs, 6, 6), values(13, 37, 6, 6, seed=1)
    factors = torch.rand(13, dtype=torch.float64)
    found = []
    monkeypatch.setattr(products, "SHARED", 0)
    for several in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda several=several: several)
        part = ConvPieces(x, g, geometry)
        total = torch.zeros(part.shape, dtype=torch.float64)
        part.add_to(total, factors)
        single = torch.zeros(37, inputs, dtype=torch.float64)
        Single(x[:, :, 0, 0].contiguous(), g[:, :, 0, 0].contiguous()).add_to(single, factors)
        mapped = torch.zeros(13, dtype=torch.float64)
        flat = x.flatten(1), g[:, :, 0, 0].contiguous()
        multiplier = values(37, flat[0].shape[1], seed=2).double()
        products.add_mapped(mapped, *flat, multiplier, multiplier, 0.5)
        found.append((part.norms(), total, single, mapped))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_record_adds_the_same_beside_any_others_in_float64(width):
    """Every other record is small: in float32 nothing would be left of it beside a large one."""
    count = 4099
    g, x = torch.ones(count, 4), torch.ones(count, 3)
    g[1::2] = 2.0**-30
    # With a second position, which is zero, the kernel for several of them does the work.
    two_x = torch.stack([x, torch.zeros_like(x)], 1)
    two_g = torch.stack([g, torch.zeros_like(g)], 1)
    for make in (
        lambda: Single(x, g),
        lambda: Outer(x[:, None], g[:, None]),
        lambda: Outer(two_x, two_g),
        lambda: ConvPieces(
            x[:, :, None, None], g[:, :, None, None], Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1)
        ),
    ):
        total = torch.zeros(make().dense().shape[1:], dtype=torch.float64)
        make().add_to(total, torch.ones(count, dtype=torch.float64))
        assert (total == 2050 + 2049 * 2.0**-30).all()


def test_a_gradient_that_float32_cannot_square_is_reported(width):
    x, g = values(3, 5, 4), values(3, 5, 6, seed=1)
    x[1] *= 1e25
    found = products.norms(x, g, products.sequence(x, g))
    assert torch.isfinite(found).tolist() == [True, False, True]
    x[1] = float("nan")
    found = products.norms(x, g, products.sequence(x, g))
    assert torch.isfinite(found).tolist() == [True, False, True]


def test_a_gradient_that_cancels_is_not_measured_by_gram_matrices():
    """Half of the positions take away what the other half adds, but for a small part.

    The sum then gets a float32 gradient whose rounding errors may be as long as what is left.
    """
    positions, width = 48, 1024
    x, g = values(2, positions, width), values(2, positions, width, seed=1)
    x[0, 24:], g[0, 24:] = x[0, :24], -g[0, :24]
    g[0, 0] += 0.2 * values(width, seed=2)
    exact = torch.bmm(g.double().transpose(1, 2), x.double()).flatten(1).norm(dim=1)
    whole = (x.double().norm(dim=2) * g.double().norm(dim=2)).sum(1)
    assert 1e-3 < exact[0] / whole[0] < positions * 2.0**-13 < exact[1] / whole[1]
    found = Outer(x, g).norms()
    assert torch.isnan(found[0])
    torch.testing.assert_close(found[1], exact[1], rtol=1e-12, atol=0)


def test_the_gram_of_windows_is_that_of_the_unfolded_image():
    for x, g, geometry, _ in layers():
        if geometry.stride == (1, 1):
            columns = F.unfold(
                x.double(), geometry.kernel, geometry.dilation, geometry.padding
            ).transpose(1, 2)
            torch.testing.assert_close(
                _window_grams(x, g, geometry), columns @ columns.mT, rtol=1e-12, atol=1e-11
            )


def test_late_layers_take_gram_matrices_and_early_ones_are_stored():
    def kind(inputs, outputs, size):
        geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)
        x, g = torch.empty(2, inputs, size, size), torch.empty(2, outputs, size, size)
        return type(convolution_contribution(x, g, geometry)).__name__

    assert kind(256, 256, 4) == "ConvGram"
    assert kind(16, 16, 4) == "ConvPieces"
    assert kind(16, 16, 14) == kind(16, 16, 32) == "Dense"


@pytest.mark.parametrize("several", [1, 2, 3])
def test_memory_that_is_not_there_is_an_error(several):
    """A record whose padded image has 2^42 pixels or so."""
    x, g = np.zeros((3, 1, 1, 1), np.float32), np.zeros((3, 40, 1, 1), np.float32)
    sizes = (3, 1, 1, 1, 40, 1, 1, 1, 1, 2**39, 2**39, 2**21, 2**21, 1, 1, 0)
    start, _ = team() if several > 1 else ALONE
    with pytest.raises(MemoryError):
        library.norms(x, g, sizes, np.zeros(3), None, (start, several))
    with pytest.raises(MemoryError):
        library.add(x, g, sizes, np.ones(3), np.zeros(40), (start, several))
    too_large = (*sizes[:9], 2**39, 2**39, 2**31 - 1, 2**31 - 1, 1, 1, 0)
    with pytest.raises(ValueError, match="not those of a layer"):
        library.norms(x, g, too_large, np.zeros(3), None, ALONE)


def test_buffers_that_do_not_fit_are_refused():
    """Whatever the caller gets wrong, nothing outside the memory that it gave is read or
    written."""
    x, g = np.zeros((2, 4, 5, 5), np.float32), np.zeros((2, 3, 5, 5), np.float32)
    sizes = (2, 4, 5, 5, 3, 5, 5, 3, 3, 1, 1, 1, 1, 1, 1, 0)
    squares, stored = np.zeros(2), np.zeros((2, 108), np.float32)
    factors, total = np.ones(2), np.zeros(108)
    library.norms(x, g, sizes, squares, stored, ALONE)
    library.add(x, g, sizes, factors, total, ALONE)
    wrong = (TypeError, ValueError, BufferError, OverflowError)
    read_only = np.zeros(2)
    read_only.flags.writeable = False
    for bad in (
        (x[:1], g, sizes, squares, None, ALONE),
        (x, g.astype(np.float64), sizes, squares, None, ALONE),
        (x[:, :, ::2], g, sizes, squares, None, ALONE),
        (x, g, sizes, squares[:1], None, ALONE),
        (x, g, sizes, read_only, None, ALONE),
        (x, g, sizes, squares, stored[:, :9], ALONE),
        (x, g, sizes, squares, None, (0, 0)),
        (x, g, sizes[:-1], squares, None, ALONE),
    ):
        with pytest.raises(wrong):
            library.norms(*bad)
    for place, value in (
        (0, 3),
        (1, 0),
        (2, 6),
        (5, 4),
        (7, 4),
        (9, 0),
        (11, -1),
        (13, 2),
        (15, 1),
    ):
        changed = sizes[:place] + (value,) + sizes[place + 1 :]
        with pytest.raises(wrong):
            library.norms(x, g, changed, squares, None, ALONE)
        with pytest.raises(wrong):
            library.add(x, g, changed, factors, total, ALONE)
    for bad in (
        (x, g, sizes, factors[:1], total, ALONE),
        (x, g, sizes, factors, total[:9], ALONE),
        (x, g, sizes, factors, total.astype(np.float32), ALONE),
        (x, g, sizes, factors, total, (0, -1)),
    ):
        with pytest.raises(wrong):
            library.add(*bad)
    a, b = np.zeros((2, 4), np.float32), np.zeros((2, 3), np.float32)
    library.add_outer(a, b, factors, np.zeros(12), (2, 4, 3), ALONE)
    for bad in (
        (a, b, factors, np.zeros(11), (2, 4, 3), ALONE),
        (a, b, factors, np.zeros(12), (3, 4, 3), ALONE),
        (a, b, factors, np.zeros(12), (2, 4, 4), ALONE),
        (a, b, factors[:1], np.zeros(12), (2, 4, 3), ALONE),
        (a, a, factors, np.zeros(12), (2, 4, 3), ALONE),
        (a, b, factors, np.zeros(12, np.float32), (2, 4, 3), ALONE),
    ):
        with pytest.raises(wrong):
            library.add_outer(*bad)
