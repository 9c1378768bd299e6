"""``zetaclip.fix``, ``get_noise_multiplier``, and what engine, loader and ledger print."""

import copy
import math

import pytest
import torch
from helpers import private, toy_data, train
from torch import nn

import zetaclip
from zetaclip.accounting import epsilon
from zetaclip.ledger import Event


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3)
    )


def test_batch_norm_becomes_group_norm_and_is_told():
    module = convolutional()
    with torch.no_grad():
        module[1].weight.uniform_(0.5, 2)
        module[1].bias.normal_()
    module[1].bias.requires_grad_(False)
    before = copy.deepcopy(module.state_dict())
    with pytest.warns(UserWarning, match=r"1: BatchNorm2d is now GroupNorm\(2, 8"):
        fixed = zetaclip.fix(module)
    assert isinstance(module[1], nn.BatchNorm2d)  # the module itself is left alone
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    norm = fixed[1]
    assert torch.equal(norm.weight, module[1].weight) and torch.equal(norm.bias, module[1].bias)
    assert norm.weight.requires_grad and not norm.bias.requires_grad
    data = (torch.randn(8, 1, 6, 6), torch.randint(0, 3, (8,)))
    _, fixed, optimizer, loader = private(fixed, data)
    assert train(fixed, optimizer, loader) == 2


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6, 30, 64, 100, 256])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_every_group_has_channels_to_normalise(kind, width):
    with pytest.warns(UserWarning, match="GroupNorm"):
        norm = zetaclip.fix(kind(width))
    assert width % norm.num_groups == 0 and norm.num_groups <= 32
    assert norm.num_groups == 1 or width // norm.num_groups >= 4
    if kind is nn.BatchNorm1d and width > 1:  # a record of one group is not a record of zeros
        assert norm(torch.arange(2.0 * width).reshape(2, width)).abs().max() > 0.5


def test_other_layers_that_mix_or_remember():
    shared = nn.BatchNorm1d(4)
    module = nn.ModuleDict(
        {
            "instance": nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
            "words": nn.Embedding(5, 2, max_norm=1.0),
            "one": shared,
            "two": shared,
        }
    )
    with pytest.warns(UserWarning, match="differs from the module") as said:
        fixed = zetaclip.fix(module)
    assert len(said) == 1 and all(name in str(said[0].message) for name in module)
    assert fixed["one"] is fixed["two"] and isinstance(fixed["one"], nn.GroupNorm)
    assert fixed["words"].max_norm is None and module["words"].max_norm == 1.0
    assert torch.equal(fixed["words"].weight, module["words"].weight)
    x = torch.randn(2, 3, 7)
    assert not fixed["instance"].state_dict().keys() & {"running_mean", "running_var"}
    assert torch.allclose(fixed["instance"].eval()(x), module["instance"].train()(x))


def test_nothing_to_fix_is_a_plain_copy_without_a_word():
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    fixed = zetaclip.fix(module)
    assert fixed is not module
    assert all(torch.equal(a, b) for a, b in zip(fixed.parameters(), module.parameters()))
    with pytest.raises(ValueError, match="one forward"):
        zetaclip.fix(nn.Sequential(nn.LazyBatchNorm1d()))


@pytest.mark.filterwarnings("ignore:Optimal order is the")  # said by Opacus of its own search
def test_the_noise_multiplier_meets_its_target_as_opacus_counts():
    from opacus.accountants.utils import get_noise_multiplier as theirs

    terms = {"target_epsilon": 3.0, "target_delta": 1e-5, "sample_rate": 0.01}
    by_rdp = zetaclip.get_noise_multiplier(**terms, steps=500, accountant="rdp")
    assert by_rdp == pytest.approx(theirs(**terms, steps=500, accountant="rdp"), rel=0.01)
    sigma = zetaclip.get_noise_multiplier(**terms, epochs=5)
    assert sigma == zetaclip.get_noise_multiplier(**terms, steps=500)
    assert epsilon([Event(0.01, sigma, 500)], 1e-5) <= 3.0
    assert epsilon([Event(0.01, 0.99 * sigma, 500)], 1e-5) > 3.0
    with pytest.raises(TypeError, match="either epochs= or steps="):
        zetaclip.get_noise_multiplier(**terms)


def test_epsilon_at_the_runs_own_delta():
    engine, module, optimizer, loader = private(nn.Linear(6, 3), toy_data(), target_delta=1e-4)
    train(module, optimizer, loader)
    assert engine.get_epsilon() == engine.get_epsilon(1e-4) < engine.get_epsilon(1e-6)
    engine, *_ = private(nn.Linear(6, 3), toy_data())
    with pytest.raises(TypeError, match="needs a delta"):
        engine.get_epsilon()


def test_what_they_say_of_themselves():
    assert "nothing private yet" in repr(zetaclip.PrivacyEngine())
    engine, module, optimizer, loader = private(nn.Linear(6, 3), toy_data())
    assert "0 updates" in repr(engine) and "0 releases" in repr(engine.ledger)
    train(module, optimizer, loader, steps=1)
    assert "1 update," in repr(engine) and "1 release," in repr(engine.ledger)
    assert "differential privacy" in repr(engine)
    given = repr(loader)
    assert f"N = {len(toy_data()[0])}" in given and f"{len(loader)} updates per epoch" in given
    assert math.isclose(float(given.split("q = ")[1].split(",")[0]), loader.sample_rate)
