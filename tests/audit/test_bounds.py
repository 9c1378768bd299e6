"""The bounds behind an audit, held against libraries, and against mechanisms of known ε."""

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.stats import binomtest

from zetaclip.audit import f_dp, gaussian, gaussian_epsilon, one_run, two_data_sets
from zetaclip.audit._bounds import _gaussian_rules_out, best_of_guesses, correct_guesses


@pytest.mark.parametrize("mu", [0.1, 0.5, 1.0, 2.5])
def test_epsilon_of_gaussian_dp_is_dp_accountings(mu):
    law = privacy_loss_distribution.from_gaussian_mechanism(1 / mu)
    assert gaussian_epsilon(mu, 1e-5) == pytest.approx(law.get_epsilon_for_delta(1e-5), rel=1e-3)


def test_no_mu_no_epsilon():
    assert gaussian_epsilon(0.0, 1e-5) == gaussian_epsilon(-1.0, 1e-5) == 0.0


@pytest.mark.parametrize(("correct", "guesses"), [(95, 100), (60, 80), (700, 1000)])
def test_without_delta_one_run_is_an_exact_binomial_test(correct, guesses):
    lowest = binomtest(correct, guesses, alternative="greater").proportion_ci(0.95, "exact").low
    expected = math.log(lowest / (1 - lowest))
    assert one_run(correct, guesses, 1000, 0.0) == pytest.approx(expected, abs=1e-4)


def test_delta_makes_the_bound_smaller_and_many_canaries_make_delta_dearer():
    exact, small, large = (one_run(100, 100, 1000, delta) for delta in (0.0, 1e-5, 1e-4))
    assert exact > small > large > 0
    assert one_run(100, 100, 100, 1e-4) > one_run(100, 100, 10_000, 1e-4)


def test_guesses_no_better_than_coins_show_nothing():
    assert one_run(50, 100, 1000, 1e-5) == gaussian(500, 1000, 1e-5) == 0.0


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="5 right of 4 guesses"):
        one_run(5, 4, 10, 1e-5)


def test_the_boldest_guesses_are_counted():
    scores = np.array([3.0, -2.0, 0.1, 5.0, -9.0, 0.2])
    included = np.array([True, False, True, False, False, False])
    # Two guesses: 5.0 is said to be in (wrong), -9.0 out (right).
    assert correct_guesses(scores, included, 2) == 1
    # All six: -9.0 and -2.0 out and 3.0 in are right; 0.1 out, 0.2 in and 5.0 in are wrong.
    assert correct_guesses(scores, included, 6) == 3


def answers(epsilon, rng, runs=1000, canaries=400):
    """Randomised response: (ε, 0)-DP, and the best that such a mechanism can do."""
    p = 1 / (1 + math.exp(-epsilon))
    for _ in range(runs):
        included = rng.integers(0, 2, canaries) == 1
        told = included ^ (rng.random(canaries) > p)
        yield told + 1e-9 * rng.normal(size=canaries), included


def test_one_run_holds_as_often_as_it_says_and_not_for_a_smaller_epsilon():
    rng = np.random.default_rng(1)
    found = np.array([best_of_guesses(s, i, 1e-9, 0.95)[0] for s, i in answers(1.0, rng, 200)])
    assert (found <= 1.0).mean() >= 0.95
    assert (found <= 0.5).mean() < 0.05  # the bound has power: half of ε is nearly always found


def gaussian_scores(mu, rng, canaries=1000):
    included = rng.integers(0, 2, canaries) == 1
    return rng.normal(size=canaries) + mu * included, included


def test_the_gaussian_bound_holds_as_often_as_it_says_and_is_tight():
    rng = np.random.default_rng(2)
    mu = 1.666  # ε = 8 at δ = 1e-5
    found = []
    for _ in range(200):
        scores, included = gaussian_scores(mu, rng)
        found.append(gaussian(correct_guesses(scores, included, 1000), 1000, 1e-5, 0.95))
    found = np.array(found)
    assert (found <= gaussian_epsilon(mu, 1e-5)).mean() >= 0.93  # 0.95 in the mean of many
    assert np.median(found) > 0.8 * 8


@pytest.mark.parametrize("normal", [False, True])
def test_two_data_sets_hold_as_often_as_they_say(normal):
    rng = np.random.default_rng(3)
    true = gaussian_epsilon(1.0, 1e-5)
    found = np.array(
        [
            two_data_sets(rng.normal(size=400), rng.normal(size=400) + 1, 1e-5, 0.9, normal)
            for _ in range(200)
        ]
    )
    assert (found <= true).mean() >= 0.9
    assert np.median(found) > (0.5 if normal else 0.1) * true


def test_two_data_sets_find_either_direction():
    rng = np.random.default_rng(4)
    low, high = rng.normal(size=400), rng.normal(size=400) + 3
    assert two_data_sets(low, high, 1e-5) > 1
    assert two_data_sets(high, low, 1e-5) > 1


