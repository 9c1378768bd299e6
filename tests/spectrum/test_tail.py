"""The three fits: exact spectra, invariances, totality, and agreement with the packages they stand
in for."""

import contextlib
import io
import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zetaclip.spectrum import METHODS, eigenvalues, fit_tail
from zetaclip.spectrum.fits import _closest, _distances

FITS = pytest.mark.parametrize("method", METHODS)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heavy(rows, cols, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scale = (torch.rand(rows, generator=generator) + 1e-3) ** -0.5
    return torch.randn(rows, cols, generator=generator) / cols**0.5 * scale[:, None]


def pareto(zeta, n=512):
    """The quantiles of a power law: its fitted exponent is known."""
    return (np.arange(1, n + 1) / n) ** (-1.0 / (zeta - 1.0))


@pytest.mark.parametrize("zeta", [1.5, 2.0, 3.0, 4.0, 6.0])
def test_exact_power_law_is_recovered(zeta):
    fit = fit_tail(pareto(zeta), "rank")
    assert fit.ok and not fit.weak
    assert (
        abs(fit.zeta - zeta) < 1e-9
    )  # points on a straight line: nothing to disturb the median slope
    assert abs(fit_tail(pareto(zeta), "hill", k=128).zeta - zeta) < 0.3
    # the KS scan is a likelihood fit whose λ_min may be any: it errs by a few of its own standard
    # errors
    fit = fit_tail(pareto(zeta), "ks")
    assert abs(fit.zeta - zeta) < 0.3


@FITS
def test_sampled_power_law_is_recovered_within_its_error(method):
    rng = np.random.default_rng(5)
    errors = []
    for _ in range(60):
        fit = fit_tail(rng.pareto(2.0, 400) + 1.0, method)
        errors.append((fit.zeta - 3.0) / fit.stderr)
    # the mean of 60 errors in units of the stated error has a spread of 0.13 if the statement is
    # right
    assert abs(np.mean(errors)) < (1.0 if method == "ks" else 0.5)
    if method == "ks":  # λ_min moves about as well, so the stated error is too small there
        assert 0.7 < np.std(errors) < 2.5
    else:
        assert 0.7 < np.std(errors) < 1.4


@FITS
def test_a_different_exponent_gives_a_different_answer(method):
    """Power: a fit that ignored its input would pass every test of invariance."""
    found = [fit_tail(pareto(zeta), method).zeta for zeta in (2.0, 3.0, 4.0)]
    assert found[0] + 0.5 < found[1] and found[1] + 0.5 < found[2]


@FITS
def test_scale_permutation_and_transpose_change_nothing(method):
    weight = heavy(60, 90).double()
    expected = fit_tail(eigenvalues(weight), method)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    columns = torch.randperm(90, generator=torch.Generator().manual_seed(2))
    for other in (weight * 1e-4, weight * 321.0, weight.T, weight[order], weight[:, columns]):
        fit = fit_tail(eigenvalues(other), method)
        assert math.isclose(fit.zeta, expected.zeta, rel_tol=1e-9)
        assert (fit.n_tail, fit.ok, fit.weak) == (expected.n_tail, expected.ok, expected.weak)
    assert math.isclose(
        fit_tail(eigenvalues(weight * 10.0), method).lambda_min, 100 * expected.lambda_min
    )
    shuffled = np.random.default_rng(0).permutation(eigenvalues(weight).numpy())
    assert fit_tail(shuffled, method) == expected


def test_rank_is_the_median_of_pairwise_slopes():
    values = np.array([9.0, 7.5, 4.0, 3.5, 2.0, 1.1, 1.05, 1.0])
    k = 5
    slopes = []
    for i in range(k):
        for j in range(i + 1, k):
            rise = math.log((j + 1) / 8) - math.log((i + 1) / 8)
            slopes.append(-rise / (math.log(values[j]) - math.log(values[i])))
    fit = fit_tail(values, "rank", k=k)
    assert math.isclose(fit.zeta, 1.0 + float(np.median(slopes)), rel_tol=1e-12)
    assert (
        fit.n_tail == 5
        and math.isclose(fit.lambda_min, 2.0)
        and math.isclose(fit.stderr, 1.2 * (fit.zeta - 1) / math.sqrt(5))
    )


def test_rank_shrugs_off_an_outlier_that_moves_least_squares():
    spectrum = pareto(3.0, 200)
    spectrum[0] *= 1e4
    tail = np.log(spectrum[:100])
    least_squares = 1.0 - np.polyfit(tail, np.log(np.arange(1, 101) / 200), 1)[0]
    assert abs(fit_tail(spectrum, "rank").zeta - 3.0) < 0.02
    assert abs(least_squares - 3.0) > 0.1


def test_hill_is_its_formula():
    values = np.array([12.0, 8.0, 5.0, 4.0, 3.0, 2.5, 2.0])
    expected = 1.0 + 4 / sum(math.log(v / 3.0) for v in values[:4])
    fit = fit_tail(values, "hill", k=4)
    assert math.isclose(fit.zeta, expected, rel_tol=1e-12)
    assert fit.n_tail == 4 and math.isclose(fit.lambda_min, 3.0)


@pytest.mark.parametrize("seed", range(6))
def test_ks_scan_equals_a_loop_over_candidates(seed):
    """The shortcut by bounds must give what measuring every candidate gives."""
    rng = np.random.default_rng(seed)
    values = np.sort(rng.pareto(rng.uniform(0.5, 8.0), rng.integers(20, 300)) + 1e-3)
    best = (math.inf, 0.0, 0)
    for i in range(len(values) - 1):
        tail = values[i:]
        alpha = 1.0 + len(tail) / np.log(tail / tail[0]).sum()
        model = 1.0 - (tail / tail[0]) ** (1.0 - alpha)
        distance = np.abs(model - np.arange(len(tail)) / len(tail)).max()
        if distance < best[0]:
            best = (distance, alpha, len(tail))
    fit = fit_tail(values, "ks")
    assert math.isclose(fit.ks, best[0], rel_tol=1e-9) and math.isclose(
        fit.zeta, best[1], rel_tol=1e-9
    )
    assert fit.n_tail == best[2]


def test_chunks_of_the_scan_agree(monkeypatch):
    import zetaclip.spectrum.fits as code

    values = np.random.default_rng(1).pareto(2.0, 150) + 1.0
    whole = fit_tail(values, "ks")
    monkeypatch.setattr(code, "_CHUNK", 100)
    assert fit_tail(values, "ks") == whole


def test_the_bound_is_a_bound():
    logs = np.sort(np.log(np.random.default_rng(2).pareto(1.5, 100) + 1.0))
    slopes = np.random.default_rng(3).uniform(0.5, 5.0, 99)
    every = np.arange(99)
    exact, bound = _distances(logs, slopes, every, 1), _distances(logs, slopes, every, 16)
    assert (bound <= exact + 1e-15).all() and (bound < exact).any()
    assert _closest(logs, slopes, every) == int(np.argmin(exact))


def weightwatcher_alpha(weight):
    watcher = pytest.importorskip("weightwatcher")
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return watcher.WeightWatcher(model=torch.nn.Sequential(layer)).analyze().iloc[0]
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "shape", [(8, 40), (12, 64), (19, 30), (20, 30), (32, 512), (120, 100), (300, 300)]
)
@pytest.mark.parametrize("make", [gaussian, heavy])
def test_ks_is_weightwatchers_alpha(shape, make):
    weight = make(*shape, seed=sum(shape))
    theirs = weightwatcher_alpha(weight)
    ours = fit_tail(eigenvalues(weight), "ks")
    assert math.isclose(ours.zeta, theirs.alpha, rel_tol=1e-6)
    assert math.isclose(ours.ks, theirs.D, rel_tol=1e-6)
    assert math.isclose(ours.lambda_min, theirs.xmin, rel_tol=1e-6)
    assert math.isclose(ours.stderr, theirs.sigma, rel_tol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(12))
