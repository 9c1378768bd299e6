"""The rule of recurrent layers, beyond parity with the loop (test_rules.py)."""

import copy

import pytest
import torch
from helpers import assert_parity, looped_gradients, recorded, square_loss
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from zetaclip.gradients import CaptureError

KINDS = (nn.LSTM, nn.GRU, nn.RNN)


def _x(*shape, dtype=torch.float64):
    return torch.randn(5, *shape, dtype=dtype)


def _gradients(module, batch, loss):
    chunk, *_ = recorded(module, batch, loss)
    with torch.no_grad():
        return torch.cat(list(chunk.pieces()))


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers_take_the_rule(kind):
    _, _, shadows = recorded(kind(6, 4, batch_first=True), (_x(3, 6).float(),), square_loss)
    assert [shadow.path for shadow in shadows] == ["recurrent"]


class Apart(nn.Module):
    """Two layers of one recurrent module as two modules, with dropout between."""

    def __init__(self, whole):
        super().__init__()
        kind = type(whole)
        self.first = kind(whole.input_size, whole.hidden_size, batch_first=True)
        self.second = kind(whole.hidden_size, whole.hidden_size, batch_first=True)
        own = whole.state_dict()
        for layer, part in enumerate((self.first, self.second)):
            part.load_state_dict({name: own[name[:-1] + str(layer)] for name in part.state_dict()})

    def forward(self, x):
        return self.second(nn.functional.dropout(self.first(x)[0], 0.5, self.training))


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers_is_that_of_two_layers_with_dropout_between(kind):
    whole = kind(6, 4, 2, batch_first=True, dropout=0.5).double()
    apart, x = Apart(whole).double(), _x(3, 6)
    found = []
    for module in (whole, apart):
        torch.manual_seed(3)
        found.append(_gradients(module, (x,), square_loss))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)
    whole.eval()
    assert_parity(whole, (x,), square_loss, 1e-11)
    assert not torch.allclose(found[0], _gradients(whole, (x,), square_loss))


@pytest.mark.parametrize("kind", KINDS)
def test_initial_states_get_their_gradients(kind):
    layer, x = kind(6, 4, batch_first=True).double(), _x(3, 6)
    pair = kind is nn.LSTM
    found = []
    for private in (False, True):
        states = [
            torch.ones(1, 5, 4, dtype=torch.float64).requires_grad_() for _ in range(1 + pair)
        ]

        def loss(module, batch, states=states):
            return square_loss(lambda x: module(x, tuple(states) if pair else states[0]), batch)

        recorded(layer, (x,), loss) if private else loss(layer, (x,)).backward()
        layer.zero_grad()
        found.append(torch.cat([state.grad for state in states]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_last_state_is_used(kind):
    """No gradient comes to the outputs of an LSTM if only the last state of its cell counts."""

    def loss(module, batch):
        last = module(*batch)[1]
        return square_loss(lambda x: (last[1] if isinstance(last, tuple) else last)[0], batch)

    assert_parity(kind(6, 4, batch_first=True).double(), (_x(3, 6),), loss, 1e-11)


@pytest.mark.parametrize("frozen", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"])
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_are_left_out(kind, frozen):
    layer = kind(6, 4, batch_first=True).double()
    getattr(layer, frozen).requires_grad_(False)
    assert_parity(layer, (_x(3, 6),), square_loss, 1e-11)


class TimeFirst(nn.Module):
    def __init__(self, forgotten):
        super().__init__()
        self.layer, self.forgotten = nn.GRU(6, 4), forgotten

    def forward(self, x):
        if self.forgotten:
            return self.layer(x)[0]
        return self.layer(x.transpose(0, 1))[0].transpose(0, 1)


@pytest.mark.parametrize("forgotten", [True, False])
def test_as_many_steps_as_records_are_refused_with_time_first(forgotten):
    """With batch_first forgotten, the states of one record would go to the next."""
    module = TimeFirst(forgotten).double()
    with pytest.raises(CaptureError, match=r"as many steps as there are records.*batch_first=True"):
        recorded(module, (_x(5, 6),), square_loss)
    if forgotten:
        with pytest.raises(CaptureError, match="one record must be one row"):
            recorded(module, (_x(3, 6),), square_loss)
    else:
        assert_parity(module, (_x(3, 6),), square_loss, 1e-11)


def test_the_layout_is_known_once_the_numbers_differed():
    module = TimeFirst(False).double()
    expected = looped_gradients(module, (x := _x(5, 6),), square_loss)

    def loss(module, batch):
        with torch.autograd.set_grad_enabled(True):
            module(_x(3, 6))
        return square_loss(module, batch)

    torch.testing.assert_close(_gradients(module, (x,), loss), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_refused(kind):
    def loss(module, batch):
        packed = pack_padded_sequence(batch[0], torch.full((5,), 3), batch_first=True)
        return module(packed)[0].data.sum()

    with pytest.raises(CaptureError, match=r"PackedSequence.*padded tensor"):
        recorded(kind(6, 4, batch_first=True), (_x(3, 6).float(),), loss)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["model", "autocast"])
def test_half_precision_is_computed_in_float32(kind, how):
    """A layer with weights that are bfloat16 numbers has the gradients of a float32 layer, up to
    the rounding of its output."""
    plain = kind(6, 4, 2, batch_first=True, bidirectional=True)
    with torch.no_grad():
        for p in plain.parameters():
            p.copy_(p.bfloat16())
    x = _x(3, 6, dtype=torch.float32).bfloat16()
    expected = _gradients(plain, (x.float(),), square_loss)
    short = copy.deepcopy(plain).bfloat16() if how == "model" else plain

    def loss(module, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            out = module(*batch)[0]
        assert out.dtype == torch.bfloat16
        return square_loss(lambda x: out.float(), batch)

    found = _gradients(short, (x,), loss)
    assert found.dtype == torch.float32
    assert (found - expected).norm() <= 0.01 * expected.norm()


def test_wrong_shapes_are_told_as_torch_does():
    layer = nn.LSTM(6, 4, batch_first=True)
    with pytest.raises(CaptureError, match="one row of the first dimension"):
        recorded(layer, (torch.randn(5, 6),), square_loss)
    with pytest.raises(RuntimeError, match=r"input\.size"):
        recorded(layer, (torch.randn(5, 3, 7),), square_loss)
    with pytest.raises(ValueError, match="dtype"):
        recorded(layer, (_x(3, 6),), square_loss)
    states = torch.zeros(2, 5, 4), torch.zeros(2, 5, 4)
    with pytest.raises(RuntimeError, match="hidden"):
        recorded(
            layer, (torch.randn(5, 3, 6),), lambda m, b: square_loss(lambda x: m(x, states), b)
        )
