"""Half precision: what a record adds is a function of this record, whatever the loss reduces by."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import private
from torch import nn

from zetaclip import LossError, PrivacyLeakWarning
from zetaclip.engine import _loss_root
from zetaclip.engine._loss_check import LossCheck
from zetaclip.engine._private_module import PrivateModule
from zetaclip.mechanism import Mechanism

N, WIDTH, CLASSES, TOKENS = 13, 8, 5, 3


class Tokens(nn.Module):
    """A classifier of every token of a record."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 16), nn.LayerNorm(16)
        self.second, self.last = nn.GRU(16, 12, batch_first=True), nn.Linear(12, CLASSES)

    def forward(self, x):
        return self.last(self.second(torch.tanh(self.norm(self.first(x))))[0])


def _whole(out, y):
    return F.cross_entropy(out.flatten(0, 1).float(), y.flatten())


def _by_record(out, y):
    return F.cross_entropy(out.transpose(1, 2).float(), y, reduction="none").mean(1).mean()


def _divided(out, y):
    each = F.cross_entropy(out.transpose(1, 2).float(), y, reduction="none").mean(1)
    return each.sum() / len(out)


def _terms(out, y):
    return 0.5 * _whole(out, y) + out.float().square().mean() / 4


LOSSES = (_whole, _by_record, _divided, _terms)


