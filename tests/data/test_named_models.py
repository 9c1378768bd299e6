"""The networks by name: shapes, names of layers, parity, and what a probe finds in them."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zetaclip import check_parity, models
from zetaclip.data import Dataset, Split, load
from zetaclip.errors import InputError
from zetaclip.spectrum.probe import Probe

CASES = [
    ("cnn", (1, 28, 28)),
    ("cnn", (1, 8, 8)),
    ("cnn", (3, 32, 32)),
    ("cnn", (1, 15, 6)),
    ("cnn-large", (1, 28, 28)),
    ("cnn-large", (3, 9, 8)),
    ("resnet-small", (3, 32, 32)),
    ("resnet-small", (3, 96, 96)),
    ("linear", (105,)),
    ("head", (105,)),
    ("mlp", (105,)),
    ("mlp-2", (7,)),
    ("mlp-3", (7,)),
    ("mlp-4", (7,)),
    ("mlp-5", (1, 8, 8)),
    pytest.param("resnet18", (3, 8, 8), marks=pytest.mark.slow),
    pytest.param("resnet34", (3, 8, 8), marks=pytest.mark.slow),
]


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def test_every_name_is_tried():
    tried = {case[0] if isinstance(case[0], str) else case[0][0] for case in CASES}
    assert tried == set(models.names())


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_parity_and_shape(name, shape):
    # In float64: a ReLU or a maximum may fall to the other side by a rounding error of float32.
    model = models.build(name, shape, 10).double()
    x, y = torch.randn(13, *shape, dtype=torch.float64), torch.randint(0, 10, (13,))
    assert model(x).shape == (13, 10)
    parity = check_parity(model, (x, y), loss)
    assert parity, str(parity)


def test_cnn_is_the_network_of_opacus():
    from networks import OpacusExample

    ours, theirs = models.build("cnn", (1, 28, 28), 10), OpacusExample()
    assert sum(p.numel() for p in ours.parameters()) == 26010
    ours.load_state_dict(theirs.state_dict())  # the same names and shapes
    x = torch.randn(5, 1, 28, 28)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize(
    ("name", "blocks"), [("resnet18", (2, 2, 2, 2)), ("resnet34", (3, 4, 6, 3))]
)
def test_resnets_are_the_published_ones_but_for_norm_and_stem(name, blocks):
    with torch.device("meta"):
        model = models.build(name, (3, 224, 224), 1000)
        small = models.build(name, (3, 32, 32), 10)
    # torchvision counts 11,689,512 and 21,797,672 parameters; GroupNorm has as many as BatchNorm.
    assert (
        sum(p.numel() for p in model.parameters())
        == {"resnet18": 11689512, "resnet34": 21797672}[name]
    )
    assert (
        model.stem.kernel_size == (7, 7)
        and small.stem.kernel_size == (3, 3)
        and small.stem.stride == (1, 1)
    )
    assert tuple(len(getattr(model, f"layer{i}")) for i in range(1, 5)) == blocks
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert {m.num_groups for m in norms} == {16, 32} and not any(
        "BatchNorm" in type(m).__name__ for m in model.modules()
    )


def test_the_small_resnet_and_its_probe():
    model = models.build("resnet-small", (3, 32, 32), 10)
    widths = [getattr(model, f"layer{i}")[0].conv2.out_channels for i in (1, 2, 3)]
    assert widths == [16, 32, 64] and not hasattr(model, "layer4")
    probe = Probe().bind(model, dict(model.named_parameters()))
    assert list(probe.bound) == ["stem", "layer2.0.conv2", "layer3.0.conv2", "fc"]
    with torch.device("meta"):
        large = models.build("resnet18", (3, 32, 32), 10)
    probe = Probe().bind(large, dict(large.named_parameters()))
    assert list(probe.bound) == ["stem", "layer2.1.conv2", "layer4.1.conv2", "fc"]
    # the names of the paper's probe sets
    named = Probe(["stem", "layer2", "layer4", "fc"]).bind(large, dict(large.named_parameters()))
    assert list(named.bound) == list(probe.bound)


@pytest.mark.parametrize("name", ["cnn", "cnn-large", "mlp"])
def test_plain_networks_are_probed_at_fc1(name):
    model = models.build(name, (1, 8, 8), 10)
    probe = Probe().bind(model, dict(model.named_parameters()))
    assert list(probe.bound) == ["fc1"]


def test_widths_of_the_perceptrons():
    widths = [model.out_features for model in models.build("mlp", (30,), 1).children()]
    assert widths == [128, 64, 1]
    for layers in (2, 3, 4, 5):
        names = [name for name, _ in models.build(f"mlp-{layers}", (30,), 1).named_children()]
        assert names == [f"fc{i}" for i in range(1, layers + 1)]


MODULE = """
from torch import nn

