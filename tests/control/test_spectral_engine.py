"""The controller inside the engine: it moves C, costs nothing, and can be recomputed from the
releases."""

import copy

import pytest
import torch
from torch import nn

from zetaclip import PrivacyEngine
from zetaclip.control import Replay, Spectral

N, BATCH, SIGMA = 64, 16, 1.3


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 3))


def private(clipping, *, net=None, seed=3, **options):
    net = network() if net is None else net
    generator = torch.Generator().manual_seed(9)
    data = torch.utils.data.TensorDataset(
        torch.randn(N, 24, generator=generator), torch.randint(0, 3, (N,), generator=generator)
    )
    engine = PrivacyEngine(accountant="rdp", seed=seed)
    module, optimizer, loader = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.2),
        data_loader=torch.utils.data.DataLoader(data, batch_size=BATCH),
        noise_multiplier=SIGMA,
        clipping=clipping,
        sample_rate=BATCH / N,
        num_examples=N,
        **options,
    )
    return engine, module, optimizer, loader


def train(module, optimizer, loader, epochs=1, after=None):
    loss = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss(module(x), y).backward()
            optimizer.step()
            if after is not None:
                after()


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_c_moves_and_clip_and_noise_share_it():
    engine, module, optimizer, loader = private(Spectral(period=2))
    train(module, optimizer, loader, epochs=3)
    rows = list(engine.ledger.rows())
    assert [entry[0] for entry in optimizer.clip_history] == [2, 4, 6, 8, 10, 12]
    expected = 2 * [1.0]
    for entry in optimizer.clip_history[:-1]:
        expected += 2 * [entry[4]]
    assert [row.clip for row in rows] == expected and len(set(expected)) == 6
    assert [row.noise_std for row in rows] == pytest.approx(
        [SIGMA * clip * (1 + 2**-9) for clip in expected]
    )
    assert optimizer.clip == optimizer.clip_history[-1][4]


@pytest.mark.parametrize("physical", [None, 5])
def test_zero_gain_is_bitwise_plain_dp_sgd(physical):
    def weights(clipping):
        _, module, optimizer, loader = private(clipping, physical_batch_size=physical)
        train(module, optimizer, loader, epochs=2)
        return flat(module)

    plain = weights(0.7)
    assert torch.equal(weights(Spectral(0.7, period=1, gain=0.0)), plain)
    assert not torch.equal(weights(Spectral(0.7, period=1)), plain)  # the comparison can tell


def test_epsilon_is_that_of_plain_dp_sgd():
    def spent(clipping):
        engine, module, optimizer, loader = private(clipping)
        train(module, optimizer, loader, epochs=2)
        return engine.get_epsilon(1e-5), [
            (row.noise_multiplier, row.sample_rate) for row in engine.ledger.rows()
        ]

    assert spent(Spectral(period=1)) == spent(1.0)


@pytest.mark.parametrize("make", [Spectral, Spectral.paper])
def test_c_sequence_is_recomputed_from_saved_weights(make):
    controller = make(period=3, probe=["0", "2"])
    engine, module, optimizer, loader = private(controller)
    released = []
    train(
        module,
        optimizer,
        loader,
        epochs=3,
        after=lambda: released.append(copy.deepcopy(module.state_dict())),
    )

    offline, net = make(period=3, probe=["0", "2"]), network(seed=1)
    probe = offline.probe.bind(net, dict(net.named_parameters()))
    state, used = offline.init(), []
    for done, weights in enumerate(released, start=1):
        used.append(state.clip)
        net.load_state_dict(weights)
        reading = probe.read(net, done)
        if reading is not None:
            state = offline.update(reading, state)
    assert used == [row.clip for row in engine.ledger.rows()]
    assert state.clip == optimizer.clip and len(set(used)) == 4


def test_replaying_the_history_repeats_the_run():
    _, module, optimizer, loader = private(Spectral(period=2))
    train(module, optimizer, loader, epochs=2)
    _, again, replayed, loader = private(Replay(optimizer.clip_history, initial=1.0))
    train(again, replayed, loader, epochs=2)
    assert torch.equal(flat(module), flat(again)) and replayed.clip == optimizer.clip


def test_c_is_constant_inside_a_logical_batch():
    _, module, optimizer, loader = private(Spectral(period=1), physical_batch_size=3)
    used, batches = set(), []
    loss = nn.CrossEntropyLoss()
    for x, y in loader:
        used.add(optimizer.clip)
        optimizer.zero_grad()
        loss(module(x), y).backward()
        used.add(optimizer.clip)
        optimizer.step()
        if optimizer.stepped:
            batches.append(used)
            used = set()
    assert len(batches) == N // BATCH and all(len(clips) == 1 for clips in batches)
    assert len(set().union(*batches)) == len(batches)


def test_history_and_state_survive_a_checkpoint(tmp_path):
    _, whole, straight, loader = private(Spectral(period=1, law="pid"))
    train(whole, straight, loader, epochs=2)

    engine, module, optimizer, loader = private(Spectral(period=1, law="pid"))
    train(module, optimizer, loader, epochs=1)
    engine.save(tmp_path / "run.pt")
    saved = list(optimizer.clip_history)
    train(module, optimizer, loader, epochs=1)  # lost, and run again below

    engine, module, optimizer, loader = private(Spectral(period=1, law="pid"), net=network(seed=5))
    engine.load(tmp_path / "run.pt", replay=True)
    assert optimizer.clip_history == saved and optimizer.clip == saved[-1][4]
    train(module, optimizer, loader, epochs=1)
    assert optimizer.clip_history == straight.clip_history and torch.equal(
        flat(module), flat(whole)
    )


def test_probes_that_cannot_be_bound_are_refused_at_make_private():
    with pytest.raises(ValueError, match="Candidates"):
        private(Spectral(), net=nn.Sequential(nn.Linear(24, 8), nn.Linear(8, 3)))
    net = network()
    net[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="0 is not among the tensors"):
        private(Spectral(probe="0"), net=net)


@pytest.mark.parametrize("signal", ["random", "shuffled"])
def test_blind_controllers_run_and_repeat(signal):
    def clips():
        _, module, optimizer, loader = private(Spectral(period=1, signal=signal))
        train(module, optimizer, loader)
        return [entry[4] for entry in optimizer.clip_history]

    assert clips() == clips() and len(set(clips())) > 1
