"""Reading membership off the last digits of the noise.

Noise that comes from uniforms of few bits can take few values. Where the sum is zero, pairs of
released values lie on radii that such a uniform can give; where a record has moved the sum, they
don't. So the digits tell whether the only record with a rare feature was there, at any σ and at an
ε that says that nobody can know.
"""

import numpy as np
import pytest
import torch
from attacks import grid_score, misfits, old_noise
from helpers import mean_loss, private, train
from torch import nn

from zetaclip import methods

SIGMA, SIZE, HIDDEN = 50.0, 400, 4096
# dtype -> how many features (the distance of partners in the old noise), bits of its uniforms, and
# the largest squared radius
KINDS = {torch.float32: (64, 24, 0.03), torch.float64: (8, 53, 0.05)}


def records(features, target, trial, dtype):
    """Nobody but the target has the last feature."""
    source = torch.Generator().manual_seed(trial)
    x = torch.randn(SIZE, features, generator=source, dtype=dtype)
    x[:, -1] = 0
    if target:
        x[-1, -1] = 1.0
    return x, torch.randint(2, (SIZE,), generator=source)


def network(features, hidden, trial, dtype):
    torch.manual_seed(trial)
    return nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, 2)).to(dtype)


def partners(matrix):
    """The values of the rare feature, as pairs that shared a radius in the old noise."""
    column = matrix.double().numpy()[:, -1]
    return column[0::2], column[1::2]


def from_gradient(target, trial, dtype):
    """The released gradient of one step."""
    features, bits, limit = KINDS[dtype]
    module = network(features, HIDDEN, trial, dtype)
    data = records(features, target, trial, dtype)
    _, module, optimizer, loader = private(
        module, data, sigma=SIGMA, q=1.0, seed=2 * trial + target
    )
    train(module, optimizer, loader, mean_loss)
    scale = float(torch.tensor(SIGMA / SIZE, dtype=dtype))
    return misfits(*partners(module[0].weight.grad), scale, bits, limit)


def from_weights(target, trial, dtype=torch.float32):
    """Two consecutive weights."""
    features, bits, _ = KINDS[dtype]
    module = network(features, HIDDEN, trial, dtype)
    before = module[0].weight.detach().double().clone()
    data = records(features, target, trial, dtype)
    _, module, optimizer, loader = private(
        module, data, sigma=SIGMA, q=1.0, seed=2 * trial + target
    )
    train(module, optimizer, loader, mean_loss)
    scale = float(torch.tensor(SIGMA / SIZE, dtype=dtype))
    return misfits(*partners(before - module[0].weight.detach().double()), scale, bits, 0.01)


def from_checkpoint(target, trial, dtype=torch.float32, folder=None):
    """One public file of a run that keeps its last private gradient in it."""
    features, bits, limit = KINDS[dtype]
    module = network(features, HIDDEN, trial, dtype)
    data = records(features, target, trial, dtype)
    engine, module, optimizer, loader = private(
        module,
        data,
        sigma=SIGMA,
        q=1.0,
        seed=2 * trial + target,
        lr=0.1,
        method=methods.get("dp-sat"),
        clipping=None,
    )
    train(module, optimizer, loader, mean_loss, epochs=3)
    engine.save(folder / f"{trial}-{target}.pt")
    public = torch.load(folder / f"{trial}-{target}.pt", weights_only=True)
    clip = list(engine.ledger.rows())[-1].sensitivity
    (kept,) = public["memory"].values()
    scale = float(torch.tensor(SIGMA * clip / SIZE, dtype=dtype))
    return misfits(*partners(kept[: HIDDEN * features].view(HIDDEN, features)), scale, bits, limit)


def told(attack, trials):
    """The mean misfit without and with the target, and how many deviations lie between them if
    digits tell nothing."""
    found = [
        np.concatenate([attack(target, trial) for trial in range(trials)])
        for target in (False, True)
    ]
    apart = abs(found[0].mean() - found[1].mean()) / np.sqrt(
        (1 / len(found[0]) + 1 / len(found[1])) / 48
    )
    return found[0].mean(), found[1].mean(), apart


def check(attack, trials):
    without, member, apart = told(attack, trials)
    assert apart < 5, (
        f"misfit {without:.3f} without the target and {member:.3f} with it: {apart:.0f} deviations"
    )


