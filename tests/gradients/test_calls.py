"""Ways to call a layer, and kinds of layers: they work, or an error says what to do."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_parity, mean_loss, private, recorded, square_loss, tiny, toy_data
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from zetaclip import ValidationError
from zetaclip.engine._guard import OrderError
from zetaclip.gradients import CaptureError


def _x(*shape):
    return torch.randn(5, *shape, dtype=torch.float64)


def first(out):
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Linear(6, 4), (6,)),
        (lambda: nn.Conv1d(2, 3, 2), (2, 6)),
        (lambda: nn.LayerNorm(6), (6,)),
        (lambda: nn.GroupNorm(2, 4), (4, 3)),
        (lambda: nn.InstanceNorm1d(4, affine=True), (4, 3)),
        (lambda: nn.PReLU(), (6,)),
        (lambda: nn.GRU(6, 4, batch_first=True), (3, 6)),
    ],
    ids=["linear", "convolution", "layer norm", "group norm", "instance norm", "vmap", "loop"],
)
def test_inputs_by_keyword(build, shape):
    assert_parity(
        build().double(),
        (_x(*shape),),
        lambda m, b: square_loss(lambda x: first(m(input=x)), b),
        1e-11,
    )


def test_a_state_by_keyword_before_the_input():
    """As many layers as records: nothing but the name tells which is which."""
    gru = nn.GRU(6, 4, 5, batch_first=True).double()
    state = torch.randn(5, 5, 4, dtype=torch.float64)

    def loss(module, batch):
        x, h = batch
        return square_loss(lambda x: module(hx=h.transpose(0, 1).contiguous(), input=x)[0], (x,))

    assert_parity(gru, (_x(3, 6), state), loss, 1e-11)


class Bag(nn.Module):
    def __init__(self, table, raw=False):
        super().__init__()
        self.table, self.head = table, nn.Linear(6, 3)
        if raw:
            self.scale = nn.Parameter(torch.ones(6))

    def forward(self, ids):
        found = self.table(ids)
        return self.head(found.mean(1) if found.dim() == 3 else found)


def test_sparse_tables_work_where_they_have_a_rule_and_are_refused_elsewhere():
    ids, y = torch.randint(0, 11, (5, 4)), torch.randint(0, 3, (5,))
    for module in (
        Bag(nn.EmbeddingBag(11, 6, sparse=True)),
        Bag(nn.Embedding(11, 6, sparse=True), raw=True),
    ):
        with pytest.raises(ValidationError, match=r"table.*sparse=False"):
            private(module, (ids, y))
    plain = Bag(nn.Embedding(11, 6)).double()
    sparse = copy.deepcopy(plain)
    sparse.table.sparse = True
    found = [recorded(m, (ids, y), mean_loss)[0].pieces() for m in (plain, sparse)]
    assert torch.equal(*(torch.cat(list(pieces)) for pieces in found))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscript_is_refused():
    for made in (torch.jit.script(tiny()), torch.jit.trace(tiny(), torch.randn(2, 6))):
        with pytest.raises(ValidationError, match=r"TorchScript.*before torch\.jit\.script"):
            private(made, toy_data())
        with pytest.raises(ValidationError, match=r"1 .*TorchScript"):
            private(nn.Sequential(nn.Linear(6, 6), made), toy_data())


def test_a_backward_that_asks_for_parameters_is_named_in_the_error():
    _, module, optimizer, loader = private(tiny(), toy_data())
    for batch in loader:
        mean_loss(module, batch).backward(inputs=list(module.parameters()))
        with pytest.raises(OrderError, match="without inputs="):
            optimizer.step()
        break


@pytest.mark.parametrize("by", ["position", "keyword"])
def test_packed_sequences_are_refused(by):
    def loss(module, batch):
        packed = pack_padded_sequence(batch[0], torch.full((5,), 3), batch_first=True)
        return F.mse_loss(
            (module(packed) if by == "position" else module(input=packed))[1][0].sum(),
            torch.zeros(()),
        )

    with pytest.raises(CaptureError, match=r"PackedSequence.*padded tensor"):
        recorded(nn.LSTM(6, 4, batch_first=True), (torch.randn(5, 3, 6),), loss)
