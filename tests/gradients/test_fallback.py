"""Modules without a rule."""

from collections import deque
from dataclasses import dataclass

import numpy
import pytest
import torch
from helpers import assert_parity, mean_loss, private, recorded, square_loss, train
from networks import Recurrent, Scaled
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from zetaclip import ValidationError, check_parity
from zetaclip.gradients import CaptureBuffer, CaptureError, make_shadows


class Subclass(nn.Linear):
    """Not nn.Linear: computes something else."""

    def forward(self, x):
        return super().forward(x) * 2


class Branching(nn.Module):
    """Looks at values, so it can't be vectorised."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return (x * self.weight if x.sum() > 0 else x * self.weight * 3).sum(1, keepdim=True)


def own(kind):
    """A subclass, which has no rule."""
    return type(f"Own{kind.__name__}", (kind,), {})


def _x(*shape):
    return torch.randn(5, *shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: Subclass(6, 4), (6,)),
        (lambda: nn.Bilinear(6, 6, 3), (6,)),
        (lambda: nn.ConvTranspose2d(2, 3, 3), (2, 4, 4)),
        (lambda: nn.PReLU(3), (3, 4)),
        (lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), (6,)),
        (Scaled, (6,)),
        (lambda: own(nn.LSTM)(6, 4, 2, batch_first=True, bidirectional=True), (3, 6)),
        (lambda: own(nn.GRU)(6, 4, batch_first=True), (3, 6)),
        (lambda: own(nn.RNN)(6, 4, batch_first=True), (3, 6)),
    ],
    ids=["subclass", "bilinear", "transposed", "prelu", "weight-norm", "raw", "lstm", "gru", "rnn"],
)
def test_general_path_agrees_with_the_loop(build, shape):
    module = build().double()
    inputs = (_x(*shape), _x(*shape)) if isinstance(module, nn.Bilinear) else (_x(*shape),)
    assert_parity(module, inputs, square_loss, 1e-11)


def test_what_cannot_be_vectorised_is_looped_and_said_so():
    module = Branching().double()
    with pytest.warns(UserWarning, match=r"Branching.*loop over examples"):
        _, _, shadows = recorded(module, (_x(6),), square_loss)
    assert shadows[0].path == "per example (loop)"
    x = _x(6)
    loop = torch.stack(
        [
            torch.autograd.grad(square_loss(module, (x[i : i + 1],)), module.weight)[0]
            for i in range(5)
        ]
    )
    with pytest.warns(UserWarning, match="loop"):
        chunk, *_ = recorded(module, (x,), square_loss)
    with torch.no_grad():
        torch.testing.assert_close(chunk.norms(), loop.norm(dim=1), rtol=1e-12, atol=0)


def test_recurrent_states_are_sliced_along_their_own_dimension():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = own(nn.LSTM)(6, 4, 2, batch_first=True)

        def forward(self, x, h, c):
            out, (h, c) = self.rnn(
                x, (h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous())
            )
            return torch.cat([out[:, -1], h[-1], c[0]], 1)

    assert_parity(Stateful().double(), (_x(3, 6), _x(2, 4), _x(2, 4)), square_loss, 1e-11)


def test_dropout_inside_a_looped_module_is_one_and_the_same_in_forward_and_backward():
    """The recorded gradient must belong to the mask that the forward drew: at rate 1/2 another mask
    is far off."""

    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(50))

        def forward(self, x):
            self.seen = torch.nn.functional.dropout(x * self.weight, 0.5, self.training)
            return self.seen

    module = Dropped().double()
    seen = []

    def loss_fn(module, batch):
        out = module(batch[0])
        seen.append(out.detach())
        return out.sum(1).mean()

    chunk, *_ = recorded(module, (torch.ones(5, 50, dtype=torch.float64),), loss_fn)
    with torch.no_grad():
        # out = mask * 2 * weight; its derivative with respect to the weight is the output itself
        # here.
        torch.testing.assert_close(torch.cat(list(chunk.pieces())), seen[0], rtol=1e-12, atol=0)
    assert (seen[0] == 0).any() and not torch.equal(seen[0][0], seen[0][1])


def test_outputs_without_a_row_per_record_are_refused():
    class Total(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x):
            return (x * self.weight).sum()

    with pytest.raises(CaptureError, match="one row per record"):
        recorded(Total(), (torch.randn(5, 6),), lambda m, b: m(b[0]))


class Cut(nn.Module):
    """Sums each record up to its own length, given in any form."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x, lengths, *settings):
        return torch.stack(
            [(row * self.weight)[: int(n)].sum() for row, n in zip(x, lengths, strict=True)]
        ).unsqueeze(1)


