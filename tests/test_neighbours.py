"""One record more or less, with the same randomness: how far the released sum moves."""

import math
import warnings

import pytest
import torch
from helpers import flat, mean_loss, private, tiny, toy_data, train
from networks import MODELS
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from zetaclip import LossError, methods


class Gradients(Dataset):
    """Each record is its own gradient: the loss is <weight, x>."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def inner(module, batch):
    return module(batch).sum(1).mean()


def released_sum(rows, clip, sigma=0.5, size=64, method=None, loss=inner, **options):
    """The noisy sum over all of ``rows`` (q = 1), with a fixed seed."""
    module = nn.Linear(rows.shape[1], 1, bias=False, dtype=rows.dtype)
    with torch.no_grad():
        module.weight.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the declared size
        _, module, optimizer, loader = private(
            module,
            Gradients(rows),
            sigma=sigma,
            clipping=clip,
            q=1.0,
            num_examples=size,
            method=method,
            **options,
        )
    train(module, optimizer, loader, loss)
    return -module.weight.detach().flatten().double() * size


ADVERSARIES = {
    "huge": 1e30,
    "largest": 3e38,
    "tiny": 1e-30,
    "denormal": 1e-42,
    "zero": 0.0,
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "ordinary": 1.0,
}


@pytest.mark.parametrize("clip", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("kind", ADVERSARIES)
def test_one_record_moves_the_sum_by_at_most_the_sensitivity(kind, clip):
    rows = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    for place in ("whole", "one-hot"):
        extra = torch.zeros(1, 30)
        extra[:, : 30 if place == "whole" else 1] = ADVERSARIES[kind]
        with_it, without = released_sum(torch.cat([rows, extra]), clip), released_sum(rows, clip)
        moved = float((with_it - without).norm())
        assert math.isfinite(float(with_it.norm())) and moved <= clip * (1 + 1e-4)
        if kind in ("huge", "largest"):  # worked out in float64, not thrown away
            assert moved == pytest.approx(clip, rel=1e-3)
        if kind in ("zero", "nan", "inf", "-inf"):  # counts as zero
            assert (
                moved <= 1e-5 * clip
            )  # a further row changes the order of summation, hence not quite 0


def test_a_gradient_too_long_to_bound_counts_as_zero():
    rows = torch.randn(20, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums = []
    for value in (0.0, 1e200, 1.7e308):
        extra = torch.full((1, 30), value, dtype=torch.float64)
        sums.append(released_sum(torch.cat([rows, extra]), 1.0))
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])


@pytest.mark.parametrize("clip", [1e-2, 1e-4, 1e-8])
@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize(
    ("x", "g"), [(1e-23, 1e19), (1e19, 1e-23), (1e-30, 1e30), (1e-19, 1e10), (1e-38, 1e38)]
)
def test_norms_that_underflow_do_not_pass_for_zero(x, g, positions, clip):
    """A tiny input times a huge output gradient is an ordinary gradient, though neither square is a
    float32."""
    data = torch.full((1, positions, 8), x)
    module = nn.Linear(8, 40, bias=False)
    with torch.no_grad():
        module.weight.zero_()
    _, module, optimizer, loader = private(
        module, (data,), sigma=0.0, clipping=clip, q=1.0, loss_reduction="sum"
    )
    train(module, optimizer, loader, lambda m, b: (m(b[0]) * g).sum())
    assert 0 < float(module.weight.detach().double().norm()) <= clip * (1 + 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("positions", [4, 66, 600])
def test_gradients_that_cancel_are_still_bounded(positions, dtype):
    """Two halves of a sequence that cancel but for a crumb: what is added must be what was
    measured."""
    generator = torch.Generator().manual_seed(positions)
    clip, size = 1e-3, 16
    scale = 1e6 if dtype == torch.float32 else 1e14
    half = torch.randn(positions // 2, size, generator=generator, dtype=dtype) * scale
    targets = torch.cat([half, -half])
    targets[0] += scale * (1e-7 if dtype == torch.float32 else 1e-16)
    x = torch.full((1, positions, size), 16.0, dtype=dtype)
    module = nn.Linear(size, size, bias=False, dtype=dtype)
    with torch.no_grad():
        module.weight.zero_()
    data = (x, targets.unsqueeze(0))
    _, module, optimizer, loader = private(
        module, data, sigma=0.0, clipping=clip, q=1.0, loss_reduction="sum"
    )
    train(module, optimizer, loader, lambda m, b: 0.5 * (m(b[0]) - b[1]).square().sum())
    assert float(module.weight.detach().double().norm()) <= clip * (1 + 1e-3)


class Difference(nn.Module):
    """A layer at two positions, one less the other: their gradients cancel."""

    def __init__(self, kind, inputs, outputs, dtype):
        super().__init__()
        self.turn = kind == "linear"
        make = nn.Linear if self.turn else lambda *size, **options: nn.Conv1d(*size, 1, **options)
        self.layer = make(inputs, outputs, bias=False, dtype=dtype)

    def forward(self, x):  # (records, inputs, 2)
        h = self.layer(x.transpose(1, 2)).transpose(1, 2) if self.turn else self.layer(x)
        return h[:, :, 0] - h[:, :, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 1024), (512, 128), (4608, 512)])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_small_terms_beside_terms_that_cancel_are_not_lost(kind, inputs, outputs, dtype):
    """Two positions that differ by values whose squares vanish beside 1.01² in that dtype: they are
    all that is left.

    Norms by Gram matrices of the same dtype came out too small by up to a factor of 2, and the
    record moved the sum by as much.
    """
    unit, rest = (2.0**-24, 1.001e-2) if dtype == torch.float32 else (2.0**-53, 1.001e-6)
    first = torch.full((inputs,), (0.98 * unit) ** 0.5, dtype=dtype)
    first[0] = 1.01
    length = float(first.double().norm())
    second = -first
    second[0], first[-1], second[-1] = 1.01, rest * length, -rest * length
    x = torch.stack([first, second], 1).unsqueeze(0) * (0.98 * unit) ** -0.5
    assert float((first[0] ** 2 + first[1] ** 2) - first[0] ** 2) == 0.0  # lost in an ordinary sum
    torch.manual_seed(0)
    module = Difference(kind, inputs, outputs, dtype)
    before = flat(module).double()
    _, module, optimizer, loader = private(
        module,
        (x, torch.tensor([3])),
        sigma=0.0,
        clipping=1.0,
        q=1.0,
        num_examples=1,
        loss_reduction="sum",
    )
    train(module, optimizer, loader, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"))
    moved = float((before - flat(module).double()).norm())
    assert moved == pytest.approx(1.0, abs=2**-11)


def test_a_long_text_over_a_small_table_is_bounded():
    table = nn.Embedding(3, 4)
    ids = torch.randint(0, 3, (5, 200))
    _, table, optimizer, loader = private(
        table, (ids,), sigma=0.0, clipping=0.1, q=1.0, loss_reduction="sum"
    )
    before = table.weight.detach().clone()
    expected = torch.zeros_like(before)
    for row in ids:
        grad = torch.autograd.grad(table(row[None]).square().sum(), table.weight)[0]
        expected += grad * min(1.0, 0.1 / float(grad.norm()))
    train(table, optimizer, loader, lambda m, b: m(b[0]).square().sum())
    assert ((before - table.weight.detach()) * 5 - expected).norm() <= 1e-5 * expected.norm()


def test_the_bound_is_tight_and_the_test_can_fail():
    """Aligned gradients move the sum by just C; clipping at 2C would be caught."""
    rows = torch.ones(5, 10)
    assert float((released_sum(rows, 1.0) - released_sum(rows[:-1], 1.0)).norm()) == pytest.approx(
        1.0, rel=1e-4
    )
    assert float((released_sum(rows, 2.0) - released_sum(rows[:-1], 2.0)).norm()) > 1.5


@pytest.mark.parametrize(
    "name", [name for name, (_, inputs) in MODELS.items() if inputs(1).is_floating_point()]
)
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, 1e30])
def test_a_poisoned_record_cannot_poison_the_run(name, value):
    """Any network: one record replaced moves the sum by at most twice the sensitivity, and the
    weights stay finite."""
    build, inputs = MODELS[name]
    x = inputs(7)
    y = torch.randint(0, 10, (7,))
    sums = []
    for poison in (x[3], torch.full_like(x[3], value)):
        torch.manual_seed(2)
        mixed = x.clone()
        mixed[3] = poison
        module = build()
        before = flat(module)
        _, module, optimizer, loader = private(module, (mixed, y), sigma=1.0, clipping=0.5, q=1.0)
        train(module, optimizer, loader)
        sums.append((before - flat(module)).double() * 7)
    assert torch.isfinite(sums[1]).all()
    assert float((sums[0] - sums[1]).norm()) <= 2 * 0.5 * (1 + 1e-3)


def test_dividing_by_the_realized_size_would_move_twice_as_far():
    """The literal form of the paper: all gradients -C·u, one record +C·u. By the constant it is C,
    by |batch| it is 2C."""
    rows = -torch.ones(20, 4) / 2
    other = torch.cat([rows, torch.ones(1, 4) / 2])
    constant = (released_sum(other, 1.0) - released_sum(rows, 1.0)).norm()
    assert float(constant) == pytest.approx(1.0, rel=1e-4)

    def realized(data):
        module = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            module.weight.zero_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, module, optimizer, loader = private(
                module, Gradients(data), sigma=0.0, q=1.0, num_examples=20, normalize="realized"
            )
        train(module, optimizer, loader, inner)
        return -module.weight.detach().flatten().double()

    shift = (realized(other) - realized(rows)).norm() * 21  # in units of the noise, σC / |batch|
    assert float(shift) == pytest.approx(2.0, rel=1e-4)


def summed(values, sigma, seed=0, physical=None, method=None):
    """One weight whose gradient is each record's one number; the released sum over all of them."""
    module = nn.Linear(1, 1, bias=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the declared size
        _, module, optimizer, loader = private(
            module, (values.unsqueeze(1),), sigma=sigma, seed=seed, q=1.0, num_examples=1,
            physical_batch_size=physical, loss_reduction="sum", method=method,
            clipping=None if method else 1.0, epochs=1,
        )  # fmt: skip
    with torch.no_grad():
        module.weight.zero_()
    train(module, optimizer, loader, lambda module, batch: module(batch[0]).sum())
    return -module.weight.item()


def naive(values, start=0.0):
    """Added one after the other in float32."""
    return float(torch.cat([torch.tensor([start]), values]).numpy().cumsum(dtype="float32")[-1])


@pytest.mark.parametrize(("physical", "name"), [(None, None), (1000, None), (None, "adadpigu")])
def test_many_small_records_are_not_lost_beside_many_large_ones(physical, name):
    """From 2¹⁵ on the floats are 2⁻⁸ apart: half of that, added 2¹⁵ times, is nothing, if it is
    added to the sum itself."""
    many = 2**15
    without = torch.cat([torch.ones(many), torch.full((many,), -(2.0**-9))])
    with_it = torch.cat([torch.ones(1), without])
    assert naive(with_it) - naive(without) > 60  # one record, and C = 1
    method = None if name is None else methods.get(name)
    moved = summed(with_it, 0.0, 0, physical, method) - summed(without, 0.0, 0, physical, method)
    assert moved == pytest.approx(1.0, abs=0.02)


def test_records_can_not_round_the_noise_away():
    """Added to the noise one after the other, these push every value of it onto one float, and a
    record more onto another."""
    many = 2**15
    values = torch.cat([torch.ones(many - 16), torch.full((many,), 2.0**-9)])
    noise = 4 * torch.randn(20, generator=torch.Generator().manual_seed(0))
    assert {naive(values, float(start)) for start in noise} == {float(many)}
    # float32 numbers of this size are 1/256 apart: two of twenty draws may fall on one.
    assert len({summed(values, 4.0, seed) for seed in range(20)}) >= 18


def half(reduce, wide):
    """A loss of bfloat16 outputs, reduced in float32 or in bfloat16 itself."""

    def loss(module, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(batch)
            assert out.dtype == torch.bfloat16
            return getattr((out.float() if wide else out).sum(1), reduce)()

    return loss


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_in_half_precision_no_record_is_rounded_by_the_number_of_others(reduce):
    """A record without a gradient joins 946 equal ones: nothing moves, though 1/946 and 1/947 are
    other bfloat16 numbers. Where a mean was divided by the rows, all moved by more than 4 C."""
    rows = torch.full((947, 30), 0.9 / math.sqrt(30))
    rows[-1] = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sums = [
            released_sum(some, 1.0, loss=half(reduce, wide=True), loss_reduction=reduce)
            for some in (rows[:-1], rows)
        ]
    assert float((sums[1] - sums[0]).norm()) <= 1e-3
    assert float(sums[0].norm()) == pytest.approx(946 * 0.9, rel=1e-2)


def test_a_mean_that_is_itself_in_half_precision_is_refused_with_the_cure():
    rows = torch.full((946, 30), 0.1)
    with pytest.raises(LossError, match=r'half precision.*loss_reduction="sum".*out\.float\(\)'):
        released_sum(rows, 1.0, loss=half("mean", wide=False))
    # 64 is a bfloat16 number, and 64 / 64 is 1 there, too.
    _, module, optimizer, loader = private(
        nn.Linear(30, 1).bfloat16(), Gradients(rows[:64].bfloat16()), q=1.0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(module, optimizer, loader, inner)
    assert not [n for n in optimizer._loop.log.ledger.header.notes if "half precision" in n]


def test_the_same_number_of_draws_whatever_the_data():
    """Neighbours leave the same ledger: steps, batches, queries and noise."""
    rows = []
    for size in (24, 23):
        x, y = toy_data(24)
        engine, module, optimizer, loader = private(
            tiny(), (x[:size], y[:size]), q=0.5, num_examples=24
        )
        train(module, optimizer, loader, mean_loss, epochs=3)
        rows.append(
            [(r.step, r.batch, r.query, r.sensitivity, r.noise_std) for r in engine.ledger.rows()]
        )
    assert rows[0] == rows[1]
