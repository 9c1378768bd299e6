"""What paired differences prove: against scipy and statsmodels, and against known truths."""

import math

import numpy as np
import pytest
from scipy import stats

from zetaclip.experiments import evidence
from zetaclip.experiments.evidence import Rules

LOOKS = (5, 10, 20)


@pytest.mark.parametrize("count", [3, 5, 20])
@pytest.mark.parametrize("bound", [-0.2, 0.0, 0.3])
def test_one_look_is_students_test(count, bound):
    pairs = np.random.default_rng(count).normal(0.1, 0.3, count)
    reference = stats.ttest_1samp(pairs, bound, alternative="less")
    assert evidence.p_below(pairs, bound, Rules((count,), 0.2)) == pytest.approx(reference.pvalue)
    low, high = evidence.interval(pairs, Rules((count,), 0.2))
    told = stats.ttest_1samp(pairs, 0.0).confidence_interval(0.95)
    assert (low, high) == pytest.approx((told.low, told.high))


def test_equivalence_is_two_one_sided_tests():
    weightstats = pytest.importorskip("statsmodels.stats.weightstats")
    generator = np.random.default_rng(1)
    for spread in (0.05, 0.3):
        ours, base = generator.normal(0.05, spread, 10), generator.normal(0, spread, 10)
        expected = weightstats.ttost_paired(ours, base, -0.2, 0.2)[0]
        found = evidence.p_values(list(ours - base), Rules((10,), 0.2))
        assert found[evidence.EQUIVALENT] == pytest.approx(expected)


def test_holm_is_statsmodels():
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    generator = np.random.default_rng(2)
    for _ in range(50):
        p = dict(enumerate(generator.uniform(0, 1, 12) ** 4))
        expected = multitest.multipletests(list(p.values()), 0.05, "holm")[0]
        assert evidence.holm(p) == {key for key in p if expected[key]}


def test_holm_by_hand():
    assert evidence.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == {"a"}  # 0.03 > 0.05 / 2
    assert evidence.holm({"a": 0.01, "b": 0.02, "c": 0.05}) == {"a", "b", "c"}
    assert evidence.holm({}) == set()


def test_the_shares_of_the_looks():
    shares = Rules(LOOKS, 0.2).shares
    spent = [math.log(1 + (math.e - 1) * t) for t in (0.25, 0.5, 1.0)]  # Lan and DeMets, Pocock
    assert np.cumsum(shares) == pytest.approx(spent) and sum(shares) == pytest.approx(1)
    assert Rules((5,), 0.5).shares == (1.0,)
    rules = Rules(LOOKS, 0.2)
    pairs = list(np.random.default_rng(0).normal(0, 1, 20))
    # between two looks nothing new is said, and after the last neither
    assert evidence.p_values(pairs[:9], rules) == evidence.p_values(pairs[:5], rules)
    assert evidence.p_values([*pairs, 9.0], rules) == evidence.p_values(pairs, rules)
    assert evidence.interval(pairs[:4], rules) is None
    assert set(evidence.p_values(pairs[:4], rules).values()) == {1.0}


def sequential(generator, mean, spread, rules, trials, shares=None):
    """How often each word is said by someone who stops at the first look that tells anything."""
    said = dict.fromkeys([*evidence.WORDS, evidence.OPEN], 0)
    for _ in range(trials):
        pairs = generator.normal(mean, spread, rules.looks[-1])
        for look in rules.looks:
            if shares is None:
                p = evidence.p_values(pairs[:look], rules)
            else:  # every look as if it were the only one
                p = evidence.p_values(pairs[:look], Rules((look,), rules.effect))
            word = evidence.word(p)
            if word != evidence.OPEN:
                break
        said[word] += 1
    return {word: count / trials for word, count in said.items()}


@pytest.mark.parametrize("mean", [0.2, -0.2])
def test_errors_of_sequential_looks_hold_at_the_smallest_effect(mean):
    """The true difference is the smallest effect itself: neither better nor equivalent is true."""
    trials, rules = 1500, Rules(LOOKS, 0.2)
    said = sequential(np.random.default_rng(7), mean, 0.25, rules, trials)
    slack = 3 * math.sqrt(0.025 * 0.975 / trials)
    wrong = evidence.BETTER if mean > 0 else evidence.WORSE
    assert said[wrong] <= 0.025 + slack and said[evidence.EQUIVALENT] <= 0.025 + slack
    # The same looks without shares break the promise, so the test can fail.
    naive = sequential(np.random.default_rng(7), mean, 0.25, rules, trials, shares="none")
    assert naive[wrong] + naive[evidence.EQUIVALENT] > 0.05 + 2 * slack


def test_the_truth_is_found():
    rules = Rules(LOOKS, 0.2)
    for mean, word in ((0.6, "better"), (-0.6, "worse"), (0.0, "equivalent")):
        said = sequential(np.random.default_rng(3), mean, 0.15, rules, 200)
        assert said[word] > 0.95, (mean, said)
    # A small gain, far below the published one, with much noise: only that can be said.
    generator = np.random.default_rng(4)
    found = [
        evidence.word(evidence.p_values(generator.normal(0.1, 0.5, 20), rules, 1.0))
        for _ in range(200)
    ]
    assert found.count(evidence.EXCLUDED) > 180