class Lengths:
    def __init__(self, values):
        self.values = torch.tensor(values)

    def __iter__(self):
        return iter(self.values)


class Slots:
    __slots__ = ("values",)

    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return iter(self.values)


class Nested:
    def __init__(self, values):
        self.inner = Lengths(values)

    def __iter__(self):
        return iter(self.inner)


@pytest.mark.filterwarnings("ignore:.*loop over examples")
@pytest.mark.parametrize("form", [list, tuple, numpy.array, deque, Lengths, Slots, Nested])
def test_values_for_each_record_that_are_no_tensors_are_refused(form):
    """Every record would be cut at the first one's length: only tensors are split."""
    x, lengths = _x(6), [1, 6, 3, 2, 5]
    with pytest.raises(CaptureError, match=r"as a tensor|Pass it that way"):
        recorded(Cut(), (x,), lambda m, b: m(b[0], form(lengths)).sum(1).mean())
    assert_parity(Cut(), (x, torch.tensor(lengths)), lambda m, b: m(*b).sum(1).mean(), 1e-12)
    if form in (list, tuple, numpy.array):  # of one record there is nothing to split
        recorded(Cut(), (x[:1],), lambda m, b: m(b[0], form(lengths[:1])).sum(1).mean())
        with pytest.raises(CaptureError):  # the check of gradients is not blind to it either
            check_parity(Cut(), (x, form(lengths)), lambda m, b: m(*b).sum(1).mean())


@pytest.mark.filterwarnings("ignore:.*loop over examples")
@pytest.mark.parametrize(
    "meta",
    [lambda v: (v, v), lambda v: {"lengths": [v]}, lambda v: numpy.array([v, v])],
    ids=["pair", "dict", "array"],
)
def test_values_for_each_record_are_found_at_any_depth(meta):
    class Inner(Cut):
        def forward(self, x, meta):
            return super().forward(x, meta["lengths"][0] if isinstance(meta, dict) else meta[0])

    with pytest.raises(
        CaptureError, match=r"items that are not tensors for 5 records.*torch\.Size"
    ):
        recorded(Inner(), (_x(6),), lambda m, b: m(b[0], meta([1, 6, 3, 2, 5])).sum(1).mean())


@pytest.mark.filterwarnings("ignore:.*loop over examples")
def test_a_setting_that_is_as_long_as_a_batch_by_chance_is_no_value_for_each_record():
    module = Cut()
    shadows, _ = make_shadows(module, set(module.parameters()), recorder := CaptureBuffer())
    shadows[0].attach()
    for rows in (5, 2):  # the batch of two is as long as the setting
        recorder.open(rows)
        module(_x(6)[:rows], torch.full((rows,), 3), (8, 8), torch.Size([rows, 6])).sum().backward()
    assert len(recorder.received) == 1


@pytest.mark.parametrize("returned", ["number", "object"])
@pytest.mark.filterwarnings("ignore:.*loop over examples")
def test_what_is_returned_beside_tensors_must_be_the_same_for_all(returned):
    """The first record's would be taken for all of them."""

    @dataclass
    class Out:
        values: torch.Tensor

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

        def forward(self, x):
            y = x * self.weight
            return (y, float(x.abs().max())) if returned == "number" else Out(y)

    def loss(module, batch):
        out = module(batch[0])
        return (out[0] / out[1] if returned == "number" else out.values).sum(1).mean()

    with pytest.raises(CaptureError, match=r"beside tensors.*Return tensors"):
        recorded(Net(), (_x(6),), loss)


