"""Frozen parts, other weights and hooks: gradients are those of torch, or there is an error."""

import pytest
import torch
import torch.nn.modules.module as hooks
from helpers import (
    assert_parity,
    flat,
    mean_loss,
    private,
    recorded,
    square_loss,
    tiny,
    toy_data,
    train,
)
from networks import Scaled
from torch import nn
from torch.func import functional_call

from zetaclip import ValidationError, check_parity
from zetaclip.engine._guard import OrderError
from zetaclip.gradients import CaptureError


def _x(*shape):
    return torch.randn(5, *shape, dtype=torch.float64)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class OwnGRU(nn.GRU):
    """No rule: a subclass may compute something else."""


# A layer of every way in which gradients are recorded, and the shape of one record.
LAYERS = {
    "linear": (lambda: nn.Linear(6, 6), (6,)),
    "linear-long": (lambda: nn.Linear(6, 6), (3, 6)),
    "convolution": (lambda: nn.Conv1d(2, 2, 3, padding=1), (2, 6)),
    "layer norm": (lambda: nn.LayerNorm(6), (3, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 6)),
    "attention": (Attention, (3, 6)),
    "vmap": (Scaled, (6,)),
    "loop": (lambda: OwnGRU(6, 6, batch_first=True), (3, 6)),
    "recurrent": (lambda: nn.GRU(6, 6, batch_first=True), (3, 6)),
    "parametrized": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), (6,)),
}


def first(out):
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("kind", list(LAYERS))
def test_what_is_frozen_around_a_forward_gets_no_gradient_from_it(kind):
    """As adversarial training does, of a layer as a whole and of each parameter by itself."""
    build, shape = LAYERS[kind]
    module = nn.ModuleDict({"below": nn.Linear(shape[-1], shape[-1]), "layer": build()}).double()
    names = [name for name, _ in module["layer"].named_parameters()]
    for frozen in [names, *([name] for name in names)]:
        parts = [module["layer"].get_parameter(name) for name in frozen]

        def loss(module, batch, parts=parts):
            z = torch.tanh(module["below"](batch[0]))
            total = square_loss(lambda x: first(module["layer"](x)), (z,))
            for p in parts:
                p.requires_grad_(False)
            total = total - 3 * square_loss(lambda x: first(module["layer"](x)), (z * 2,))
            for p in parts:
                p.requires_grad_(True)
            return total

        assert_parity(module, (_x(*shape),), loss, 1e-10)


def test_what_is_frozen_at_the_time_of_backward_gets_none_either():
    module = tiny()
    received = {}
    _, module, optimizer, loader = private(module, toy_data(), q=1.0)
    for x, y in loader:
        loss = mean_loss(module, (x, y))
        module[0].requires_grad_(False)
        loss.backward()
        module[0].requires_grad_(True)
        received = dict(optimizer._loop.model.recorder.received)
        break
    assert set(received) == {id(p) for p in module[2].parameters()}


@pytest.mark.parametrize("kind", list(LAYERS))
def test_gradients_of_lent_weights_are_not_those_of_the_trained_ones(kind):
    build, shape = LAYERS[kind]
    module = nn.ModuleDict({"below": nn.Linear(shape[-1], shape[-1]), "layer": build()}).double()
    lent = {name: p.detach() + 0.1 for name, p in module["layer"].named_parameters()}
    for some in [lent, *({name: value} for name, value in lent.items())]:

        def loss(module, batch, some=some):
            z = torch.tanh(module["below"](batch[0]))
            total = square_loss(lambda x: first(functional_call(module["layer"], some, (x,))), (z,))
            return total + square_loss(lambda x: first(module["layer"](x)), (z * 2,))

        assert_parity(module, (_x(*shape),), loss, 1e-10)


def doubled(parameter):
    return parameter * 2


def another(parameter):
    return parameter.detach().clone().requires_grad_()