def test_the_interval_over_looks_covers_as_often_as_it_says():
    generator, rules, inside, naive = np.random.default_rng(5), Rules(LOOKS, 0.2), 0, 0
    for _ in range(1500):
        pairs = generator.normal(0.1, 1.0, 20)
        low, high = evidence.interval(pairs, rules)
        inside += low <= 0.1 <= high
        ends = [evidence.interval(pairs[:n], Rules((n,), 0.2)) for n in LOOKS]
        naive += all(low <= 0.1 <= high for low, high in ends)
    assert inside / 1500 > 0.95 - 3 * math.sqrt(0.05 * 0.95 / 1500)
    assert naive / 1500 < 0.93


def test_a_training_that_failed_late_widens_the_interval():
    """The common part of the looks would leave out the mean beside which it is printed."""
    rules = Rules((5, 10), 0.2)
    pairs = [0.1, -0.1, 0.2, 0.0, -0.2, 0.1, -70.0, 0.0, 0.2, -0.1]
    share = rules.shares[1]
    told = stats.ttest_1samp(pairs, 0.0).confidence_interval(1 - 0.05 * share)
    assert evidence.interval(pairs, rules) == pytest.approx((told.low, told.high))
    calm = [*pairs[:6], 0.1, *pairs[7:]]
    low, high = evidence.interval(calm, rules)
    assert -0.3 < low < np.mean(calm) < high < 0.3


def test_differences_between_looks_wait_for_the_next_one():
    rules = Rules((5, 10), 0.2)
    pairs = [float(n) for n in range(12)]
    kept = {count: len(evidence.counted(pairs[:count], rules)) for count in (0, 3, 5, 7, 10, 12)}
    assert kept == {0: 0, 3: 3, 5: 5, 7: 5, 10: 10, 12: 10}


def test_splits_that_share_records_widen_the_error():
    """Nadeau and Bengio: s² (1/n + test/train) in place of s²/n."""
    pairs = np.random.default_rng(6).normal(0.0, 0.01, 20)
    low, high = evidence.interval(pairs, Rules((20,), 0.002, overlap=0.25))
    half = stats.t.ppf(0.975, 19) * np.std(pairs, ddof=1) * math.sqrt(1 / 20 + 0.25)
    assert (high - low) / 2 == pytest.approx(half)


def test_no_spread_proves_what_it_says():
    rules = Rules((5,), 0.2)
    same = evidence.p_values([0.0] * 5, rules, 1.0)
    assert evidence.word(same) == "equivalent" and same["better"] == same["worse"] == 1
    assert evidence.word(evidence.p_values([0.3] * 5, rules)) == "better"
    assert evidence.interval([0.1] * 5, rules) == (0.1, 0.1)


def test_equal_differences_spread_by_one_step_of_what_is_measured():
    """Four more right answers of 10,000 in each of five seeds are no proof without error."""
    rules = Rules((5,), 0.02, step=0.01)
    told = stats.t.sf((0.04 - 0.02) / (0.01 / math.sqrt(5)), 4)
    assert evidence.p_values([0.04] * 5, rules)["better"] == pytest.approx(told)
    low, _ = evidence.interval([0.04] * 5, rules)
    assert low == pytest.approx(0.04 - stats.t.ppf(0.975, 4) * 0.01 / math.sqrt(5))
    assert evidence.interval([0.0] * 5, rules) == (0.0, 0.0)  # the same training
    wide = [0.0, 0.1, -0.1, 0.2, 0.05]
    assert evidence.interval(wide, rules) == evidence.interval(wide, Rules((5,), 0.02))


def test_what_is_published_matters_only_if_it_is_a_gain():
    pairs = [0.0, 0.6, 0.1, 0.5, 0.3]
    rules = Rules((5,), 0.2)
    assert evidence.EXCLUDED not in evidence.p_values(pairs, rules, -0.5)
    assert evidence.EXCLUDED not in evidence.p_values(pairs, rules, None)
    assert evidence.word(evidence.p_values(pairs, rules, 5.0)) == evidence.EXCLUDED


def test_against_many_rivals():
    """Better than all is as hard as the hardest; worse than some is corrected for their number."""
    rivals = [
        {"better": 0.001, "worse": 1.0, "equivalent": 1.0, evidence.EXCLUDED: 0.5},
        {"better": 0.2, "worse": 0.01, "equivalent": 0.3, evidence.EXCLUDED: 0.02},
    ]
    found = evidence.best_of(rivals)
    assert found == {"better": 0.2, "equivalent": 1.0, "worse": 0.02, evidence.EXCLUDED: 0.04}
    # Under the truth that all of eight rivals are alike, "worse than one" is seldom said.
    generator, rules, wrong, naive = np.random.default_rng(9), Rules((10,), 0.2), 0, 0
    for _ in range(400):
        many = [evidence.p_values(list(generator.normal(-0.2, 0.3, 10)), rules) for _ in range(8)]
        wrong += evidence.best_of(many)["worse"] <= evidence.ONE_SIDED
        naive += min(p["worse"] for p in many) <= evidence.ONE_SIDED
    assert wrong / 400 < 0.025 + 3 * math.sqrt(0.025 * 0.975 / 400) and naive / 400 > 0.1
