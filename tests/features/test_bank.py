"""Contrast normalisation, whitening and the dictionary, against numpy and scikit-learn."""

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view
from sklearn.decomposition import PCA

from zetaclip.features._bank import Bank, filters_of, zca
from zetaclip.features._blocks import Area, cells, excess, whitening
from zetaclip.features._draws import Draws
from zetaclip.features._synthetic import pictures


def windows(x, side, stride):
    """Patches as rows of a plain array: (n, down, across, channels · side · side)."""
    found = sliding_window_view(x, (side, side), axis=(2, 3))[:, :, ::stride, ::stride]
    found = found.transpose(0, 2, 3, 1, 4, 5)
    return found.reshape(*found.shape[:3], -1)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("side", "stride"), [(3, 1), (4, 2)])
def test_responses_are_inner_products_of_normalised_patches(centred, side, stride):
    x = torch.randn(3, 2, 9, 11, dtype=torch.float64)
    weight = torch.randn(5, 2, side, side, dtype=torch.float64)
    if centred:
        weight -= weight.mean((1, 2, 3), keepdim=True)
    patches = windows(x.numpy(), side, stride)
    if centred:
        patches = patches - patches.mean(-1, keepdims=True)
    patches = patches / np.sqrt((patches**2).mean(-1, keepdims=True) + 0.3)
    wanted = patches @ weight.reshape(5, -1).numpy().T
    found = Bank(weight, stride, 0.3, centred)(x)
    np.testing.assert_allclose(found.permute(0, 2, 3, 1).numpy(), wanted, rtol=0, atol=1e-12)


def test_zca_without_a_ridge_is_sklearns_whitening_turned_back():
    rows = np.random.default_rng(0).normal(size=(500, 6)) @ np.random.default_rng(1).normal(
        size=(6, 6)
    )
    rows -= rows.mean(0)
    pca = PCA(whiten=True).fit(rows)
    wanted = pca.transform(rows) @ pca.components_ * np.sqrt(500 / 499)
    map_ = zca(torch.from_numpy(rows.T @ rows / 500), ridge=0.0)
    np.testing.assert_allclose(rows @ map_.numpy(), wanted, rtol=1e-9, atol=1e-9)


def test_whitening_without_a_ridge_is_sklearns_up_to_signs():
    rows = np.random.default_rng(2).normal(size=(400, 8)) * np.arange(1, 9) + 3.0
    pca = PCA(5, whiten=True).fit(rows)
    mean, project = whitening(torch.from_numpy(rows), 5, 4)
    found = (rows - mean.numpy()) @ project.numpy().T
    variances = pca.explained_variance_ * 399 / 400
    wanted = pca.transform(rows) * np.sqrt(pca.explained_variance_)
    wanted /= np.sqrt(variances + variances[4])
    np.testing.assert_allclose(np.abs(found), np.abs(wanted), rtol=1e-8, atol=1e-9)


def test_half_of_the_filters_are_mirror_images():
    x = pictures("leaves", 20, (3, 12, 12))
    bank = Bank(torch.empty(10, 3, 4, 4), 1, 0.01, True)
    weight = filters_of(x, bank, mirror=True, draws=Draws("test"))
    torch.testing.assert_close(weight[5:], weight[:5].flip(3), rtol=1e-9, atol=1e-9)
    assert weight.mean((1, 2, 3)).abs().max() < 1e-12  # the mean of a patch does not matter
    other = filters_of(x, bank, mirror=False, draws=Draws("test"))
    assert (other[5:] - other[:5].flip(3)).abs().max() > 0.1


def test_cells_cover_the_map_and_mirror():
    r = torch.randn(2, 3, 13, 10)
    found = cells(r, 4)
    assert found.shape == (2, 2, 3, 4, 4)
    torch.testing.assert_close(cells(r.flip(3), 4), found.flip(4))
    above = (r - 0.25).clamp_min(0.0)
    torch.testing.assert_close(found[0, 0, 0, 0, 0], above[0, 0, :4, :4].mean())
    torch.testing.assert_close(found[0, 0, 0, 3, 3], above[0, 0, -4:, -4:].mean())
    torch.testing.assert_close(excess(-r, (2, 2), (2, 2))[:, 0], excess(r, (2, 2), (2, 2))[:, 1])


@pytest.mark.parametrize(("before", "after"), [((12, 8), (6, 4)), ((9, 14), (9, 7))])
def test_area_is_torchs_pooling_where_that_is_exact(before, after):
    x = torch.randn(2, 3, *before)
    wanted = torch.nn.functional.adaptive_avg_pool2d(x, after)
    torch.testing.assert_close(Area(before, after)(x), wanted, rtol=1e-5, atol=1e-6)


def test_area_keeps_the_mean_of_any_size():
    x = torch.rand(1, 1, 17, 23)
    found = Area((17, 23), (5, 7))(x)
    torch.testing.assert_close(found.mean(), x.mean(), rtol=1e-5, atol=1e-6)
