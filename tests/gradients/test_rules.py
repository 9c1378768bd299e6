"""Every layer rule against autograd, one example at a time. A new rule without a case here fails a
test."""

import pytest
import torch
from helpers import assert_parity, square_loss
from torch import nn

from zetaclip.gradients import LAYER_RULES

N = 5


def _x(*shape):
    return torch.randn(N, *shape, dtype=torch.float64)


def _ids(*shape, high=9):
    return torch.randint(0, high, (N, *shape))


class Pooled(nn.Module):
    """A layer whose input needs a gradient, followed by an in-place activation."""

    def __init__(self, before, layer):
        super().__init__()
        self.before, self.layer = before, layer

    def forward(self, x):
        return torch.relu_(self.layer(self.before(x)))


class Attend(nn.Module):
    """Attention with all its switches; returns a tensor."""

    def __init__(self, cross=False, **options):
        super().__init__()
        self.cross = cross
        self.call = options.pop("call", {})
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x, *others):
        key, value = others if self.cross else (x, x)
        if not self.cross:
            key = value = x
        out, weights = self.attention(x, key, value, **{k: v(x) for k, v in self.call.items()})
        return out if weights is None else torch.cat([out.flatten(1), weights.flatten(1)], 1)


def _causal(x):
    return torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)


def _padding(x):
    mask = torch.zeros(x.shape[0], x.shape[1], dtype=torch.bool)
    mask[:, -1] = True
    return mask


class OwnGRU(nn.GRU):
    """No rule: a subclass may compute something else."""


class Recur(nn.Module):
    """A recurrent layer; its output at every step, then its last states."""

    def __init__(self, kind, *sizes, states=False, **options):
        super().__init__()
        options.setdefault("batch_first", True)
        self.layer, self.states = kind(*sizes, **options), states

    def forward(self, x, *given):
        first = self.layer.batch_first
        states = tuple(state.transpose(0, 1).contiguous() for state in given)
        called = (states if len(states) > 1 else states[0],) if states else ()
        out, last = self.layer(x if first else x.transpose(0, 1), *called)
        out = out if first else out.transpose(0, 1)
        if not self.states:
            return out
        lasts = last if isinstance(last, tuple) else (last,)
        return torch.cat([out.flatten(1), *(one.transpose(0, 1).flatten(1) for one in lasts)], 1)


def _recurrent_cases(kind, **options):
    states = [(2, 4)] * (2 if kind is nn.LSTM else 1)
    return [
        (lambda: Recur(kind, 6, 4, **options), (3, 6)),
        (lambda: Recur(kind, 6, 4, bias=False, batch_first=False, **options), (3, 6)),
        (lambda: Recur(kind, 6, 4, 2, bidirectional=True, states=True, **options), (3, 6)),
        (lambda: Recur(kind, 6, 4, 2, states=True, **options), (3, 6), *states),
        (lambda: Recur(kind, 3, 2, **options), (30, 3)),
        (
            lambda: Pooled(
                nn.Linear(5, 6), Recur(kind, 6, 4, 2, bidirectional=True, batch_first=False)
            ),
            (7, 5),
        ),
    ]


def _tied(attend):
    attend.attention.v_proj_weight = attend.attention.k_proj_weight
    return attend


