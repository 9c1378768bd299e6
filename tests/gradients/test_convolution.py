"""The three kernels for per-example weight gradients give one answer, torch's own."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from zetaclip.gradients import convolution, products
from zetaclip.gradients.contributions import Dense
from zetaclip.gradients.convolution import (
    ConvGram,
    ConvPieces,
    Geometry,
    _folded,
    _shifted,
    convolution_contribution,
)
from zetaclip.gradients.grams import TRUSTED, gram_norms

GEOMETRIES = list(
    itertools.product(
        [(3, 3), (1, 1), (2, 5)],
        [(1, 1), (2, 3), (3, 2)],
        [(0, 0), (1, 1), (2, 1)],
        [(1, 1), (2, 1)],
    )
)


@pytest.mark.parametrize("piece", [1 << 18, 3000], ids=["one-piece", "many-pieces"])
def test_all_kernels_agree(monkeypatch, piece):
    monkeypatch.setattr(convolution, "PIECE", piece)
    for kernel, stride, padding, dilation in GEOMETRIES:
        x = torch.randn(4, 3, 13, 11, dtype=torch.float64)
        weight = torch.randn(5, 3, *kernel, dtype=torch.float64)
        g = torch.randn_like(F.conv2d(x, weight, None, stride, padding, dilation))
        expected = torch.stack(
            [
                torch.nn.grad.conv2d_weight(
                    x[i : i + 1], weight.shape, g[i : i + 1], stride, padding, dilation
                )
                for i in range(4)
            ]
        )
        geometry = Geometry(kernel, stride, padding, dilation, 1)
        for found in (
            Dense(_folded(x, g, geometry, weight.shape), weight.shape),
            _shifted(x, g, geometry, weight.shape),
            ConvGram(x, g, geometry),
            ConvPieces(x, g, geometry),
        ):
            torch.testing.assert_close(found.dense(), expected, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(
                found.norms(), expected.flatten(1).norm(dim=1), rtol=1e-10, atol=1e-10
            )
            factors = torch.rand(4, dtype=torch.float64)
            total = torch.ones_like(weight)
            found.add_to(total, factors)
            wanted = 1 + torch.einsum("b,bocij->ocij", factors, expected)
            torch.testing.assert_close(total, wanted, rtol=1e-10, atol=1e-10)


def test_the_choice_depends_on_shapes_alone(monkeypatch):
    monkeypatch.setattr(products, "compiled", None)

    def chosen(channels, size, groups=1):
        x = torch.randn(2, channels, size, size)
        geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), groups)
        return convolution_contribution(x, torch.randn(2, channels, size, size), geometry)

    assert isinstance(chosen(256, 4), ConvGram)
    assert type(chosen(24, 2)) is ConvPieces  # small weights are cheaper to make, but not to keep
    assert chosen(64, 16).unpack is not None  # shifted
    assert chosen(8, 16).unpack is None  # folded
    assert chosen(64, 16, groups=64).unpack is None


def test_cancellation_in_the_gram_form_is_flagged_not_believed():
    """x_1 = x_2 and g_1 = -g_2 up to 1e-4: of the terms so little is left that a squared sum can't
    be trusted."""
    torch.manual_seed(0)
    x = torch.randn(3, 2, 50)
    x[:, 1] = x[:, 0]
    g = torch.randn(3, 2, 50)
    g[0, 1] = -g[0, 0] * (1 + 1e-4)
    norms = gram_norms(x, g, TRUSTED)
    exact = torch.bmm(g.double().transpose(1, 2), x.double()).flatten(1).norm(dim=1)
    assert torch.isnan(norms[0]) and exact[0] < TRUSTED * 2 * x[0, 0].norm() * g[0, 0].norm()
    torch.testing.assert_close(norms[1:], exact[1:], rtol=1e-12, atol=0)
