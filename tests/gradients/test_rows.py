"""The compiled part for small matrices: it agrees with float64, takes only what it may read, and
can be left out.
"""

import math

import numpy as np
import pytest
import torch
from helpers import assert_parity, mean_loss, recorded
from torch import nn

from zetaclip.clipping._base import (
    check_columns,
    check_factors,
    farthest,
    flat_factors,
    longest,
)
from zetaclip.clipping._rules import halves, slots
from zetaclip.engine._weights import Weights
from zetaclip.gradients import Layout, products, rows
from zetaclip.gradients.contributions import Dense, Outer, Single
from zetaclip.gradients.reduce import _as_stored, _matrices
from zetaclip.threads import ALONE

needs_compiler = pytest.mark.skipif(
    rows.compiled is None, reason="zetaclip was built without a C compiler"
)


@pytest.fixture(params=["compiled", "torch"])
def way(request, monkeypatch):
    """Each test that asks for this runs with and without the compiled part."""
    if request.param == "torch":
        monkeypatch.setattr(rows, "compiled", None)
        monkeypatch.setattr(products, "compiled", None)
    elif rows.compiled is None:
        pytest.skip("zetaclip was built without a C compiler")
    return request.param


class Spy:
    """The compiled part, with a list of what was called."""

    def __init__(self):
        self.called = []

    def __getattr__(self, name):
        def call(*args):
            self.called.append(name)
            return getattr(library, name)(*args)

        return call


library = rows.compiled


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def task(part, count):
    """What the compiled part gets for a contribution."""
    (found,) = rows.norm_tasks([_matrices(part)], count)
    return found


def mlp():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(37, 70), nn.ReLU(), nn.Linear(70, 20, bias=False), nn.Tanh(), nn.Linear(20, 3)
    )


def batch(count=9):
    return values(count, 37, seed=1), torch.arange(count) % 3


@needs_compiler
@pytest.mark.parametrize("width", [1, 7, 8, 31, 32, 105, 2048, 2049, 5003])
def test_norms_agree_with_float64(width):
    x, g = values(5, width), values(5, 3, seed=1)
    tasks = [task(Single(x, g), 5), task(Dense(g, g.shape[1:]), 5)]
    found, finite = rows.norms(tasks, None, 5, 0.0, 2.0)
    lengths = x.double().norm(dim=1), g.double().norm(dim=1)
    assert finite
    torch.testing.assert_close(
        found, 2 * torch.hypot(lengths[0] * lengths[1], lengths[1]), rtol=1e-6, atol=0
    )


