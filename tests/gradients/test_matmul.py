"""Products by either library against float64."""

import pytest
import torch
from helpers import assert_parity, square_loss
from torch import nn

from zetaclip.gradients import matmul

SHAPES = [((3, 5), 4), ((2, 3, 5), 4), ((64, 256), 256), ((4, 32, 128), 192)]


def _strided(values):
    return torch.stack([values, values], -1)[..., 0]


@pytest.mark.parametrize("threshold", [0, 1 << 60], ids=["oneDNN", "torch"])
@pytest.mark.parametrize("of", [lambda v: v, _strided], ids=["contiguous", "strided"])
@pytest.mark.parametrize(("shape", "outputs"), SHAPES)
def test_products_agree_with_float64(shape, outputs, of, threshold, monkeypatch):
    monkeypatch.setattr(matmul, "WORTH_IT", threshold)
    torch.manual_seed(0)
    x, weight, bias = torch.randn(shape), torch.randn(outputs, shape[-1]), torch.randn(outputs)
    forward = matmul.linear(of(x), of(weight), bias)
    back = matmul.linear(of(forward), of(weight).t())
    assert forward.shape == (*shape[:-1], outputs) and back.shape == x.shape
    expected = x.double() @ weight.double().t() + bias
    torch.testing.assert_close(forward.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        back.double(), forward.double() @ weight.double(), rtol=1e-5, atol=2e-3
    )


def test_a_network_has_the_same_gradients_by_either_library(monkeypatch):
    monkeypatch.setattr(matmul, "WORTH_IT", 0)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3))
    assert_parity(network, (torch.randn(5, 4, 7),), square_loss, 2e-5)


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_without_one_dnn_torch_computes(monkeypatch):
    monkeypatch.setattr(matmul, "WORTH_IT", 0)
    x, weight = torch.randn(64, 32), torch.randn(8, 32)
    with torch.backends.mkldnn.flags(enabled=False):
        assert matmul.source() == "torch"
        assert torch.equal(matmul.linear(x, weight), nn.functional.linear(x, weight))
