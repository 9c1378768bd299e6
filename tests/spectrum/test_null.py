"""The random-matrix null: the right law, fixed, and cheap."""

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp

from zetaclip.spectrum import random_null, random_spectrum
from zetaclip.spectrum.null import DRAWS


def direct(shape, rng):
    return np.linalg.svd(rng.standard_normal(shape), compute_uv=False) ** 2


@pytest.mark.parametrize("shape", [(6, 6), (5, 12), (12, 5)])
@pytest.mark.parametrize("index", [0, 2, -1])
def test_spectra_have_the_law_of_gaussian_matrices(shape, index):
    rng = np.random.default_rng(7)
    mine = [random_spectrum(shape, rng)[index] for _ in range(1500)]
    theirs = [direct(shape, rng)[index] for _ in range(1500)]
    assert ks_2samp(mine, theirs).pvalue > 0.01
    # power: one more column, or 10 % more variance, is told apart
    wider = [direct((shape[0], shape[1] + 2), rng)[index] for _ in range(1500)]
    assert ks_2samp(mine, wider).pvalue < 1e-3 or index == -1
    assert ks_2samp(mine, 1.25 * np.array(theirs)).pvalue < 0.01


def test_spectra_are_sorted_and_complete():
    values = random_spectrum((40, 90), np.random.default_rng(0))
    assert values.shape == (40,) and (np.diff(values) <= 0).all() and (values > 0).all()
    # the trace is the sum of 3600 squares: 3600 give or take 85
    assert abs(values.sum() - 3600) < 5 * 85
    assert random_spectrum((1, 9), np.random.default_rng(0)).shape == (1,)
    with pytest.raises(ValueError, match="no spectrum"):
        random_spectrum((0, 9), np.random.default_rng(0))


def test_null_covers_fresh_random_matrices_and_is_repeatable():
    null = random_null((64, 147))
    assert null.ok and null.low < null.median < null.high
    assert random_null((147, 64)) is null  # the transpose, from the cache
    from zetaclip.spectrum import eigenvalues, fit_tail

    generator = torch.Generator().manual_seed(11)
    fresh = [
        fit_tail(eigenvalues(torch.randn(64, 147, generator=generator))).zeta for _ in range(40)
    ]
    inside = sum(null.low <= zeta <= null.high for zeta in fresh)
    # a fresh draw is outside all 32 with probability 2/33, so 40 draws have 2.4 outside, rarely
    # more than 8
    assert inside >= 40 - 8
    assert (
        abs(np.median(fresh) - null.median)
        < 3 * np.std(fresh) * (1 / 40 + 1 / DRAWS) ** 0.5 * 1.2533
    )


def test_the_exponent_of_noise_grows_with_the_aspect_ratio():
    medians = [random_null((32, cols)).median for cols in (32, 64, 256, 1024)]
    assert medians == sorted(medians) and medians[-1] > 2 * medians[0]


def test_shapes_too_small_for_a_fit_have_no_null():
    null = random_null((3, 100))
    assert not null.ok and null.median == 0.0