def test_small_spectra_follow_weightwatchers_own_rule(seed):
    """Below 20 eigenvalues its fit is another one, with a shortest tail."""
    weight = gaussian(17, 17, seed=seed)
    ours = fit_tail(eigenvalues(weight), "ks")
    assert (
        math.isclose(ours.zeta, weightwatcher_alpha(weight).alpha, rel_tol=1e-6)
        and ours.n_tail >= 8
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(4))
def test_ks_is_powerlaws_likelihood_at_the_same_cutoff(seed):
    powerlaw = pytest.importorskip("powerlaw")
    values = eigenvalues(heavy(64, 100, seed=seed)).numpy()
    ours = fit_tail(values, "ks")
    # a hair below the cutoff, because the package compares in its own arithmetic
    theirs = powerlaw.Fit(values, xmin=ours.lambda_min * (1 - 1e-12), verbose=False)
    assert math.isclose(ours.zeta, theirs.power_law.alpha, rel_tol=1e-6)
    shifted = powerlaw.Fit(values, xmin=ours.lambda_min * 1.3, verbose=False)
    assert not math.isclose(ours.zeta, shifted.power_law.alpha, rel_tol=1e-3)


DEGENERATE = {
    "zero": torch.zeros(20, 20),
    "rank one": torch.ones(30, 10),
    "identity": torch.eye(16),
    "orthogonal": torch.linalg.qr(gaussian(64, 64)).Q,
    "rank three": gaussian(40, 3) @ gaussian(3, 40, seed=1),
    "nan": torch.full((8, 8), math.nan),
    "one nan": torch.cat([gaussian(7, 8), torch.full((1, 8), math.nan)]),
    "inf": torch.full((8, 8), math.inf),
    "1x1": gaussian(1, 1),
    "one row": gaussian(1, 50),
    "three rows": gaussian(3, 50),
    "empty": torch.empty(0, 5),
}