@pytest.fixture
def each(monkeypatch):
    """Every record's gradient in one batch of all records, as the mechanism gets it."""
    seen = []
    absorb = Mechanism.absorb

    def watched(self, chunk):
        seen.append(torch.cat(list(chunk.pieces())).double())
        absorb(self, chunk)

    monkeypatch.setattr(Mechanism, "absorb", watched)

    def run(x, y, loss, mode):
        torch.manual_seed(0)
        module = Tokens()
        if mode == "model":
            module, x = module.bfloat16(), x.bfloat16()
        _, module, optimizer, loader = private(module, (x, y), q=1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for inputs, labels in loader:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
                    out = module(inputs)
                loss(out, labels).backward()
                optimizer.step()
        notes = optimizer._loop.log.ledger.header.notes
        assert not [note for note in notes if "half precision" in note]
        return seen.pop()

    return run


def _data(rows):
    torch.manual_seed(1)
    return torch.randn(rows, TOKENS, WIDTH), torch.randint(0, CLASSES, (rows, TOKENS))


def _far(found, expected):
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


@pytest.mark.parametrize("mode", ["autocast", "model"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_record_has_one_gradient_whoever_else_is_there(each, loss, mode):
    """Up to how kernels round a row of float32 beside others. Divided by the rows first, gradients
    in bfloat16 differ by up to 2^-9."""
    x, y = _data(N)
    whole = each(x, y, loss, mode)
    for kept in ([0], [6], list(range(1, N)), [*range(6), *range(7, N)], [3, 4, 5]):
        assert _far(each(x[kept], y[kept], loss, mode), whole[kept]) <= 2e-6


def _cast(out, y):
    return _by_record(out.bfloat16(), y)


def _frozen_head(out, y):
    head = torch.linspace(-1, 1, CLASSES**2).view(CLASSES, CLASSES).bfloat16()
    return _whole(F.linear(out.bfloat16(), head), y)


@pytest.mark.parametrize("loss", [_cast, _frozen_head])
def test_half_precision_outside_of_private_layers_counts_as_well(each, loss):
    x, y = _data(N)
    whole = each(x, y, loss, "off")
    for kept in ([0], list(range(1, N)), [3, 4, 5]):
        assert _far(each(x[kept], y[kept], loss, "off"), whole[kept]) <= 2e-6


@pytest.mark.parametrize("mode", ["autocast", "model"])
def test_the_gradients_are_those_of_float32_up_to_rounding(each, mode):
    x, y = _data(N)
    assert _far(each(x, y, _whole, mode), each(x, y, _whole, "off")) <= 0.05


def _scaled(out, y):
    return 0.3 * _whole(out, y)


def _squares(out, y):
    return F.mse_loss(out.float(), torch.zeros(out.shape))


def _short(out, y):
    return out.flatten(1).sum(1).mean()


def _own(out, y):
    with torch.autocast("cpu", enabled=False):
        return F.cross_entropy(out.flatten(0, 1), y.flatten())


def _twice(out, y):
    return out.float().mean(0).sum(1).repeat(len(out)).mean()


def _rounded_root(out, y):
    return _whole(out, y).bfloat16()


def _rounded_between(out, y):
    return _whole(out, y).bfloat16().float()


def _overflows(out, y):
    return _whole(out, y).half() * 1024  # 87 * 1024 is too large for float16


def _thrice(out, y):
    mean = out.flatten(1).sum(1).mean()  # in bfloat16, which has no 3 * 87
    return mean + mean + mean


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (_rounded_root, r"301 has no exact value in torch\.bfloat16"),
        (_rounded_between, r"301 has no exact value in torch\.bfloat16"),
        (_overflows, r"89088 has no exact value in torch\.float16"),
        (_thrice, "MeanBackward0 is used several times"),
        (_scaled, "MulBackward0 comes between"),
        (_squares, "MseLossBackward0 comes between"),
        (_short, r"301 has no exact value in torch\.bfloat16"),
        (_own, "divides by the labels of the whole batch"),
        (_twice, "two means over the rows"),
    ],
)
def test_what_may_not_be_exact_is_refused_with_the_cure(each, loss, why):
    rows = {_scaled: N, _squares: N, _twice: N, _thrice: 87, _overflows: 87}.get(loss, 301)
    with pytest.raises(LossError, match=why + r'.*reduction="sum" in the loss'):
        each(*_data(rows), loss, "autocast")


def test_other_gradients_of_the_same_backward_are_not_scaled():
    _, module, optimizer, loader = private(Tokens(), _data(N), q=1.0)
    beside = torch.ones((), requires_grad=True)
    for inputs, labels in loader:
        with torch.autocast("cpu", torch.bfloat16):
            out = module(inputs)
        (beside * 3).backward()
        assert beside.grad == 3
        with pytest.raises(LossError, match="not a weight of the private module"):
            (_whole(out, labels) + beside).backward()
        _whole(out, labels).backward()
        optimizer.step()


def test_the_division_is_tried_and_not_believed():
    tried = [
        _loss_root._undone(kind, rows, rows * k, torch.float32, torch.device("cpu"))
        for rows in range(2, 400)
        for k in (1, 3)
        for kind in ("Mean", "NllLoss")
    ]
    assert all(tried)
    # 946 is no bfloat16 number.
    assert not _loss_root._undone("Mean", 946, 946, torch.bfloat16, torch.device("cpu"))


def test_without_it_the_gradients_depend_on_the_rows(each, monkeypatch):
    """The limit above is one that a division by the rows breaks."""
    monkeypatch.setattr(LossCheck, "divides", property(lambda self: False))
    x, y = _data(N)
    for rows in (N, N - 1):
        with pytest.raises(PrivacyLeakWarning, match="half precision"):
            each(x[:rows], y[:rows], _whole, "autocast")

    def without_warning(rows):
        with monkeypatch.context() as patch:
            never = property(lambda model: False, lambda model, found: None)
            patch.setattr(PrivateModule, "rounds_by_rows", never, raising=False)
            return each(x[:rows], y[:rows], _whole, "autocast")

    found = [without_warning(rows) for rows in (N, N - 1)]
    assert _far(found[1], found[0][: N - 1]) > 1e-3


def test_a_batch_that_stays_out_is_no_concern_of_other_losses():
    _, module, _, loader = private(Tokens(), _data(N), q=1.0)
    inputs, _ = next(iter(loader))
    with torch.autocast("cpu", torch.bfloat16):
        module(inputs)
    other = nn.Linear(WIDTH, 2)
    other(torch.ones(4, WIDTH)).mean().backward()
    assert torch.equal(other.bias.grad, torch.full((2,), 0.5))