@needs_compiler
def test_norms_add_to_the_squares_of_other_layers():
    g = values(4, 6)
    squares = torch.tensor([0.0, 1.0, 4.0, 9.0], dtype=torch.float64)
    expected = 3 * (0.5 + (squares + g.double().square().sum(1)).sqrt())
    found, _ = rows.norms([task(Dense(g, g.shape[1:]), 4)], squares, 4, 0.5, 3.0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@needs_compiler
def test_two_matrices_at_one_address_are_told_apart():
    whole = values(4, 6)
    part = whole.flatten()[:12].view(4, 3)
    assert part.data_ptr() == whole.data_ptr()
    tasks = [
        task(Dense(whole, whole.shape[1:]), 4),
        task(Dense(part, part.shape[1:]), 4),
    ]
    found, _ = rows.norms(tasks, None, 4, 0.0, 1.0)
    torch.testing.assert_close(
        found, torch.hypot(whole.norm(dim=1), part.norm(dim=1)).double(), rtol=1e-6, atol=0
    )


@needs_compiler
@pytest.mark.parametrize("bad", [1e30, float("inf"), float("nan")])
def test_a_norm_that_float32_cannot_hold_is_reported(bad):
    x, g = values(3, 40), values(3, 2, seed=1)
    x[1, 39] = bad
    found, finite = rows.norms([task(Single(x, g), 3)], None, 3, 0.0, 1.0)
    assert not finite and torch.isfinite(found).tolist() == [True, False, True]


def test_an_underflow_does_not_pass_for_zero(way):
    """|x| is lost to underflow, and |g| is huge: the product is a whole record."""
    layer = nn.Linear(4, 2, bias=False)
    x = torch.full((2, 4), 1e-25)
    chunk, _, _ = recorded(
        layer, (x,), lambda module, batch: (module(batch[0]) * 1e24).sum(), scale=1.0
    )
    assert (chunk.norms() >= 0.2 * 2**0.5).all()


def test_what_underflow_hides_counts_beside_a_large_factor(way):
    """As above, but |g| is one that float32 can still square: nothing is worked out again."""
    layer = nn.Linear(4, 2, bias=False)
    x = torch.full((2, 4), 1e-23)
    chunk, _, _ = recorded(
        layer, (x,), lambda module, batch: (module(batch[0]) * 1e18).sum(), scale=1.0
    )
    assert (chunk.norms() >= 0.99 * 2e-5 * 2**0.5).all()
    assert not chunk.rescued


@needs_compiler
@pytest.mark.parametrize("count", [1, 128, 300])
def test_weighing_agrees_with_float64(count):
    matrix, factors = values(count, 37), torch.linspace(0, 2, count, dtype=torch.float64)
    total = values(50, seed=2).double()
    expected = total.clone()
    expected[5:42] += factors @ matrix.double()
    rows.weigh([(matrix.numpy(), total.numpy()[5:42])], factors)
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=1e-13)


@needs_compiler
def test_only_plain_small_matrices_fit():
    matrix = values(6, 4)
    good = values(6, 3)
    assert rows.norm_tasks([(good, matrix), (None, matrix)], 6) != [None, None]
    refused = {
        "another number of rows": (matrix, 5),
        "gaps": (values(6, 8)[:, ::2], 6),
        "transposed": (values(4, 6).t(), 6),
        "float64": (matrix.double(), 6),
        "half": (matrix.half(), 6),
        "nothing": (matrix[:, :0], 6),
        "large": (torch.empty(2, rows.LARGEST), 2),
        "elsewhere": (torch.empty(6, 4, device="meta"), 6),
    }
    for name, (tensor, count) in refused.items():
        beside = values(count, 3)
        pairs = [(None, tensor), (beside, tensor), (tensor, beside)]
        assert rows.norm_tasks(pairs, count) == [None] * 3, name
    assert task(Outer(values(6, 2, 3), values(6, 2, 3)), 6) is None


@needs_compiler
def test_only_one_number_per_row_is_read_as_factors():
    """Whatever a rule returns, no number beyond its factors is read."""
    chunk, layout, _ = recorded(mlp(), batch(6), mean_loss)
    total = torch.zeros(layout.numel, dtype=torch.float64)
    good = torch.ones(6, dtype=torch.float64)
    with torch.no_grad():
        chunk.norms()
        for factors in (good[:5], good[:1], good.float(), good.repeat(2)):
            with pytest.raises((RuntimeError, ValueError, TypeError)):
                chunk.add_weighted_sum(total, factors)
        total.zero_()
        chunk.add_weighted_sum(total, good.repeat(2)[::2])
        other = torch.zeros_like(total)
        chunk.add_weighted_sum(other, good)
    assert torch.equal(total, other)


def test_a_sum_of_another_width_than_its_parameter_is_not_written():
    g = values(6, 4)
    assert _as_stored(Dense(g, g.shape[1:]), 24)
    assert not _as_stored(Dense(g, g.shape[1:]), 18)
    assert not _as_stored(Dense(g, g.shape[1:], unpack=torch.neg), 24)