@pytest.mark.parametrize("kind", list(LAYERS))
@pytest.mark.parametrize("lend", [doubled, another], ids=["made", "leaf"])
def test_lent_weights_that_want_a_gradient_are_refused(kind, lend):
    build, shape = LAYERS[kind]
    module = build().double()

    def loss(module, batch):
        lent = {name: lend(p) for name, p in module.named_parameters()}
        return square_loss(lambda x: first(functional_call(module, lent, (x,))), batch)

    with pytest.raises(CaptureError, match=r"in place of its parameter .* detached"):
        recorded(module, (_x(*shape),), loss)


def test_a_frozen_parameter_cannot_be_lent_a_trained_one():
    layer = nn.Linear(6, 6).double()
    layer.bias.requires_grad_(False)

    def loss(module, batch):
        lent = {"bias": module.weight[0] * 2}
        return square_loss(lambda x: functional_call(module, lent, (x,)), batch)

    with pytest.raises(CaptureError, match="in place of its parameter bias"):
        recorded(layer, (_x(6),), loss)


def test_a_tied_weight_is_lent_everywhere_or_nowhere():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = self.two = nn.Parameter(torch.ones(6, dtype=torch.float64))

        def forward(self, x):
            return x * self.one + self.two

    def loss(module, batch):
        lent = {"one": torch.full((6,), 2.0, dtype=torch.float64)}
        return square_loss(lambda x: functional_call(module, lent, (x,), tie_weights=False), batch)

    with pytest.raises(CaptureError, match="in several"):
        recorded(Tied(), (_x(6),), loss)


# -- hooks of parameters ---------------------------------------------------------------------------


def on_gradient(parameter):
    return parameter.register_hook(lambda g: g * 0)


def after_gradient(parameter):
    return parameter.register_post_accumulate_grad_hook(lambda p: None)


@pytest.mark.parametrize("register", [on_gradient, after_gradient])
def test_hooks_of_parameters_are_refused_when_they_are_there(register):
    module = tiny()
    handle = register(module[0].weight)
    with pytest.raises(ValidationError, match=r"0\.weight.*hook on its gradient.*handle\.remove"):
        private(module, toy_data())
    with pytest.raises(ValidationError, match=r"0\.weight.*hook on its gradient"):
        check_parity(module, toy_data(), mean_loss)
    handle.remove()
    private(module, toy_data())


@pytest.mark.parametrize("register", [on_gradient, after_gradient])
@pytest.mark.parametrize("kind", ["rule", "vmap"])
def test_hooks_of_parameters_are_refused_when_they_come_later(register, kind):
    module = tiny() if kind == "rule" else nn.Sequential(Scaled(), nn.Linear(10, 3))
    engine, module, optimizer, loader = private(module, toy_data())
    train(module, optimizer, loader, steps=1)
    before = flat(module)
    handle = register(next(module.parameters()))
    with pytest.raises(CaptureError, match="hook on its gradient"):
        train(module, optimizer, loader, steps=1)
    assert torch.equal(before, flat(module)) and len(engine.ledger) == 1
    handle.remove()
    assert train(module, optimizer, loader, steps=1) == 1


def test_a_hook_of_the_optimizer_can_do_what_one_of_a_parameter_did():
    module = tiny()
    _, module, optimizer, loader = private(module, toy_data())
    before = module[0].weight.detach().clone()

    def masked(*_):
        module[0].weight.grad[:3] = 0

    optimizer.register_step_pre_hook(masked)
    train(module, optimizer, loader, steps=2)
    same = (before == module[0].weight).all(1)
    assert same[:3].all() and not same[3:].any()


# -- hooks of modules ------------------------------------------------------------------------------


def tripled(_module, given, *_):
    return tuple(None if g is None else g * 3 for g in given)


def half_more(_module, _given, out):
    return tuple(o * 1.5 for o in out) if isinstance(out, tuple) else out * 1.5


