"""Our privacy loss distributions against dp-accounting's, a closed form and exact convolutions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from zetaclip.accounting._composed import closed_form
from zetaclip.accounting._pld import _one_step, pld
from zetaclip.ledger import Event


def theirs(events: list[Event], delta: float, interval: float, pessimistic: bool = True) -> float:
    from dp_accounting.pld import privacy_loss_distribution as distributions

    whole = distributions.identity(
        value_discretization_interval=interval, pessimistic_estimate=pessimistic
    )
    for event in events:
        one = distributions.from_gaussian_mechanism(
            standard_deviation=event.noise_multiplier,
            sampling_prob=event.sample_rate,
            value_discretization_interval=interval,
            pessimistic_estimate=pessimistic,
            use_connect_dots=pessimistic,
        )
        whole = whole.compose(one.self_compose(event.count))
    return float(whole.get_epsilon_for_delta(delta))


SETTINGS = [
    ([Event(q, sigma, count)], interval)
    for q in (1e-4, 0.004, 0.08, 0.5, 0.99)
    for sigma, count, interval in (
        (0.5, 40, 2e-2), (1.1, 1, 1e-3), (1.1, 300, 1e-3), (4.0, 2000, 1e-3),
    )
] + [
    ([Event(0.01, 0.7, 100), Event(0.02, 1.5, 51), Event(0.3, 4.0, 33)], 1e-3),
    ([Event(0.01, 1.1, 500), Event(1.0, 5.0, 1)], 1e-3),
    ([Event(0.02, 0.3, 500)], 0.05),
]  # fmt: skip


@pytest.mark.parametrize(("events", "interval"), SETTINGS)
def test_on_the_same_grid_it_is_dp_accounting(events: list[Event], interval: float) -> None:
    """To seven digits at δ = 1e-5. What is left comes from the tails that both cut off."""
    expected = theirs(events, 1e-5, interval)
    assert pld(events, 1e-5, interval) == pytest.approx(expected, rel=1e-7, abs=1e-9)


@pytest.mark.parametrize(
    "events",
    [
        [Event(0.004, 0.7, 200)],
        [Event(0.08, 2.3, 366)],
        [Event(0.5, 5.0, 40), Event(0.01, 0.8, 100)],
    ],
)
def test_a_coarse_grid_costs_and_never_saves(events: list[Event]) -> None:
    """dp-accounting's lower bound on a fine grid lies below all of ours, which fall with the
    width."""
    least = theirs(events, 1e-6, 1e-4, pessimistic=False)
    found = [pld(events, 1e-6, interval) for interval in (1e-3, 1e-2, 1e-1)]
    assert least < found[0] < found[1] < found[2]
    assert found[0] < 1.02 * least


@pytest.mark.parametrize(("sigma", "count"), [(1.0, 1), (20.0, 1000), (2.0, 7), (0.5, 2000)])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-9])
def test_without_sampling_it_is_the_closed_form(sigma: float, count: int, delta: float) -> None:
    """Also for an ε of thousands, whose exponential is no number."""
    exact = closed_form([Event(1.0, sigma / math.sqrt(count), 1)], delta)
    assert exact is not None
    found = pld([Event(1.0, sigma, count)], delta, exact / 2e3 / math.sqrt(count))
    assert exact <= found < 1.0005 * exact


@pytest.mark.parametrize("adding", [False, True])
@pytest.mark.parametrize(("q", "sigma"), [(1e-4, 0.5), (0.01, 1.1), (0.6, 3.0), (1.0, 2.0)])
def test_one_step_keeps_both_probabilities(q: float, sigma: float, adding: bool) -> None:
    """The masses are those of one neighbour; weighted by exp(-loss), those of the other."""
    interval = 1e-3
    losses = _one_step(Event(q, sigma, 1), interval, adding)
    values = interval * (losses.first + np.arange(len(losses.masses)))
    assert (losses.masses >= 0).all() and 0 <= losses.infinite < 1e-20
    assert losses.masses.sum() == pytest.approx(1, abs=1e-12)
    assert losses.masses @ np.exp(-values) == pytest.approx(1, abs=1e-11)


def test_transforms_agree_with_exact_convolutions() -> None:
    """Twelve steps of two kinds, convolved one by one in extended precision, and δ from its sum."""
    interval, events = 0.02, [Event(0.1, 1.0, 8), Event(0.3, 2.0, 4)]
    epsilon = pld(events, 1e-7, interval)
    deltas = []
    for adding in (False, True):
        first, masses = 0, np.ones(1, dtype=np.longdouble)
        for event in events:
            one = _one_step(event, interval, adding)
            for _ in range(event.count):
                first += one.first
                masses = np.convolve(masses, one.masses.astype(np.longdouble))
        values = interval * (first + np.arange(len(masses)))
        deltas.append(float((masses * np.maximum(-np.expm1(epsilon - values), 0)).sum()))
    assert max(deltas) == pytest.approx(1e-7, rel=1e-6)
    assert max(deltas) <= 1e-7


def test_what_is_lost_is_counted() -> None:
    with pytest.raises(ArithmeticError, match="without a bound"):
        pld([Event(0.1, 1.0, 10)], 1e-15, 1e-3)
    assert pld([Event(0.01, 50.0, 1)], 0.1, 1e-3) == 0


def test_epsilon_has_the_same_bits_with_any_number_of_threads():
    """Sums by BLAS hang on how many threads share them, and its threads burn time as they wait."""
    threadpoolctl = pytest.importorskip("threadpoolctl")
    events = [Event(256 / 60000, sigma, 1880) for sigma in (0.6, 0.68, 0.8)]
    found = []
    for threads in (1, 2):
        with threadpoolctl.threadpool_limits(threads):
            found.append([pld([event], 1e-5, 1e-4) for event in events])
    assert found[0] == found[1]