@needs_compiler
def test_buffers_of_another_type_or_length_are_refused():
    """Whatever the caller gets wrong, nothing is read or written outside the memory that it
    gave."""
    g, out, factors = np.zeros((6, 4), np.float32), np.zeros(6), np.ones(6)
    read_only = np.zeros(6)
    read_only.flags.writeable = False
    library.norms([(g, g), (None, g)], 6, out, True, 0.0, 1.0)
    wrong = (TypeError, ValueError, BufferError)
    for matrix in (g.astype(np.float64), g[:5, :3], g[:, ::2], g.astype(np.int32), None, 64):
        with pytest.raises(wrong):
            library.norms([(None, matrix)], 6, out, True, 0.0, 1.0)
        with pytest.raises(wrong):
            library.norms(
                [(g, g), (matrix if matrix is not None else 64, g)], 6, out, True, 0.0, 1.0
            )
        with pytest.raises(wrong):
            library.weigh([(matrix, np.zeros(4))], 6, factors, ALONE)
    for values in (out[:5], np.zeros(7), out.astype(np.float32), read_only, np.zeros(12)[::2]):
        with pytest.raises(wrong):
            library.norms([(None, g)], 6, values, True, 0.0, 1.0)
    for values in (factors[:5], np.ones(7), factors.astype(np.float32), np.ones(12)[::2]):
        with pytest.raises(wrong):
            library.weigh([(g, np.zeros(4))], 6, values, ALONE)
    for total in (np.zeros(3), np.zeros(5), np.zeros(4, np.float32), read_only[:4], None):
        with pytest.raises(wrong):
            library.weigh([(g, np.zeros(4)), (g, total)], 6, factors, ALONE)
    for tasks, rows_given in (([(g,)], 6), ((g, g), 6), ([(None, g)], -1), ([(None, g)], 0)):
        with pytest.raises(wrong):
            library.norms(tasks, rows_given, out[: max(0, rows_given)], True, 0.0, 1.0)
        with pytest.raises(wrong):
            library.weigh(tasks, rows_given, factors[: max(0, rows_given)], ALONE)


def test_a_network_of_linear_layers_agrees_with_the_loop(way):
    assert_parity(mlp(), batch(), mean_loss, 2e-6)


@needs_compiler
def test_a_network_of_linear_layers_takes_the_compiled_way(monkeypatch):
    """Otherwise the test above would compare torch with itself."""
    monkeypatch.setattr(rows, "compiled", Spy())
    chunk, layout, _ = recorded(mlp(), batch(), mean_loss)
    with torch.no_grad():
        norms = chunk.norms()
        chunk.add_weighted_sum(
            torch.zeros(layout.numel, dtype=torch.float64), torch.ones_like(norms)
        )
    assert rows.compiled.called == ["norms", "weigh"]


@pytest.mark.parametrize("clip", [1e-8, 1e-5, 1e-3, 0.1, 1.0])
def test_a_gradient_near_the_largest_float_stays_within_c(way, clip):
    """Its factor is near the smallest float32, below which digits are lost: in float64 it is an
    ordinary number.
    """
    module = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.eye(1, 4))
    shares = []
    for length in [1e3, *torch.linspace(1e18, 1.2e19, 40).tolist()]:
        x = torch.tensor([[length, 0.0, 0.0, 0.0]])
        chunk, layout, _ = recorded(
            module, (x,), lambda module, batch: module(batch[0]).square().sum()
        )
        with torch.no_grad():
            factors = flat_factors(chunk.norms(), clip)
            total = torch.zeros(layout.numel, dtype=torch.float64)
            chunk.add_weighted_sum(total, factors)
        shares.append(float(total.norm()) / clip)
    assert all(share == pytest.approx(1.0, rel=1e-5) for share in shares)


def test_a_record_that_is_not_finite_counts_as_zero(way):
    x, y = batch()
    x[4] = float("nan")
    chunk, layout, _ = recorded(mlp(), (x, y), mean_loss)
    with torch.no_grad():
        norms = chunk.norms()
        total = torch.zeros(layout.numel, dtype=torch.float64)
        chunk.add_weighted_sum(total, torch.ones_like(norms))
    assert norms[4] == 0 and (norms[:4] > 0).all()
    assert torch.isfinite(total).all() and total.abs().sum() > 0