def test_the_threshold_is_chosen_by_runs_that_are_not_counted():
    """With a threshold chosen on the counted runs, equal data sets would show an ε too often."""
    rng = np.random.default_rng(5)
    found = [two_data_sets(rng.normal(size=60), rng.normal(size=60), 0.0, 0.9) for _ in range(300)]
    assert np.mean(np.array(found) > 0) < 0.1


def test_mu_of_the_error_rates_is_that_of_the_normal_law():
    rng = np.random.default_rng(6)
    scores = rng.normal(size=200_000), rng.normal(size=200_000) + 1.2
    found = two_data_sets(*scores, 1e-5, 0.5, True)
    assert found == pytest.approx(gaussian_epsilon(1.2, 1e-5), rel=0.05)


@pytest.mark.parametrize(
    ("correct", "guesses", "canaries", "confidence", "by_f_dp", "by_one_run"),
    [
        (803, 1000, 1000, 0.99, 1.878920, 1.218849),
        (650, 1000, 1000, 0.99, 0.745252, 0.462781),
        (95, 100, 1000, 0.99, 2.709681, 1.917159),
        (100, 100, 1000, 0.99, 4.463940, 2.989193),
        (180, 200, 1000, 0.95, 2.901243, 1.796285),
        (40, 40, 400, 0.95, 4.075418, 2.542457),
        (15, 20, 50, 0.90, 0.616476, 0.343386),
    ],
)
def test_both_bounds_of_one_run_are_those_of_jax_privacy(
    correct, guesses, canaries, confidence, by_f_dp, by_one_run
):
    """The figures come from jax_privacy 2.0.0, `auditing._epsilon_one_run_fdp` and
    `_epsilon_one_run`, at δ = 1e-5."""
    counts = (correct, guesses, canaries, 1e-5, confidence)
    assert f_dp(*counts) == pytest.approx(by_f_dp, abs=2e-5)
    assert one_run(*counts) == pytest.approx(by_one_run, abs=2e-5)


def largest_tail(mu, correct, guesses, canaries):
    """The largest probability of so many right guesses that μ-GDP allows, by linear programs.

    The unknowns are the probabilities of 0, 1, ... right guesses. Each inequality of the f-DP
    argument, h >= Φ(Φ^-1(r) - μ) with a convex right side, is approached by its tangents.
    """
    from scipy.optimize import linprog
    from scipy.stats import norm

    counts = np.arange(guesses + 1)
    right = [np.where(counts >= k, counts, 0) / canaries for k in range(guesses + 1)]
    wrong = [np.where(counts >= k, guesses - counts, 0) / canaries for k in range(guesses + 1)]
    # Slopes and heights of tangents at many points of (0, 1).
    at = norm.cdf(np.linspace(-6, 6, 1500))
    value = norm.cdf(norm.ppf(at) - mu)
    slope = np.exp(mu * norm.ppf(at) - mu**2 / 2)
    rows, limits = [], []
    for k in range(1, guesses + 1):
        for a, v, s in zip(at, value, slope, strict=True):
            rows.append(s * right[k] - wrong[k - 1])
            limits.append(s * a - v)
    aim = -np.where(counts >= correct, 1.0, 0.0)
    found = linprog(aim, np.array(rows), limits, np.ones((1, guesses + 1)), [1.0], method="highs")
    assert found.status == 0
    return -found.fun


@pytest.mark.parametrize(("mu", "correct", "guesses", "canaries"), [
    (0.5, 6, 6, 6), (1.0, 5, 6, 10), (1.5, 8, 8, 20), (0.0, 7, 8, 8),
])  # fmt: skip
def test_the_f_dp_recursion_solves_the_program_behind_it(mu, correct, guesses, canaries):
    """It rules a probability out just above the largest one that the inequalities allow."""
    most = largest_tail(mu, correct, guesses, canaries)
    assert 0 < most < 1
    assert not _gaussian_rules_out(mu, correct, guesses, canaries, 0.98 * most)
    assert _gaussian_rules_out(mu, correct, guesses, canaries, 1.02 * most)


@pytest.mark.parametrize("spoiled", [0.0, 0.5])
def test_the_f_dp_bound_holds_as_often_as_it_says_and_has_power(spoiled):
    """Also where a common coin spoils all scores of a run, so that guesses hang together."""
    rng, mu = np.random.default_rng(9), 1.0
    true, found = gaussian_epsilon(mu, 1e-5), []
    for _ in range(200):
        scores, included = gaussian_scores(mu, rng, 400)
        if rng.random() < spoiled:
            scores = rng.normal(size=400)
        found.append(best_of_guesses(scores, included, 1e-5, 0.95, f_dp)[0])
    assert (np.array(found) <= true).mean() >= 0.95
    assert np.quantile(found, 0.9) > 0.2 * true
    by_one_run = [best_of_guesses(*gaussian_scores(mu, rng, 400), 1e-5, 0.95)[0] for _ in found]
    assert np.quantile(found, 0.9) > np.quantile(by_one_run, 0.9)