CASES = {
    nn.Linear: [
        (lambda: nn.Linear(6, 4), (6,)),
        (lambda: nn.Linear(6, 4, bias=False), (6,)),
        (lambda: nn.Linear(6, 4), (7, 6)),
        (lambda: nn.Linear(3, 2), (40, 3)),  # long sequence: the gradients are made
        (lambda: nn.Linear(6, 4), (2, 3, 6)),
        (lambda: Pooled(nn.Linear(5, 6), nn.Linear(6, 4)), (5,)),
    ],
    nn.modules.linear.NonDynamicallyQuantizableLinear: [
        (lambda: nn.modules.linear.NonDynamicallyQuantizableLinear(6, 4), (6,))
    ],
    nn.Conv1d: [
        (lambda: nn.Conv1d(3, 4, 3, padding=1), (3, 9)),
        (lambda: nn.Conv1d(4, 6, 3, stride=2, dilation=2, groups=2), (4, 11)),
        (lambda: nn.Conv1d(3, 4, 4, padding="same"), (3, 9)),
        (lambda: nn.Conv1d(40, 60, 3, padding=1), (40, 30)),
        (lambda: nn.Conv1d(160, 160, 3, padding=1), (160, 3)),  # Gram
    ],
    nn.Conv2d: [
        (lambda: nn.Conv2d(2, 4, 3, padding=1), (2, 6, 7)),
        (
            lambda: nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(2, 0), dilation=(1, 2)),
            (2, 8, 7),
        ),
        (lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), (4, 5, 5)),
        (lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), (2, 6, 6)),
        (lambda: nn.Conv2d(2, 4, 2, padding="same", padding_mode="reflect"), (2, 6, 6)),
        (lambda: nn.Conv2d(48, 48, 3, stride=2, padding=1), (48, 20, 20)),  # shifted windows
        (lambda: nn.Conv2d(96, 96, 3, padding=1), (96, 2, 2)),  # Gram
        (lambda: nn.Conv2d(24, 24, 3, padding=1), (24, 2, 2)),  # in pieces
        (lambda: nn.Conv2d(24, 48, 3, padding=1, groups=3), (24, 2, 2)),
        (lambda: Pooled(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1)), (3, 6, 6)),
    ],
    nn.Conv3d: [(lambda: nn.Conv3d(2, 3, 2, stride=(1, 2, 1), padding=1), (2, 4, 5, 4))],
    nn.Embedding: [
        (lambda: nn.Embedding(9, 4), "ids", (6,)),
        (lambda: nn.Embedding(9, 4, padding_idx=2), "ids", (6,)),
        (lambda: nn.Embedding(9, 4), "ids", ()),
        (lambda: nn.Embedding(9, 4), "ids", (2, 3)),
    ],
    nn.LayerNorm: [
        (lambda: nn.LayerNorm(6), (6,)),
        (lambda: nn.LayerNorm(6), (4, 6)),
        (lambda: nn.LayerNorm((4, 6)), (4, 6)),
        (lambda: nn.LayerNorm(6, bias=False), (3, 4, 6)),
        (lambda: Pooled(nn.Linear(5, 6), nn.LayerNorm(6)), (4, 5)),
    ],
    nn.GroupNorm: [
        (lambda: nn.GroupNorm(2, 6), (6, 4, 3)),
        (lambda: nn.GroupNorm(3, 6), (6, 8)),
        (lambda: nn.GroupNorm(3, 6), (6,)),
        (lambda: Pooled(nn.Conv2d(3, 6, 1), nn.GroupNorm(2, 6)), (3, 4, 4)),
    ],
    nn.InstanceNorm1d: [(lambda: nn.InstanceNorm1d(4, affine=True), (4, 7))],
    nn.InstanceNorm2d: [
        (lambda: nn.InstanceNorm2d(4, affine=True), (4, 5, 3)),
        (lambda: Pooled(nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4, affine=True)), (3, 5, 5)),
    ],
    nn.InstanceNorm3d: [(lambda: nn.InstanceNorm3d(2, affine=True), (2, 3, 4, 2))],
    nn.RMSNorm: [
        (lambda: nn.RMSNorm(6), (4, 6)),
        (lambda: Pooled(nn.Linear(5, 6), nn.RMSNorm(6, eps=1e-3)), (5,)),
    ],
    nn.LSTM: [
        *_recurrent_cases(nn.LSTM),
        (lambda: Recur(nn.LSTM, 6, 4, 2, proj_size=3, bidirectional=True, states=True), (3, 6)),
    ],
    nn.GRU: _recurrent_cases(nn.GRU),
    nn.RNN: [*_recurrent_cases(nn.RNN), *_recurrent_cases(nn.RNN, nonlinearity="relu")],
    nn.MultiheadAttention: [
        (lambda: Attend(), (6, 8)),
        (lambda: Attend(bias=False, call={"need_weights": lambda x: False}), (6, 8)),
        (lambda: Attend(call={"attn_mask": _causal, "need_weights": lambda x: False}), (6, 8)),
        (
            lambda: Attend(
                call={"key_padding_mask": _padding, "average_attn_weights": lambda x: False}
            ),
            (6, 8),
        ),
        (lambda: Attend(cross=True), (6, 8), (4, 8), (4, 8)),
        (lambda: Attend(cross=True, kdim=5, vdim=3), (6, 8), (4, 5), (4, 3)),
        (lambda: Attend(add_bias_kv=True), (6, 8)),  # the general path
        (lambda: Attend(add_zero_attn=True), (6, 8)),
        (lambda: _tied(Attend(cross=True, kdim=5, vdim=5)), (6, 8), (4, 5), (4, 5)),
    ],
}


ALL_CASES = [
    pytest.param(case, id=f"{kind.__name__}-{number}")
    for kind, cases in CASES.items()
    for number, case in enumerate(cases)
]


def _inputs(shapes):
    if shapes[0] == "ids":
        return (_ids(*shapes[1]),)
    return tuple(_x(*shape) for shape in shapes)


