"""The optimizer that comes back: the user's own, behind a private step."""

import pytest
import torch
from helpers import clipped_sum, flat, mean_loss, private, tiny, toy_data, train
from torch import nn

from zetaclip.engine._guard import OrderError

OPTIMIZERS = [
    name
    for name in dir(torch.optim)
    if isinstance(getattr(torch.optim, name), type)
    and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")
]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_torch_optimizer_takes_the_private_gradient(name):
    """With no noise and a huge C the private step is that of the bare optimizer on the mean
    gradient."""
    kind = getattr(torch.optim, name)

    def build(module):
        if name == "Muon":  # matrices only
            return kind([p for p in module.parameters() if p.dim() == 2], lr=0.01)
        return kind(module.parameters(), lr=0.01)

    def network():
        module = tiny()
        if name == "Muon":
            module[0].bias.requires_grad_(False)
            module[2].bias.requires_grad_(False)
        return module

    data = toy_data()
    plain = network()
    reference = build(plain)
    for _ in range(3):
        reference.zero_grad()
        mean_loss(plain, data).backward()
        reference.step()
    module = network()
    _, module, optimizer, loader = private(
        module, data, sigma=0.0, clipping=1e6, q=1.0, optimizer=build(module)
    )
    train(module, optimizer, loader, epochs=3)
    assert isinstance(optimizer, torch.optim.Optimizer)
    # Sign-like optimizers turn rounding into whole steps where a gradient is nearly zero.
    close = torch.isclose(flat(module), flat(plain), rtol=1e-3, atol=1e-5)
    assert close.float().mean() > 0.97


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_optimizers_that_cannot_are_refused(kind):
    module = tiny()
    with pytest.raises(ValueError, match=kind.__name__):
        private(module, toy_data(), optimizer=kind(list(module.parameters())))


def test_groups_and_state_are_the_users_own():
    module = tiny()
    inner = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    _, module, optimizer, loader = private(module, toy_data(), optimizer=inner)
    assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
    train(module, optimizer, loader, steps=1)
    assert len(optimizer.state) == 4
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state


@pytest.mark.parametrize("before", [True, False], ids=["made-before", "made-after"])
def test_schedulers_move_the_rate_that_is_used(before):
    """Also after load_state_dict, which replaces the inner optimizer's list of groups."""
    module = tiny()
    inner = torch.optim.SGD(module.parameters(), lr=1.0)
    early = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5) if before else None
    _, module, optimizer, loader = private(
        module, toy_data(), sigma=0.0, clipping=1e6, q=1.0, optimizer=inner
    )
    scheduler = early or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.load_state_dict(optimizer.state_dict())
    moves = []
    for _ in range(3):
        start = flat(module)
        train(module, optimizer, loader)
        moves.append(
            (start - flat(module)).norm()
            / torch.cat([p.grad.flatten() for p in module.parameters()]).norm()
        )
        scheduler.step()
    torch.testing.assert_close(
        torch.stack(moves), torch.tensor([1.0, 0.5, 0.25]), rtol=1e-4, atol=0
    )


def test_parameters_added_later_are_private_too():
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    module[0].requires_grad_(False)
    engine, module, optimizer, loader = private(module, toy_data())
    assert {line.parameter for line in engine.describe()} == {"2.weight", "2.bias"}
    train(module, optimizer, loader)
    module[0].requires_grad_(True)
    with pytest.raises(OrderError, match=r"0\.weight was unfrozen"):
        train(module, optimizer, loader)
    optimizer.add_param_group({"params": list(module[0].parameters()), "lr": 0.1})
    assert len(engine.describe()) == 4
    before = module[0].weight.detach().clone()
    train(module, optimizer, loader)
    assert not torch.equal(before, module[0].weight)
    assert all(p.grad is not None for p in module.parameters())


def test_frozen_parameters_are_neither_clipped_noised_nor_counted():
    module, data = tiny(), toy_data()
    module[0].requires_grad_(False)
    frozen = module[0].weight.detach().clone()
    expected = clipped_sum(module, data, 0.1)
    assert expected.numel() == 27
    before = flat(module[2])
    _, module, optimizer, loader = private(module, data, sigma=0.0, clipping=0.1, q=1.0)
    train(module, optimizer, loader)
    assert torch.equal(module[0].weight, frozen) and module[0].weight.grad is None
    moved = (before - flat(module[2])) * 24
    assert (moved - expected).norm() <= 1e-5 * expected.norm()


def test_grad_scaler_is_refused():
    _, module, optimizer, loader = private(tiny(), toy_data())
    scaler = torch.amp.GradScaler("cpu")
    for batch in loader:
        scaler.scale(mean_loss(module, batch)).backward()
        with pytest.raises(RuntimeError, match="GradScaler"):
            scaler.step(optimizer)
        break


def test_decoupling_divides_by_the_sensitivity_for_every_optimizer():
    for kind in (torch.optim.SGD, torch.optim.Adam):
        weights = []
        for clip, decouple in ((0.25, True), (0.25, False)):
            _, module, optimizer, loader = private(
                tiny(), toy_data(), clipping=clip, decouple_lr=decouple, optimizer=kind, lr=0.01
            )
            train(module, optimizer, loader, steps=1)
            weights.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
        torch.testing.assert_close(weights[0], weights[1] / 0.25, rtol=1e-6, atol=0)


def test_hooks_that_a_user_registers_are_called_once_per_update():
    calls = []
    _, module, optimizer, loader = private(tiny(), toy_data(), physical_batch_size=5)
    optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("after"))
    optimizer.register_state_dict_pre_hook(lambda *args: calls.append("saved"))
    assert train(module, optimizer, loader) == 2
    optimizer.state_dict()
    assert calls == ["before", "after"] * 2 + ["saved"]


# -- the names from before make_private ------------------------------------------------------------


def test_the_optimizer_that_was_given_steps_only_inside_a_private_step():
    module, data = tiny(), toy_data()
    own = torch.optim.SGD(module.parameters(), lr=1.0)
    engine, module, optimizer, loader = private(module, data, optimizer=own)
    before = flat(module)
    own.zero_grad()
    mean_loss(module, data).backward()
    with pytest.raises(OrderError, match="that make_private returned"):
        own.step()
    assert torch.equal(flat(module), before) and len(engine.ledger) == 0
    own.zero_grad()
    assert train(module, optimizer, loader) == len(loader)  # and goes on as if nothing had happened
    with pytest.raises(OrderError, match="that make_private returned"):
        own.step()
    engine.detach()
    mean_loss(module, data).backward()
    own.step()
    assert not torch.equal(flat(module), before)