@pytest.mark.parametrize("clip", [0.1, 1.0, 3.7])
def test_flat_factors_are_one_up_to_c(clip):
    norms = torch.cat([torch.tensor([0.0, clip, 1e-300, 1e149]), values(50).abs()]).double()
    norms[1] = clip
    factors = flat_factors(norms, clip)
    assert torch.equal(factors, torch.full_like(norms, clip) / norms.clamp_min(clip))
    assert factors[:3].tolist() == [1.0, 1.0, 1.0]


def test_the_check_of_factors_sees_every_record():
    norms = torch.full((100,), 2.0, dtype=torch.float64)
    for place in (0, 57, 99):
        for bad in (0.6, -0.6, float("nan"), float("inf")):
            factors = torch.full_like(norms, 0.5)
            check_factors(norms, factors, None, 1.0, "test")
            factors[place] = bad
            with pytest.raises(RuntimeError, match="beyond the sensitivity"):
                check_factors(norms, factors, None, 1.0, "test")
    check_factors(norms[:0], norms[:0], None, 1.0, "test")


@pytest.mark.parametrize("width", [0, 1, 5])
def test_lengths_of_rows_with_their_columns(width):
    norms, factors = values(6).double().abs() * 3, values(6, seed=1).double()
    columns = values(6, width, seed=2).double()
    moved = (norms * factors).unsqueeze(1)
    assert farthest(norms, factors, columns) == pytest.approx(
        float(torch.cat((moved, columns), 1).norm(dim=1).max())
    )
    assert longest(columns) == pytest.approx(float(columns.norm(dim=1).max()))
    assert longest(columns[:0]) == 0.0
    if width:
        columns[3, width - 1] = float("nan")
        assert math.isnan(longest(columns)) and math.isnan(farthest(norms, factors, columns))


@pytest.mark.parametrize("kind", ["plain", "strided", "empty"])
def test_halves_say_who_is_short(kind):
    norms = torch.tensor([0.0, 0.3, 0.6, math.nextafter(0.6, 1.0), 2.0, 1e30], dtype=torch.float64)
    expected = [[0.5], [0.5], [0.5], [-0.5], [-0.5], [-0.5]]
    if kind == "strided":
        norms = torch.stack([norms, norms - 100.0], dim=1)[:, 0]
    elif kind == "empty":
        norms, expected = norms[:0], []
    column = halves(norms, 0.6)
    assert column.shape == (len(expected), 1) and column.tolist() == expected


@pytest.mark.parametrize(("clip", "width"), [(1.0, 1), (0.7, 4), (3.0, 10)])
def test_slots_are_filled_one_after_the_other(clip, width):
    """By the rule itself, a number at a time: what is left is poured into the slots in order, each
    up to λ.
    """
    norms = torch.cat(
        [torch.linspace(0.0, 1.3 * clip, 40, dtype=torch.float64), torch.tensor([1e30, clip])]
    )
    columns = slots(norms, clip, width)
    assert columns.shape == (len(norms), width) and columns.dtype == torch.float64
    for norm, filled in zip(norms.tolist(), columns.tolist(), strict=True):
        left = max(0.0, math.sqrt(width) * (clip - norm))
        for slot in filled:
            poured = min(left, clip / math.sqrt(width))
            assert slot == pytest.approx(poured, abs=1e-14)
            left -= poured
        assert left < 1e-12
    assert slots(norms[:0], clip, width).shape == (0, width)


def test_columns_that_break_their_word_are_refused():
    columns = torch.full((4, 1), 0.5, dtype=torch.float64)
    check_columns(columns, 0.5, "rule")
    columns[2] = -0.51
    with pytest.raises(RuntimeError, match="beyond the sensitivity"):
        check_columns(columns, 0.5, "rule")
    columns[2] = float("nan")
    with pytest.raises(RuntimeError, match="beyond the sensitivity"):
        check_columns(columns, 0.5, "rule")


