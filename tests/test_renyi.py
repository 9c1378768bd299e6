"""The Rényi divergence of one step against its definition and against Opacus's analysis."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from opacus.accountants.analysis.rdp import compute_rdp
from scipy.integrate import quad

from zetaclip.accounting._renyi import divergence

SETTINGS = list(itertools.product([1e-4, 0.01, 0.2, 0.9], [0.5, 1.0, 4.0]))


def integrated(q: float, sigma: float, order: float) -> float:
    """1 / (α - 1) ln E_Q (P / Q)^α, P the mixture and Q the Gaussian, by quadrature."""

    def ratio(x: float) -> float:
        return 1 - q + q * math.exp((2 * x - 1) / (2 * sigma**2))

    def value(x: float) -> float:
        density = math.exp(-((x / sigma) ** 2) / 2) / (sigma * math.sqrt(2 * math.pi))
        return density * ratio(x) ** order

    centres = [0.0, order / 2, float(order)]  # the weight lies between
    total, _ = quad(
        value, -12 * sigma, order + 12 * sigma, points=centres, limit=500, epsabs=0, epsrel=1e-12
    )
    return math.log(total) / (order - 1)


@pytest.mark.parametrize("order", [1.5, 2.0, 3.3, 7.0])
@pytest.mark.parametrize(("q", "sigma"), SETTINGS)
def test_the_definition(q: float, sigma: float, order: float) -> None:
    expected = integrated(q, sigma, order)
    assert divergence(q, sigma, order) == pytest.approx(expected, rel=1e-6, abs=1e-11)
    if expected > 1e-6:  # a comparison that would notice a neighbouring order
        assert integrated(q, sigma, order + 0.01) != pytest.approx(expected, rel=1e-6, abs=1e-11)


@pytest.mark.parametrize("order", [1.001, 1.05, 1.9, 2.7, 9.9, 10.9, 12.0, 63.0, 320.0, 1020.0])
@pytest.mark.parametrize(
    ("q", "sigma"), [*SETTINGS, (1e-7, 1.0), (0.001, 0.1), (0.05, 30.0), (0.999, 1000.0), (1.0, 2)]
)
def test_opacus(q: float, sigma: float, order: float) -> None:
    with np.errstate(all="ignore"):
        expected = compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=[order])[0]
    # Both add up numbers near 1 and take a logarithm, which leaves some 1e-15 of rounding.
    rounding = 1e-13 / (order - 1)
    assert divergence(q, sigma, order) == pytest.approx(expected, rel=1e-9, abs=rounding)


@pytest.mark.parametrize("order", [1.1, 2.0, 10.9, 1020.0])
@pytest.mark.parametrize("sigma", [1e-170, 1e-154, 1e-140, 1e200])
def test_noise_beyond_float64_comes_to_an_end(sigma: float, order: float) -> None:
    with np.errstate(all="ignore"):
        found = divergence(0.01, sigma, order)
    assert found == math.inf or (found > 1e100) == (sigma < 1)


@pytest.mark.parametrize(("q", "sigma", "order"), [(0.3, 100.0, 100.5), (0.2, 50.0, 200.5)])
def test_a_series_does_not_end_before_its_largest_term(
    q: float, sigma: float, order: float
) -> None:
    """The divergence rises with the order."""
    below, above = divergence(q, sigma, order - 0.5), divergence(q, sigma, order + 0.5)
    assert below < divergence(q, sigma, order) < above


def test_a_divergence_far_below_the_rounding_of_one() -> None:
    """α q² (e^(1 / σ²) - 1) / 2 is its first term, and the rest is smaller by q."""
    expected = 12 * 1e-18 * math.expm1(1.0) / 2
    assert divergence(1e-9, 1.0, 12.0) == pytest.approx(expected, rel=1e-6)
    assert divergence(1e-9, 1.0, 1.5) >= 0


def test_an_order_whose_coefficients_overflow_proves_nothing() -> None:
    assert divergence(0.01, 1.0, 1100.0) == divergence(0.01, 1.0, 1e9) == math.inf
    assert divergence(0.01, 1.0, 1000.0) < math.inf