def old_release(target, trial, dtype, weights=False):
    """The same numbers from noise as it was made once, with a target that moves the sum by a
    fraction of C."""
    features, bits, limit = KINDS[dtype]
    kind = np.float32 if dtype == torch.float32 else np.float64
    noise = old_noise(HIDDEN * features, features, bits, 2 * trial + target, kind).reshape(
        HIDDEN, features
    )
    sums = np.random.default_rng(trial).normal(0, 0.02, HIDDEN) * target
    scale = kind(SIGMA / SIZE)
    released = noise * scale
    released[:, -1] += (sums / SIZE).astype(kind)
    if weights:
        before = (
            np.random.default_rng(trial + 100).uniform(-1 / 8, 1 / 8, released.shape).astype(kind)
        )
        released, limit = before.astype(np.float64) - (before - released).astype(np.float64), 0.01
    return misfits(*partners(torch.from_numpy(released)), float(scale), bits, limit)


@pytest.mark.parametrize("weights", [False, True], ids=["gradient", "weights"])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_the_attack_works_on_noise_of_few_bits(dtype, weights):
    if weights and dtype == torch.float64:
        pytest.skip("weights round away what 53 bits would tell")
    without, member, apart = told(
        lambda target, trial: old_release(target, trial, dtype, weights), 12 if weights else 4
    )
    assert without < 0.1 and member > 0.2 and apart > 10


@pytest.mark.parametrize("trials", [3, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_the_digits_of_a_released_gradient_do_not_tell_who_was_there(dtype, trials):
    check(lambda target, trial: from_gradient(target, trial, dtype), trials)


@pytest.mark.parametrize("trials", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_the_digits_of_two_weights_do_not_tell_who_was_there(trials):
    check(from_weights, trials)


@pytest.mark.parametrize("trials", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_the_digits_in_one_public_checkpoint_do_not_tell_who_was_there(trials, tmp_path):
    check(lambda target, trial: from_checkpoint(target, trial, folder=tmp_path), trials)


# -- without any record: does the noise lie on radii of a grid? ------------------------------------


RECORDS = 128  # a power of two: to divide by it rounds nothing


def nothing_but_noise(dtype):
    """A release whose sum is zero, in units of its standard deviation."""
    module = nn.Linear(2000, 60, bias=False).to(dtype)
    data = (torch.zeros(RECORDS, 2000, dtype=dtype), torch.zeros(RECORDS, dtype=torch.long))
    engine, module, optimizer, loader = private(module, data, sigma=SIGMA, q=1.0, seed=5)
    train(module, optimizer, loader, mean_loss)
    return engine, module.weight.grad.flatten()


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_radii_of_the_noise_lie_on_no_grid(dtype):
    _, noise = nothing_but_noise(dtype)
    scale = float(torch.tensor(SIGMA / RECORDS, dtype=dtype))
    for bits in (24, 32) if dtype == torch.float32 else (24, 32, 53):
        assert grid_score(noise.double().numpy(), scale, bits, 0.02) < 6, f"{bits} bits"
    assert int((noise == 0).sum()) <= 3


def test_radii_on_a_grid_are_seen():
    for half, bits, dtype in ((64, 24, np.float32), (8, 24, np.float32), (8, 53, np.float64)):
        assert grid_score(old_noise(120_000, half, bits, 1, dtype), 1.0, bits, 0.02) > 20
    normals = np.random.default_rng(3).standard_normal(120_000)
    assert all(grid_score(normals, 1.0, bits, 0.02) < 6 for bits in (24, 32, 53))


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_release_is_a_whole_number_of_the_grid_that_its_row_names(dtype):
    """Then every value that can come out can come out with and without any one record."""
    engine, noise = nothing_but_noise(dtype)
    row = next(iter(engine.ledger.rows()))
    grid = getattr(row, "grid", None)
    assert grid and np.log2(grid) == round(np.log2(grid)), "the ledger's row names a power of two"
    units = noise.double().numpy() * RECORDS / grid
    assert (units == np.round(units)).all()
    # Ordinary noise of this level and precision is not.
    normals = (
        torch.randn(len(units), generator=torch.Generator().manual_seed(1), dtype=dtype) * SIGMA
    )
    assert (normals.double().numpy() / grid % 1 != 0).any()
