"""Spectral norms: their power iterations follow the weights, never the records."""

import copy

import pytest
import torch
from helpers import clipped_sum, mean_loss, private, toy_data, train
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from zetaclip import check_parity
from zetaclip.engine._guard import OrderError

KINDS = {"parametrized": parametrizations.spectral_norm, "old": spectral_norm}
pytestmark = [
    pytest.mark.parametrize("kind", list(KINDS)),
    pytest.mark.filterwarnings("ignore:.*spectral_norm.*deprecated:FutureWarning"),
]
DATA = toy_data(dtype=torch.float64)


def build(kind):
    torch.manual_seed(3)
    norm = KINDS[kind]
    module = nn.Sequential(
        nn.Unflatten(1, (2, 3)),
        norm(nn.Conv1d(2, 4, 2)),
        nn.Tanh(),
        nn.Flatten(),
        norm(nn.Linear(8, 3)),
    )
    return module.double()


class Inside(nn.Module):
    """Has a parameter of its own, so that its layers are run once per record with it."""

    def __init__(self, norm):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.one, self.two = norm(nn.Linear(6, 5)), norm(nn.Linear(5, 3))

    def forward(self, x):
        return self.two(torch.tanh(self.one(x * self.scale)))


def inside(kind):
    torch.manual_seed(3)
    return Inside(KINDS[kind]).double()


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-11, atol=1e-13)


def test_gradients_are_those_of_one_record_at_a_time(kind):
    module = build(kind)
    _, module, optimizer, loader = private(module, DATA, sigma=0.0, clipping=0.05, q=1.0, lr=0.0)
    alone = copy.deepcopy(module).eval()  # the same u and v, which stay
    train(module, optimizer, loader, steps=1)
    got = torch.cat([p.grad.flatten() for p in module.parameters()])
    expected = clipped_sum(alone, DATA, 0.05) / len(DATA[0])
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("build", [build, inside], ids=["layers", "inside of a unit"])
def test_training_without_noise_and_clipping_is_torch_s(kind, build):
    """The same weights, u and v after every update: as often as in torch, and when torch does."""
    module, plain = build(kind), build(kind)
    _, module, optimizer, loader = private(module, DATA, sigma=0.0, clipping=1e9, q=1.0, lr=0.5)
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(4):
        before = state(plain)
        train(module, optimizer, loader, steps=1)
        reference.zero_grad()
        mean_loss(plain, DATA).backward()
        reference.step()
        assert_same(dict(module.named_parameters()), dict(plain.named_parameters()))
        assert any(not torch.equal(before[name], value) for name, value in plain.named_buffers())
    plain(DATA[0])  # the iteration that the next forward would begin with
    assert_same(dict(module.named_buffers()), dict(plain.named_buffers()))


def trained(kind, size, forwards=1):
    module = build(kind)

    def loss(module, batch):
        for _ in range(forwards - 1):
            module(batch[0])
        with torch.no_grad():
            module(batch[0])
        return mean_loss(module, batch)

    options = {"sigma": 0.5, "clipping": 0.1, "lr": 0.5, "physical_batch_size": size}
    _, module, optimizer, loader = private(module, DATA, **options)
    train(module, optimizer, loader, loss, epochs=2)
    return state(module)


def test_neither_chunks_nor_forwards_change_the_result(kind):
    """Their number depends on how many records were drawn, which u and v must not tell."""
    whole = trained(kind, None)
    assert_same(whole, trained(kind, 5))
    assert_same(whole, trained(kind, 1))
    with pytest.warns(UserWarning, match="fewer than the layer was used"):
        assert_same(whole, trained(kind, 5, forwards=3))


def test_the_iterations_come_back(kind):
    module = build(kind)
    engine, module, _, loader = private(module, DATA)
    next(iter(loader))
    held = state(module)
    with torch.no_grad():
        module(DATA[0])
    assert all(torch.equal(held[name], value) for name, value in module.named_buffers())
    engine.detach()
    module(DATA[0])
    assert any(not torch.equal(held[name], value) for name, value in module.named_buffers())


def test_evaluation_mode_does_not_iterate(kind):
    module = build(kind).eval()
    before = state(module)
    _, module, optimizer, loader = private(module, DATA)
    train(module, optimizer, loader, steps=2)
    assert all(torch.equal(before[name], value) for name, value in module.named_buffers())


def test_a_frozen_layer_may_have_one(kind):
    module = build(kind)
    module[1].requires_grad_(False)
    _, module, optimizer, loader = private(module, DATA)
    assert train(module, optimizer, loader, steps=2) == 2


def test_u_and_v_are_watched_like_other_buffers(kind):
    _, module, optimizer, loader = private(build(kind), DATA)

    def loss(module, batch):
        next(module.buffers()).add_(batch[0].sum())
        return mean_loss(module, batch)

    with pytest.raises(OrderError, match="the training forward changed"):
        train(module, optimizer, loader, loss, steps=1)


def test_checks_know_it(kind):
    assert check_parity(build(kind), DATA, mean_loss)
    engine, module, *_ = private(build(kind), DATA)
    before = state(module)
    assert engine.validate(DATA, mean_loss) == []
    assert_same(before, state(module))


def test_a_replay_is_exact(kind, tmp_path):
    """Also of a checkpoint that was saved while a batch was out."""
    made = private(build(kind), DATA, lr=0.5)
    engine, module, optimizer, loader = made
    train(module, optimizer, loader, steps=1)
    for batch in loader:
        optimizer.zero_grad()
        mean_loss(module, batch).backward()
        engine.save(tmp_path / "run.pt")
        optimizer.step()
        break
    other, again, second, its = private(build(kind), DATA, lr=0.5)
    other.load(tmp_path / "run.pt", replay=True)
    train(again, second, its, steps=1)
    expected, found = state(module), state(again)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