def held(*parameters):
    """The parameters as those of a module, and their layout."""
    module = nn.ParameterList(parameters)
    return module, Layout.of(dict(module.named_parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["contiguous", "strided", "viewed"])
def test_weights_move_and_come_back_bit_for_bit(dtype, kind):
    shapes = [(3, 4), (5,), (2, 3, 2, 2), ()]
    parameters = [
        nn.Parameter(values(*shape, seed=place).to(dtype)) for place, shape in enumerate(shapes)
    ]
    if kind == "strided":
        parameters.append(nn.Parameter(values(6, 5, seed=9).to(dtype).t()))
    module, layout = held(*parameters)
    if kind == "viewed":
        module.register_buffer("seen", parameters[0].detach())
    before, places = [p.detach().clone() for p in parameters], [p.data_ptr() for p in parameters]
    weights = Weights(layout, module)
    for seed in (1, 2):
        direction = values(layout.numel, seed=seed).to(layout.dtype)
        versions = [p._version for p in parameters]
        weights.move(direction, 0.3)
        parts = (direction * (0.3 / direction.double().norm().item())).split(
            [p.numel() for p in parameters]
        )
        for p, old, part, version in zip(parameters, before, parts, versions, strict=True):
            torch.testing.assert_close(p.detach(), old + part.view(p.shape).to(dtype))
            assert not torch.equal(p, old)
            assert p._version > version  # whoever saved it for a backward is told
        if kind == "viewed":  # whatever the forward reads of them has moved along
            assert torch.equal(module.seen, parameters[0])
        moved = parameters[0].detach().clone()
        with weights.restored():
            assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
        assert torch.equal(parameters[0], moved)
        weights.restore()
        assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
        assert [p.data_ptr() for p in parameters] == places


def test_a_graph_from_before_the_move_is_stale():
    """Its backward would take the gradient of one set of weights with the values of another."""
    parameter = nn.Parameter(values(3, 3))
    module, layout = held(parameter)
    loss = (parameter * parameter).sum()
    Weights(layout, module).move(torch.ones(9), 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_interrupt_while_the_weights_move_loses_nothing(monkeypatch):
    parameters = [nn.Parameter(values(4, seed=seed)) for seed in range(3)]
    before = [p.detach().clone() for p in parameters]
    module, layout = held(*parameters)
    weights = Weights(layout, module)

    def interrupted(values):
        parameters[0].data = values[0]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(weights, "_point", interrupted)
        with pytest.raises(KeyboardInterrupt):
            weights.move(torch.ones(12), 1.0)
    assert not torch.equal(parameters[0], before[0])
    weights.restore()
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))


@pytest.mark.parametrize("count", [6, 8])
def test_what_is_added_must_have_a_number_for_every_place(count):
    module, layout = held(nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4)))
    with pytest.raises(ValueError, match="for 7 parameters"):
        Weights(layout, module).move(torch.ones(count), 1.0)


@pytest.mark.parametrize("vector", [[0.0, 0.0, 0.0], [1.0, math.inf, 0.0], [1.0, math.nan, 0.0]])
@pytest.mark.parametrize("kind", ["own", "viewed"])
def test_without_a_direction_nothing_moves(vector, kind):
    parameter = nn.Parameter(values(3))
    module, layout = held(parameter)
    if kind == "viewed":
        module.register_buffer("seen", parameter.detach())
    before, weights = parameter.detach().clone(), Weights(layout, module)
    for given, distance in ((vector, 0.5), ([1.0, 2.0, 3.0], 0.0)):
        weights.move(torch.tensor(given), distance)
        assert torch.equal(parameter, before)
        weights.restore()
        assert torch.equal(parameter, before)