REGISTER = {
    "forward": lambda module: module.register_forward_hook(half_more),
    "forward pre": lambda module: module.register_forward_pre_hook(tripled),
    "backward": lambda module: module.register_full_backward_hook(tripled),
    "backward pre": lambda module: module.register_full_backward_pre_hook(tripled),
    "global forward": lambda _: hooks.register_module_forward_hook(half_more),
    "global forward pre": lambda _: hooks.register_module_forward_pre_hook(tripled),
    "global backward": lambda _: hooks.register_module_full_backward_hook(tripled),
    "global backward pre": lambda _: hooks.register_module_full_backward_pre_hook(tripled),
}
UNITS = {
    "vmap": (lambda: nn.PReLU(6), (6,)),
    "loop": (lambda: OwnGRU(6, 6, batch_first=True), (3, 6)),
    "rule": (lambda: nn.Linear(6, 6), (6,)),
    "recurrent": (lambda: nn.GRU(6, 6, batch_first=True), (3, 6)),
    "inside": (Scaled, (6,)),
}


@pytest.fixture
def no_global_hooks():
    yield
    hooks._global_is_full_backward_hook = None


@pytest.mark.parametrize("kind", list(UNITS))
@pytest.mark.parametrize("which", list(REGISTER))
@pytest.mark.usefixtures("no_global_hooks")
@pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing:UserWarning"
)  # the first layer's input has no gradient
def test_hooks_of_modules_do_what_they_do_in_torch(kind, which):
    build, shape = UNITS[kind]
    module = nn.ModuleDict(
        {
            "below": nn.Linear(6, 6),
            "layer": build(),
            "above": nn.Linear(6 + 4 * (kind == "inside"), 6),
        }
    )
    module.double()

    def loss(module, batch):
        below = torch.tanh(module["below"](batch[0]))
        return square_loss(lambda x: module["above"](first(module["layer"](x))), (below,))

    handle = REGISTER[which](module["layer"])
    try:
        if kind == "inside" and which.startswith("global backward"):
            with pytest.raises(CaptureError, match=r"fc \(Linear\) inside of layer.*a global one"):
                recorded(module, (_x(*shape),), loss)
        else:
            assert_parity(module, (_x(*shape),), loss, 1e-10)
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", list(UNITS))
def test_hooks_of_modules_run_once_for_a_batch(kind):
    build, shape = UNITS[kind]
    module = build().double()
    ran = []
    module.register_full_backward_hook(lambda *_: ran.append("backward"))
    module.register_full_backward_pre_hook(lambda *_: ran.append("backward pre"))
    module.register_forward_hook(lambda *_: ran.append("forward"))
    x = _x(*shape).requires_grad_()
    recorded(module, (x,), square_loss)
    assert sorted(ran) == ["backward", "backward pre", "forward"]


@pytest.mark.parametrize("which", ["backward", "backward pre"])
def test_backward_hooks_inside_of_a_unit_are_refused(which):
    """vmap would leave them out. One that comes after the first batch is noticed as well."""
    _, module, optimizer, loader = private(nn.Sequential(Scaled(), nn.Linear(10, 3)), toy_data())
    train(module, optimizer, loader, steps=1)
    REGISTER[which](module[0].fc)
    with pytest.raises(
        CaptureError,
        match=r"fc \(Linear\) inside of 0 \(Scaled\) has a backward hook.*register it on 0",
    ):
        train(module, optimizer, loader, steps=1)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
@pytest.mark.usefixtures("no_global_hooks")
def test_backward_hooks_of_the_old_kind_are_refused():
    module = tiny()
    handle = module[0].register_backward_hook(lambda *_: None)
    with pytest.raises(ValidationError, match=r"0 \(Linear\).*register_full_backward_hook"):
        private(module, toy_data())
    handle.remove()
    engine, module, optimizer, loader = private(module, toy_data())
    for register, match in (
        (module[2].register_backward_hook, r"2 \(Linear\).*register_full_backward_hook"),
        (hooks.register_module_backward_hook, r"torch.*register_module_full_backward_hook"),
    ):
        handle = register(lambda *_: None)
        with pytest.raises(OrderError, match=match):
            train(module, optimizer, loader, steps=1)
        handle.remove()
    assert len(engine.ledger) == 0
