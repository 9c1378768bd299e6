"""Which layers a probe reads, when, and what it refuses."""

import math

import pytest
import torch
from torch import nn

from zetaclip.spectrum import Probe, eigenvalues, fit_tail


def trained(module):
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def bound(module, *args, **options):
    return Probe(*args, **options).bind(module, trained(module))


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 8), nn.Conv2d(16, 32, 4)
        self.fc1, self.fc2 = nn.Linear(512, 32), nn.Linear(32, 10)


class Block(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(inside, outside, 3), nn.Conv2d(outside, outside, 3)
        if inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1), nn.GroupNorm(4, outside))


class Resnet(nn.Module):
    def __init__(self, stages):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.norm = nn.GroupNorm(4, 8)
        for index in range(1, stages + 1):
            inside, outside = 8 * max(1, 2 ** (index - 2)), 8 * 2 ** (index - 1)
            setattr(self, f"layer{index}", nn.Sequential(Block(inside, outside)))
        self.fc = nn.Linear(outside, 10)


def test_default_is_fc1_where_there_is_one():
    assert bound(Cnn()).bound == {"fc1": "fc1.weight"}
    assert list(bound(nn.ModuleDict({"head": Cnn()})).bound) == ["head.fc1"]


@pytest.mark.parametrize(("stages", "last"), [(4, "layer4"), (3, "layer3")])
def test_default_of_a_resnet_covers_stem_middle_end_and_head(stages, last):
    # the shortcut's projection is registered after conv2 but is not the stage's last convolution
    expected = ["conv1", "layer2.0.conv2", f"{last}.0.conv2", "fc"]
    assert list(bound(Resnet(stages)).bound) == expected


def test_default_otherwise_is_the_last_linear_with_enough_eigenvalues():
    net = nn.Sequential(
        nn.Linear(105, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2)
    )
    assert list(bound(net).bound) == ["2"]
    assert list(bound(nn.Sequential(nn.Linear(40, 16), nn.Linear(16, 15))).bound) == ["0"]


def test_no_default_names_the_candidates():
    with pytest.raises(ValueError, match=r"Candidates: 0 15x30, 1 4x15\.") as error:
        bound(nn.Sequential(nn.Linear(30, 15), nn.Linear(15, 4)))
    assert "probe=" in str(error.value)


def test_names_globs_containers_and_parameters():
    net = Resnet(4)
    assert list(bound(net, "fc").bound) == ["fc"]
    assert list(bound(net, "fc.weight").bound) == ["fc"]
    assert list(bound(net, "layer4").bound) == ["layer4.0.conv2"]
    assert list(bound(net, "layer4.*").bound) == [
        "layer4.0.conv1",
        "layer4.0.conv2",
        "layer4.0.downsample.0",
    ]
    assert list(bound(net, ["fc", "layer2", "f*"]).bound) == ["fc", "layer2.0.conv2"]
    with pytest.raises(ValueError, match="'fc9'"):
        bound(net, "fc9")


def test_attention_projections_are_read_by_parameter_name():
    net = nn.ModuleDict({"a": nn.MultiheadAttention(16, 2)})
    assert bound(net, "a.in_proj_weight").bound == {"a.in_proj_weight": "a.in_proj_weight"}


def test_tensors_that_training_does_not_update_are_refused():
    net = Cnn()
    net.fc1.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="fc1 is not among the tensors"):
        bound(net, "fc1")
    # not asked for by name: passed over, never read
    assert "fc1" not in bound(net, "fc*").bound
    assert list(bound(net, "fc*").bound) == ["fc2"]
    with pytest.raises(ValueError, match="no trained layer matches"):
        Probe("*").bind(net, {})
    # a parameter with the right name that is another tensor is not the trained one
    with pytest.raises(ValueError, match="fc2 is not among"):
        Probe("fc2").bind(net, {"fc2.weight": Cnn().fc2.weight})


def test_buffers_are_not_candidates():
    net = nn.Sequential(nn.Linear(20, 20))
    net.register_buffer("running", torch.randn(20, 20))
    with pytest.raises(ValueError, match="'running'"):
        bound(net, "running")


def test_reading_comes_every_period_and_holds_the_fits():
    net = Cnn()
    probe = bound(net, ["fc1", "conv2"], fit="hill", period=5)
    assert [step for step in range(1, 21) if probe.read(net, step) is not None] == [5, 10, 15, 20]
    reading = probe.read(net, 10)
    assert reading.step == 10 and reading.shapes == {"fc1": (32, 512), "conv2": (32, 256)}
    assert math.isclose(
        reading.fits["fc1"].zeta, fit_tail(eigenvalues(net.fc1.weight), "hill").zeta
    )
    assert math.isclose(
        reading.fits["conv2"].zeta, fit_tail(eigenvalues(net.conv2.weight), "hill").zeta
    )
    assert reading.fits["fc1"].weak


def test_reading_follows_the_weights():
    torch.manual_seed(0)
    net = Cnn()
    probe = bound(net)
    before = probe.read(net, 1).fits["fc1"].zeta
    with torch.no_grad():
        net.fc1.weight *= torch.linspace(0.2, 3.0, 32)[:, None]
    assert (
        probe.read(net, 2).fits["fc1"].zeta < before - 2.0
    )  # rows of unequal size: a heavier tail


def test_random_weights_are_weak_and_structured_ones_are_not():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 100))
    probe = bound(net)
    assert probe.read(net, 1).fits["0"].weak
    with torch.no_grad():
        net[0].weight *= (torch.rand(100, 1) + 1e-3) ** -0.5
    assert not probe.read(net, 2).fits["0"].weak


def test_shuffled_weights_lose_their_structure_but_not_their_numbers():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 100))
    with torch.no_grad():
        net[0].weight += torch.outer(torch.randn(100), torch.randn(300))
    straight = bound(net).read(net, 4).fits["0"]
    probe = bound(net, shuffle=True)
    shuffled = probe.read(net, 4).fits["0"]
    assert shuffled.zeta > straight.zeta and shuffled.weak
    assert probe.read(net, 4).fits["0"] == shuffled  # a function of weights and step
    assert probe.read(net, 5).fits["0"] != shuffled


def test_configured_is_a_fresh_copy():
    net = Cnn()
    probe = bound(net, "fc2", aggregate="mean", k=6)
    other = probe.configured(fit="ks", period=7, shuffle=False)
    assert other.bound == {} and (other.fit, other.period, other.k, other.aggregate) == (
        "ks",
        7,
        6,
        "mean",
    )
    assert probe.bound and probe.fit == "rank"
    with pytest.raises(RuntimeError, match="not bound"):
        other.read(net, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregate": "max"}, "aggregate"),
        ({"fit": "ols"}, "fit"),
        ({"period": 0}, "period"),
        ({"period": 2.5}, "period"),
        ({"layers": []}, "empty"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        Probe(**options)
