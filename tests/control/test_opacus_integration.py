"""The controller on Opacus's own optimizer: one C for clip and noise, at every step, in every
mode."""

import contextlib
import math

import pytest
import torch
from torch import nn

from zetaclip.control import Replay, Spectral
from zetaclip.integrations.opacus import attach_spectral

opacus = pytest.importorskip("opacus")
from opacus.optimizers import DPOptimizer  # noqa: E402
from opacus.utils.batch_memory_manager import BatchMemoryManager  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

MODES = pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
SIGMA = 1.5


def make(mode, *, scale=1.0, batch=16, size=64, seed=0, wrap_model=True):
    """A private net on data whose gradients are ``scale`` times something of order one."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 3))
    data = torch.utils.data.TensorDataset(
        scale * torch.randn(size, 24), torch.randint(0, 3, (size,))
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    engine = opacus.PrivacyEngine(accountant="rdp")
    made = engine.make_private(
        module=net,
        optimizer=optimizer,
        data_loader=torch.utils.data.DataLoader(data, batch_size=batch),
        noise_multiplier=SIGMA,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
        wrap_model=wrap_model,
    )
    module, optimizer, loader = made[0], made[1], made[-1]
    criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()
    return engine, net, module, optimizer, criterion, loader


@contextlib.contextmanager
def noise_std(monkeypatch):
    """The std of every noise draw, as Opacus asks for it."""
    drawn = []
    import opacus.optimizers.optimizer as plain
    import opacus.optimizers.optimizer_fast_gradient_clipping as ghost

    def spy(std, reference, generator=None, secure_mode=False):
        drawn.append(float(std))
        return torch.zeros_like(reference)

    with monkeypatch.context() as patch:
        for module in (plain, ghost):
            patch.setattr(module, "_generate_noise", spy)
        yield drawn


def train(net_call, optimizer, criterion, batches, after=None):
    for x, y in batches:
        optimizer.zero_grad()
        criterion(net_call(x), y).backward()
        optimizer.step()
        if after is not None:
            after()


def big_record(net):
    """One record with a huge gradient; its layer is scaled down, because a saturated tanh would
    have none."""
    with torch.no_grad():
        net[0].weight *= 1e-4
    return 1e4 * torch.randn(1, 24, generator=torch.Generator().manual_seed(1)), torch.tensor([2])


@MODES
def test_clip_and_noise_use_the_same_c_at_every_step(mode, monkeypatch):
    """One record with an enormous gradient: the norm of the clipped sum is the C that clipped."""
    _, net, module, optimizer, criterion, _ = make(mode)
    plan = [0.5, 2.0, 0.7, 1.3, 0.9]
    with pytest.warns(UserWarning, match="replaces max_grad_norm"):
        attached = attach_spectral(optimizer, module, Replay(plan))
    optimizer.param_groups[0]["lr"] = 0.0  # the gradient must not shrink by learning
    clipped = []

    def summed_norm():
        total = sum(p.summed_grad.square().sum() for p in net.parameters())
        clipped.append(float(total.sqrt()))

    with noise_std(monkeypatch) as drawn:
        train(module, optimizer, criterion, [big_record(net)] * 5, summed_norm)
    per_step = [drawn[i : i + 4] for i in range(0, 20, 4)]  # four parameter tensors each
    for planned, norm, stds in zip(plan, clipped, per_step):
        assert norm == pytest.approx(planned, rel=1e-3)
        assert stds == pytest.approx([SIGMA * planned] * 4)
    assert attached.steps == 5


def test_ghost_without_the_modules_c_would_be_seen(monkeypatch):
    """Power of the test above: moving only the optimizer's C, as is easy to do, clips at another
    one."""
    _, net, module, optimizer, criterion, _ = make("ghost")
    optimizer.max_grad_norm = 0.5
    with noise_std(monkeypatch) as drawn:
        train(module, optimizer, criterion, [big_record(net)])
    norm = math.sqrt(sum(float(p.summed_grad.square().sum()) for p in net.parameters()))
    assert drawn[0] == pytest.approx(0.5 * SIGMA) and norm == pytest.approx(1.0, rel=1e-3)


@MODES
def test_spectral_control_moves_c_and_leaves_the_accountant_alone(mode):
    def epsilon(controlled):
        engine, _, module, optimizer, criterion, loader = make(mode)
        hook = optimizer.step_hook
        attached = attach_spectral(optimizer, module, Spectral(period=2)) if controlled else None
        assert optimizer.step_hook is hook
        for _ in range(3):
            train(module, optimizer, criterion, loader)
        return engine, optimizer, attached

    plain, _, _ = epsilon(False)
    engine, optimizer, attached = epsilon(True)
    assert engine.accountant.history == plain.accountant.history
    assert engine.get_epsilon(1e-5) == plain.get_epsilon(1e-5)
    assert attached.steps == 12 and [row[0] for row in attached.clip_history] == [
        2,
        4,
        6,
        8,
        10,
        12,
    ]
    assert attached.clip == attached.clip_history[-1][4] == optimizer.max_grad_norm != 1.0
    if mode == "ghost":
        assert attached._homes[1].max_grad_norm == attached.clip


@MODES
def test_zero_gain_is_bitwise_the_same_training(mode):
    def weights(controlled):
        _, net, module, optimizer, criterion, loader = make(mode)
        if controlled:
            attach_spectral(optimizer, module, Spectral(period=1, gain=0.0))
        torch.manual_seed(5)
        train(module, optimizer, criterion, loader)
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    assert torch.equal(weights(True), weights(False))


@MODES
def test_c_never_changes_inside_a_logical_batch(mode, monkeypatch):
    _, _, module, optimizer, criterion, loader = make(mode, batch=16)
    attached = attach_spectral(optimizer, module, Spectral(period=1))
    homes = [optimizer] + ([module] if mode == "ghost" else [])
    logical, used = [], []
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=3, optimizer=optimizer
    ) as physical:
        for x, y in physical:
            used.append({home.max_grad_norm for home in homes})
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            before = attached.steps
            optimizer.step()
            used[-1] |= set() if attached.steps > before else {home.max_grad_norm for home in homes}
            if attached.steps > before:
                logical.append(used)
                used = []
    assert len(logical) == attached.steps == 4 and max(len(chunks) for chunks in logical) > 2
    for chunks in logical:
        assert len(set().union(*chunks)) == 1
    assert (
        len({frozenset(chunks[0]) for chunks in logical}) == 4
    )  # while it did move from batch to batch


def test_state_is_saved_and_restored():
    _, _, module, optimizer, criterion, loader = make("hooks")
    attached = attach_spectral(optimizer, module, Spectral(period=1))
    train(module, optimizer, criterion, loader)
    saved = attached.state_dict()
    _, _, module, optimizer, _, _ = make("hooks")
    other = attach_spectral(optimizer, module, Spectral(period=1))
    other.load_state_dict(saved)
    assert other.state == attached.state and other.clip_history == attached.clip_history
    assert optimizer.max_grad_norm == attached.clip and other.steps == attached.steps


def test_detach_stops_the_control_and_allows_another():
    _, _, module, optimizer, criterion, loader = make("hooks")
    attached = attach_spectral(optimizer, module, Spectral(period=1))
    with pytest.raises(RuntimeError, match="already attached"):
        attach_spectral(optimizer, module, Spectral())
    train(module, optimizer, criterion, loader)
    attached.detach()
    clip, steps = optimizer.max_grad_norm, attached.steps
    train(module, optimizer, criterion, loader)
    assert optimizer.max_grad_norm == clip and attached.steps == steps
    attach_spectral(optimizer, module, Spectral(initial=clip, bounds=None))


def test_without_wrapping_the_hooks_object_is_the_module():
    _, net, hooks, optimizer, criterion, loader = make("ghost", wrap_model=False)
    attached = attach_spectral(optimizer, hooks, Spectral(period=1))
    train(net, optimizer, criterion, loader)
    assert hooks.max_grad_norm == optimizer.max_grad_norm == attached.clip != 1.0


def test_what_is_refused():
    _, net, _, optimizer, _, _ = make("ghost")
    with pytest.raises(TypeError, match="make_private returned first"):
        attach_spectral(optimizer, net, Spectral())
    with pytest.raises(TypeError, match="not on SGD"):
        attach_spectral(torch.optim.SGD(net.parameters()), net, Spectral())

    class Adaptive(DPOptimizer):
        pass

    adaptive = Adaptive(
        torch.optim.SGD(net.parameters()),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=4,
    )
    with pytest.raises(TypeError, match="not on Adaptive"):
        attach_spectral(adaptive, net, Spectral())


def test_frozen_layers_are_not_probed():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 18))
    net[0].weight.requires_grad_(False)
    optimizer = DPOptimizer(
        torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=4,
    )
    with pytest.raises(ValueError, match="0 is not among the tensors"):
        attach_spectral(optimizer, net, Spectral(probe="0"))
    attached = attach_spectral(optimizer, net, Spectral())
    assert list(attached.probe.bound) == ["2"]