def test_every_registered_rule_has_a_case():
    assert set(LAYER_RULES) == set(CASES)


@pytest.mark.filterwarnings("ignore:Using padding=:UserWarning")
@pytest.mark.parametrize("case", ALL_CASES)
def test_rule_agrees_with_the_loop(case):
    build, *shapes = case
    module = build().double()
    with torch.no_grad():  # so that norms' weights of one and biases of zero hide nothing
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    assert_parity(module, _inputs(shapes), square_loss, 1e-11)


@pytest.mark.filterwarnings("ignore:Using padding=:UserWarning")
def _summed(out):
    """Backward brings one number, expanded over all the rest."""
    return out.flatten(2).sum(2) if out.dim() > 2 else out


def _swapped(out):
    """Backward brings the last two dimensions in the other order."""
    turned = out.transpose(-1, -2) if out.dim() > 2 else out
    return turned @ torch.linspace(-1, 1, 3 * turned.shape[-1], dtype=out.dtype).view(-1, 3)


def _channels_last(out):
    """Backward brings the channels as the innermost dimension; of one record, such a gradient
    passes for contiguous."""
    moved = out.movedim(1, -1)
    return moved @ torch.linspace(-1, 1, 3 * moved.shape[-1], dtype=out.dtype).view(-1, 3)


# Without InstanceNorm: torch's own backward of one record, which the loop takes, reads such a
# gradient by wrong strides (2.13).
TURNED = [
    pytest.param(case.values[0], after, id=f"{case.id}{after.__name__}")
    for case in ALL_CASES
    for after in (_summed, _swapped, _channels_last)
    if after is not _channels_last or "InstanceNorm" not in str(case.id)
]


@pytest.mark.filterwarnings("ignore:Using padding=:UserWarning")
@pytest.mark.parametrize("rows", [1, 2, N])
@pytest.mark.parametrize(("case", "after"), TURNED)
def test_gradients_of_any_strides_are_read_by_their_strides(case, after, rows):
    torch.manual_seed(1)
    build, *shapes = case
    module = build().double()
    batch = [x[:rows] for x in _inputs(shapes)]

    def loss(module, batch):
        out = after(module(*batch)).flatten(1)
        return (out.square() * 0.5 + out).sum(1).mean()

    def sum_alone(module, batch):
        return after(module(*batch)).flatten(1).sum(1).mean()

    for one in (loss, sum_alone):
        assert_parity(module, batch, one, 1e-9)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("case", ALL_CASES)
def test_rule_agrees_with_the_loop_in_float32(case):
    build, *shapes = case
    module = build()
    inputs = tuple(t.float() if t.is_floating_point() else t for t in _inputs(shapes))
    assert_parity(module, inputs, square_loss, 2e-5)


@pytest.mark.parametrize(
    "kind", [nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm], ids=lambda k: k.__name__
)
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_half_of_a_layer_is_left_out(kind, frozen):
    build, *shapes = CASES[kind][0]
    module = build().double()
    getattr(module, frozen).requires_grad_(False)
    assert_parity(module, _inputs(shapes), square_loss, 1e-11)


@pytest.mark.parametrize(
    ("module", "shape", "word"),
    [
        (nn.Embedding(9, 4, max_norm=1.0), None, "max_norm"),
        (nn.Embedding(9, 4, scale_grad_by_freq=True), None, "scale_grad_by_freq"),
        (nn.MultiheadAttention(8, 2), None, "batch_first"),
        (OwnGRU(4, 3), None, "batch_first"),
        (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), None, "track_running_stats"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else str(v),
)
def test_configurations_that_mix_records_are_refused(module, shape, word):
    from zetaclip.gradients import CaptureBuffer, make_shadows

    _, refusals = make_shadows(nn.Sequential(module), set(module.parameters()), CaptureBuffer())
    assert refusals and word in str(refusals[0]) and "0" in refusals[0].name


def test_attention_agrees_with_torch_itself():
    """The recorded attention is our own forward: it must compute what torch's does."""
    from zetaclip.gradients import CaptureBuffer, make_shadows

    x = _x(6, 8)
    for options in (
        {},
        {"need_weights": False},
        {"attn_mask": _causal(x)},
        {"key_padding_mask": _padding(x)},
    ):
        attention = nn.MultiheadAttention(8, 2, batch_first=True).double()
        expected = attention(x, x, x, **options)
        recorder = CaptureBuffer()
        (shadow,), _ = make_shadows(attention, set(attention.parameters()), recorder)
        shadow.attach()
        recorder.open(N)
        found = attention(x, x, x, **options)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