@pytest.mark.parametrize(
    "build",
    [Scaled, lambda: torch.nn.utils.weight_norm(nn.Linear(6, 4))],
    ids=["raw", "old weight norm"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_hooks_on_a_unit_run_once(build):
    """In training as in evaluation, and for the gradients."""
    module = build().double()
    module.register_forward_pre_hook(lambda module, args: (args[0] * 10,))
    module.register_forward_hook(lambda module, args, out: out + 1)
    assert_parity(module, (_x(6),), square_loss, 1e-11)


def test_shared_tensors_as_arguments_are_refused():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x, mask):
            return x * self.weight * mask

    with pytest.raises(CaptureError, match=r"shape \(6,\)"):
        recorded(Masked(), (torch.randn(5, 6),), lambda m, b: m(b[0], torch.ones(6)).sum(1).mean())


def test_a_recurrent_network_trains():
    data = (torch.randn(12, 4, 6), torch.randint(0, 3, (12,)))
    _, module, optimizer, loader = private(Recurrent(dropout=0.0), data, sigma=0.5)
    before = module.rnn.weight_hh_l0.detach().clone()
    assert train(module, optimizer, loader, mean_loss) == 2
    assert not torch.equal(before, module.rnn.weight_hh_l0)


class Listed(nn.Module):
    """Parameters in a list have no forward of their own: their owner uses them."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(6)) for _ in range(2)])
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x * self.weights[0] * self.temperature + self.weights[1]


class BothWays(nn.Module):
    """One attention that serves as self- and as cross-attention."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, other):
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.attention(x, other, other, need_weights=False)[0]


class TwoPrecisions(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 4).double(), nn.Linear(4, 3).float()

    def forward(self, x):
        return self.narrow(torch.tanh(self.wide(x)).float()).double()


def test_scalars_lists_of_parameters_and_mixed_uses():
    assert_parity(Listed().double(), (_x(6),), square_loss, 1e-11)
    assert_parity(BothWays().double(), (_x(6, 8), _x(4, 8)), square_loss, 1e-11)
    assert_parity(TwoPrecisions(), (_x(6),), square_loss, 1e-6)


class Mixed(nn.Module):
    """A parametrization with a layer inside: it is given a weight, whose rows could be taken for
    records."""

    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, weight):
        return self.mix(weight)


def mixed(frozen=False):
    layer = nn.Linear(6, 5, bias=False)
    parametrize.register_parametrization(layer, "weight", Mixed(6))
    layer.parametrizations.weight.original.requires_grad_(not frozen)
    return layer


def used_twice():
    layer = parametrizations.weight_norm(nn.Linear(6, 6, bias=False))
    return nn.Sequential(layer, nn.Tanh(), layer)


@pytest.mark.parametrize(
    "build",
    [
        lambda: parametrizations.weight_norm(nn.Linear(6, 4, bias=False)),
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 3)), parametrizations.weight_norm(nn.Conv1d(2, 3, 2, bias=False))
        ),
        lambda: parametrizations.orthogonal(nn.Linear(6, 4, bias=False)),
        mixed,
        lambda: mixed(frozen=True),
        used_twice,
    ],
    ids=["linear", "convolution", "orthogonal", "mixed", "adapter", "twice"],
)
def test_a_parametrized_layer_is_one_unit(build):
    """Without a bias it has no parameter of its own: they lie in parts whose forward is given
    weights, never a record."""
    torch.manual_seed(0)
    module = build().double()
    assert_parity(module, (_x(6),), square_loss, 1e-11)
    assert len(recorded(module, (_x(6),), square_loss)[2]) == 1


def test_a_cached_weight_is_refused():
    """The weight made from one record's alias would collect the gradients of all."""
    module = parametrizations.weight_norm(nn.Linear(6, 4, bias=False))

    def cached(module, batch):
        with parametrize.cached():
            return square_loss(module, batch)

    with pytest.raises(CaptureError, match=r"outside of cached\(\)"):
        recorded(module, (torch.randn(5, 6),), cached)


class Held(nn.Module):
    """A weight in a module of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 6))

    def forward(self):
        return self.weight


class Scaling(Held):
    def forward(self, by):
        return self.weight * by


class Away(nn.Module):
    """Uses a weight that a part without records hands out: all records share it."""

    def __init__(self, part, *args):
        super().__init__()
        self.part, self.args = part, args

    def forward(self, x):
        return x @ self.part(*self.args).t()


def test_a_part_whose_forward_takes_no_record_is_refused_before_any_batch():
    with pytest.raises(ValidationError, match=r"part \(Held\): its forward is given no record"):
        private(Away(Held()), (torch.randn(12, 6), torch.zeros(12)))


@pytest.mark.parametrize("by", [2.0, torch.tensor(2.0), None], ids=["number", "scalar", "none"])
def test_a_part_that_is_given_no_record_is_refused(by):
    with pytest.raises(CaptureError, match=r"part \(Scaling\): its forward is given no record"):
        recorded(Away(Scaling(), by), (torch.randn(5, 6),), square_loss)