def both(input_shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], outputs))

def named(*, outputs, width=3):
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, outputs))

def positional(shape, classes, dropout=0.1):
    return nn.Linear(shape[0], classes)

def one(classes):
    return nn.Linear(4, classes)

def none():
    return nn.Linear(4, 2)

def three(a, b, c):
    return nn.Linear(4, 2)

def wrong():
    return "a model"

class Net(nn.Linear):
    def __init__(self, input_shape, outputs):
        super().__init__(input_shape[0], outputs)

number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_nets.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield "own_nets"
    sys.modules.pop("own_nets", None)


@pytest.mark.parametrize("maker", ["both", "named", "positional", "one", "none", "Net"])
def test_own_networks_are_called_with_what_they_take(module, maker):
    path = list(sys.path)
    model = models.build(f"{module}:{maker}", (4,), 2)
    assert model(torch.randn(3, 4)).shape == (3, 2)
    assert sys.path == path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_nets:three", r"needs a, b, c; a model is called with"),
        ("own_nets:wrong", "returned str, not a torch.nn.Module"),
        ("own_nets:number", "is not callable"),
        ("own_nets:absent", "cannot find the model"),
        ("no_such_module:x", "cannot find the model"),
        (":", "cannot find the model"),
        ("resnet-smal", r"unknown model 'resnet-smal'. Did you mean resnet-small\?"),
    ],
)
def test_own_networks_that_do_not_fit(module, name, message):
    with pytest.raises(InputError, match=message):
        models.build(name, (4,), 2)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("cnn", (105,), "is for images"),
        ("cnn", (1, 5, 5), "at least 6x6"),
        ("resnet18", (3, 4, 4), "at least 8x8"),
        ("mlp", (), "no network for records"),
    ],
)
def test_records_that_a_network_cannot_take(name, shape, message):
    with pytest.raises(InputError, match=message):
        models.build(name, shape, 10)


def named_dataset(name, shape):
    split = Split(torch.zeros(2, *shape), torch.zeros(2, dtype=torch.long))
    return Dataset(name, "classification", split, split, 10, "one image")


@pytest.mark.parametrize(
    ("name", "shape", "model"),
    [
        ("mnist", (1, 28, 28), "cnn"),
        ("emnist-letters-subset", (1, 28, 28), "cnn"),
        ("fashion-mnist", (1, 28, 28), "cnn"),
        ("cifar10", (3, 32, 32), "resnet-small"),
        ("cifar100", (3, 32, 32), "resnet-small"),
        ("adult", (105,), "mlp"),
        ("ved", (16,), "mlp"),
        ("imagenet100", (3, 64, 64), "resnet18"),
        ("pets", (3, 64, 64), "resnet-small"),
        ("pets", (3, 128, 128), "resnet18"),
    ],
)
def test_default_networks(name, shape, model):
    dataset = named_dataset(name, shape)
    assert models.default_for(dataset) == model


def test_digits_and_their_default_fit_together():
    digits = load("digits")
    model = models.build(models.default_for(digits), digits.input_shape, digits.outputs)
    assert isinstance(model, models.Cnn) and model(digits.test.x).shape == (360, 10)
