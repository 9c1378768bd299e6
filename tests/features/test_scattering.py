"""First-order scattering, against the same written out in space."""

import math

import numpy as np
import pytest
import torch

from zetaclip.errors import InputError
from zetaclip.features import rebuilt, scattering


def morlet(width, wave, angle, slant, reach):
    """A Morlet wavelet on pixels: a plane wave under a Gaussian, with mean zero."""
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1].astype(float)
    along = x * math.cos(angle) + y * math.sin(angle)
    across = y * math.cos(angle) - x * math.sin(angle)
    bell = np.exp(-(along**2 + slant**2 * across**2) / (2 * width**2))
    plane = np.exp(1j * wave * along) * bell
    return (plane - bell * plane.sum() / bell.sum()) * slant / (2 * math.pi * width**2)


def circular(picture, filter_):
    """Circular convolution, one shift at a time."""
    reach = filter_.shape[0] // 2
    total = np.zeros(picture.shape, complex)
    for dy in range(-reach, reach + 1):
        for dx in range(-reach, reach + 1):
            total += filter_[dy + reach, dx + reach] * np.roll(picture, (dy, dx), (0, 1))
    return total


def test_maps_are_those_of_convolutions_in_space():
    made = scattering((1, 12, 16))
    x = np.random.default_rng(0).normal(size=(12, 16))
    found = made.maps(torch.from_numpy(x)[None, None].float())[0, 0].numpy()
    padded = np.pad(x, 8, mode="edge")
    y = np.arange(-11, 12)
    bell = np.exp(-(y[:, None] ** 2 + y**2) / (2 * 1.6**2))
    low = bell / bell.sum()
    maps = [padded]
    for j in range(2):
        for k in range(8):
            wave = morlet(0.8 * 2**j, 3 * math.pi / 4 / 2**j, math.pi * k / 8, 0.5, 11)
            maps.append(np.abs(circular(padded, wave)))
    for one, wanted in zip(found, maps, strict=True):
        smooth = circular(wanted, low).real[8:-8, 8:-8]
        np.testing.assert_allclose(one, smooth[2::4, 2::4], rtol=0, atol=2e-4)


def test_many_pictures_have_the_features_of_each():
    made = scattering((1, 8, 8))
    x = torch.rand(37, 1, 8, 8) * 2 - 1
    torch.testing.assert_close(made(x), torch.cat([made(one[None]) for one in x]))


def test_rows_have_another_length_if_told():
    x = torch.rand(4, 1, 8, 8) * 2 - 1
    long = scattering((1, 8, 8), 10.0)
    torch.testing.assert_close(long(x), 10 * scattering((1, 8, 8))(x))
    again = rebuilt(long.describe())
    assert torch.equal(again(x), long(x))
    old = {k: v for k, v in scattering((1, 8, 8)).describe().items() if k != "length"}
    torch.testing.assert_close(rebuilt(old)(x)[:, :-1].norm(dim=1), torch.ones(4))
    for wrong in (0, -1.0, "long", True, math.nan, math.inf):
        with pytest.raises(InputError, match="length"):
            scattering((1, 8, 8), wrong)


def test_rows_have_unit_length_and_a_constant_column():
    made = scattering((3, 9, 32))
    z = made(torch.rand(4, 3, 9, 32) * 2 - 1)
    assert z.shape == (4, made.columns)
    torch.testing.assert_close(z[:, :-1].norm(dim=1), torch.ones(4))
    assert (z[:, -1] == 0.1).all()
    assert made(torch.zeros(1, 3, 9, 32)).isfinite().all()
    assert not list(made.parameters())


def test_small_pictures_are_refused():
    with pytest.raises(InputError, match="at least 8x8"):
        scattering((1, 7, 9))
