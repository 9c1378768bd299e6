"""Max pooling of the built-in networks against torch's."""

import pytest
import torch
import torch.nn.functional as F

from zetaclip._pooling import max_pool
from zetaclip.models import MODELS


def both(x, stride, weights):
    """Output and gradient of torch's pooling and of ours."""
    results = []
    for pool in (lambda x: F.max_pool2d(x, 2, stride), lambda x: max_pool(x, stride)):
        leaf = x.clone().requires_grad_()
        y = pool(leaf)
        (gradient,) = torch.autograd.grad((y * weights).sum(), leaf)
        results.append((y.detach(), gradient))
    return results


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("sides", [(2, 2), (5, 4), (14, 14), (13, 7)])
@pytest.mark.parametrize("rows", [0, 1, 33])
@pytest.mark.parametrize("channels", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_same_bits_as_torch(stride, sides, rows, channels, dtype):
    torch.manual_seed(1)
    x = torch.randn(rows, channels, *sides).relu().to(dtype)  # with ties at zero
    weights = torch.randn(F.max_pool2d(x, 2, stride).shape).to(dtype)
    (y, gradient), (ours, our_gradient) = both(x, stride, weights)
    assert ours.shape == y.shape and torch.equal(ours, y)
    assert torch.equal(our_gradient, gradient)


def test_infinite_and_missing_numbers():
    x = torch.tensor([[1.0, float("inf"), 2.0], [float("nan"), 0.0, -1.0]]).view(1, 1, 2, 3)
    torchs = F.max_pool2d(x, 2, 1)
    torch.testing.assert_close(max_pool(x, 1), torchs, rtol=0, atol=0, equal_nan=True)


def test_images_that_are_stored_otherwise():
    torch.manual_seed(2)
    x = torch.randn(4, 8, 10, 6)
    for stored in (x.to(memory_format=torch.channels_last), x.transpose(2, 3)):
        weights = torch.randn(F.max_pool2d(stored, 2, 2).shape)
        (y, gradient), (ours, our_gradient) = both(stored, 2, weights)
        assert torch.equal(ours, y) and torch.equal(our_gradient, gradient)


@pytest.mark.parametrize("name", ["cnn", "cnn-large"])
def test_networks_under_transforms(name):
    """Gradients of single records by torch.func add up to that of the batch."""
    torch.manual_seed(3)
    network = MODELS[name]((1, 16, 16), 4)
    x, y = torch.randn(5, 1, 16, 16), torch.tensor([0, 1, 2, 3, 0])
    weights = dict(network.named_parameters())

    def loss(weights, x, y):
        out = torch.func.functional_call(network, weights, (x[None],))
        return F.cross_entropy(out, y[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, x, y)
    F.cross_entropy(network(x), y, reduction="sum").backward()
    for key, parameter in weights.items():
        torch.testing.assert_close(each[key].sum(0), parameter.grad, rtol=1e-4, atol=1e-6)


def test_compiled_network_is_the_same():
    network = MODELS["cnn"]((1, 16, 16), 4).eval()
    x = torch.randn(3, 1, 16, 16)
    exported = torch.export.export(network, (x,)).module()
    assert torch.equal(exported(x), network(x))
    assert any("max_pool2d" in str(node.target) for node in exported.graph.nodes)