@FITS
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_matrices_fail_politely(name, method):
    fit = fit_tail(eigenvalues(DEGENERATE[name]), method)
    assert not fit.ok and not fit.weak and fit.reason
    assert not any(math.isnan(value) for value in (fit.zeta, fit.lambda_min, fit.ks, fit.stderr))


@FITS
def test_four_distinct_eigenvalues_are_enough_and_three_are_not(method):
    # λ_min of "hill" lies below its tail, so it needs one more
    spare = [0.5] if method == "hill" else []
    four = fit_tail([8.0, 4.0, 2.0, 1.0, *spare], method, k=4)
    assert four.ok and four.weak and "eigenvalues" in four.reason
    three = fit_tail([8.0, 4.0, 1.0, 1.0, *spare], method, k=4)
    assert not three.ok and "distinct" in three.reason


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.floats(allow_nan=True, allow_infinity=True)
        | st.sampled_from([0.0, 1.0, 1.0, 1e-300, 1e300, -1.0]),
        max_size=30,
    ),
    st.sampled_from(METHODS),
    st.none() | st.integers(1, 40),
)
def test_fits_are_total(values, method, k):
    fit = fit_tail(values, method, k)
    assert not any(math.isnan(value) for value in (fit.zeta, fit.lambda_min, fit.ks, fit.stderr))
    if fit.ok:
        assert math.isfinite(fit.zeta) and fit.zeta > 1.0 and fit.n_tail >= 4
    else:
        assert fit.reason and not fit.weak


def test_a_fit_is_weak_when_short_or_when_noise_reads_the_same():
    assert fit_tail(pareto(3.0, 49), "rank").weak
    assert not fit_tail(pareto(3.0, 50), "rank").weak
    noise = eigenvalues(gaussian(64, 200))
    assert not fit_tail(noise, "rank").weak  # without a shape nobody can know
    fit = fit_tail(noise, "rank", shape=(64, 200))
    assert fit.ok and fit.weak and "random" in fit.reason
    structured = fit_tail(eigenvalues(heavy(64, 200)), "rank", shape=(64, 200))
    assert structured.ok and not structured.weak and structured.reason == ""


def test_wrong_arguments():
    with pytest.raises(ValueError, match="unknown fit"):
        fit_tail([1.0, 2.0], "median")
    with pytest.raises(ValueError, match="at least 1"):
        fit_tail([1.0, 2.0], "rank", k=0)


def test_a_long_tail_is_thinned_without_losing_the_slope():
    assert abs(fit_tail(pareto(2.7, 6000), "rank").zeta - 2.7) < 1e-9
