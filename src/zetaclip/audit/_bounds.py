"""From guesses to a lower bound of ε.

An auditor tosses a secret coin for each canary: in or out of the training data. An attacker sees
what was released and guesses some of the coins. The better the guesses, the larger ε must be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

# The numbers of guesses that ``one_run`` tries, as shares of the canaries.
SHARES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
# An excess over the claim is reported only at this confidence.
SURE = 0.999
_LARGEST = 100.0  # no audit can find more than this


def correct_guesses(scores: np.ndarray, included: np.ndarray, guesses: int) -> int:
    """How many of the boldest guesses are right.

    The attacker says "in" for the highest half of ``guesses`` scores and "out" for the lowest half.

    Args:
        scores: One for each canary; higher means that it was more likely in the data.
        included: The coins: True where the canary was in.
        guesses: How many canaries to guess, at most all of them.
    """
    order = np.argsort(scores, kind="stable")
    low = guesses // 2
    high = guesses - low
    return int((~included[order[:low]]).sum() + included[order[len(order) - high :]].sum())


def one_run(
    correct: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95
) -> float:
    """The ε that guesses of coins in one training run rule out.

    The bound of Steinke, Nasr and Jagielski (2023), theorem 5.2: if training is (ε, δ)-DP, the
    number of right guesses is hardly larger than that of ``guesses`` independent coins that are
    right with probability e^ε / (1 + e^ε).

    Args:
        correct: The number of right guesses.
        guesses: The number of guesses; the attacker may leave canaries out.
        canaries: The number of canaries, each in or out by a fair coin.
        delta: δ of the claim.
        confidence: How often the bound holds, at least, if the coins are tossed again.

    Returns:
        The smallest ε that is not ruled out; 0 if nothing was learned.

    **Guarantee.** Needs no assumption on the training or on the attacker.
    """
    _check_counts(correct, guesses, canaries)

    def ruled_out(epsilon: float) -> bool:
        return _tail(correct, guesses, canaries, epsilon, delta) < 1 - confidence

    return _smallest_left(ruled_out)


def _tail(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """The largest probability of so many right guesses under (ε, δ)-DP."""
    from scipy.special import bdtr, bdtrc

    if not correct:
        return 1.0
    p = 1 / (1 + math.exp(-epsilon))
    fewer = np.arange(1, correct + 1)
    # Just below ``correct``: the probability of at least correct - i, and fewer than correct.
    below = bdtr(correct - 1, guesses, p) - np.append(
        bdtr(np.arange(correct - 2, -1, -1), guesses, p), 0.0
    )
    steepest = float((below / fewer).max())
    return float(bdtrc(correct - 1, guesses, p)) + 2 * canaries * delta * steepest


def f_dp(
    correct: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95
) -> float:
    """The ε at δ of the smallest μ-GDP that allows so many right guesses in one run.

    The bound of Mahloujifar, Melis and Chaudhuri (2024), for the trade-off curve of a Gaussian.

    Args:
        correct: The number of right guesses.
        guesses: The number of guesses; the attacker may leave canaries out.
        canaries: The number of canaries, each in or out by a fair coin.
        delta: δ of the claim.
        confidence: How often the bound holds, at least, if the coins are tossed again.

    Returns:
        A lower bound of ε; 0 if nothing was learned.

    **Guarantee.** Holds if the privacy loss of training is that of a Gaussian mechanism. Other than
    ``gaussian`` it lets canaries depend on each other in any way.
    """
    _check_counts(correct, guesses, canaries)
    level = 1 - confidence
    most = 2 * math.sqrt(2 * _LARGEST)  # a μ beyond every ε that can be found
    if not _gaussian_rules_out(0.0, correct, guesses, canaries, level):
        return 0.0
    low, high = 0.0, most
    while high - low > 1e-7 * most:
        middle = (low + high) / 2
        if _gaussian_rules_out(middle, correct, guesses, canaries, level):
            low = middle
        else:
            high = middle
    return gaussian_epsilon(low, delta)


def _gaussian_rules_out(mu: float, correct: int, guesses: int, canaries: int, level: float) -> bool:
    """Whether so many right guesses have a probability below ``level`` under μ-GDP.

    Let p_i be the probability of i right guesses, r_k = Σ_{i>=k} i p_i / m and
    h_k = Σ_{i>=k} (g - i) p_i / m, for g guesses about m canaries. A canary that is guessed right,
    with k - 1 others or more, becomes one that is guessed wrong by another toss of its coin alone;
    so h_{k-1} >= Φ(Φ^-1(r_k) - μ). If ``correct`` or more had the probability ``level``, these
    inequalities give the least r_0 + h_0, which is g/m.
    """
    from scipy.special import ndtr, ndtri

    right, wrong = level * correct / canaries, level * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        more = float(ndtr(ndtri(right) - mu))
        if more <= wrong:  # then nothing changes any more
            break
        right, wrong = right + i / (guesses - i) * (more - wrong), more
        if right + wrong > guesses / canaries:
            return True
    return right + wrong > guesses / canaries


def _check_counts(correct: int, guesses: int, canaries: int) -> None:
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"{correct} right of {guesses} guesses about {canaries} canaries")


def best_of_guesses(
    scores: np.ndarray,
    included: np.ndarray,
    delta: float,
    confidence: float = 0.95,
    bound: Callable[[int, int, int, float, float], float] = one_run,
) -> tuple[float, int, int]:
    """``one_run``, or ``f_dp``, with the best number of guesses out of ``SHARES``.

    Each number is tested at a level divided by how many there are, so choosing costs no validity.

    Returns:
        The bound, the number of guesses behind it, and how many of them were right.
    """
    level = 1 - (1 - confidence) / len(SHARES)
    found = []
    for share in SHARES:
        guesses = max(2, round(share * len(scores)))
        correct = correct_guesses(scores, included, min(guesses, len(scores)))
        found.append((bound(correct, guesses, len(scores), delta, level), guesses, correct))
    return max(found)


def gaussian(correct: int, guesses: int, delta: float, confidence: float = 0.95) -> float:
    """The ε at δ of the smallest μ-GDP that explains so many right guesses.

    Under μ-GDP a guess of one coin is right with probability Φ(μ/2) at most. A one-sided
    Clopper-Pearson bound on that probability gives μ, and μ gives ε.

    Args:
        correct: The number of right guesses.
        guesses: The number of guesses.
        delta: δ of the claim.
        confidence: How often the bound holds, at least, if the coins are tossed again.

    Returns:
        A lower bound of ε; 0 if nothing was learned.

    **Guarantee.** Holds if the guesses are right independently of each other, as they are for
    Gaussian noise on orthogonal canaries, and if the privacy loss of training is that of a Gaussian
    mechanism. The second is exact for one step at q = 1, and an approximation for many steps.
    """
    from scipy.special import ndtri

    return gaussian_epsilon(2 * ndtri(_at_least(correct, guesses, confidence)), delta)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε at δ of a μ-GDP mechanism; 0 for μ <= 0."""
    from scipy.special import log_ndtr, ndtr

    if mu <= 0:
        return 0.0

    def too_small(epsilon: float) -> bool:
        spent = ndtr(mu / 2 - epsilon / mu)
        return bool(spent - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)) > delta)

    return _smallest_left(too_small)


def two_data_sets(
    without: Sequence[float],
    with_record: Sequence[float],
    delta: float,
    confidence: float = 0.95,
    gaussian: bool = False,
) -> float:
    """The ε that scores of many runs on two neighbouring data sets rule out.

    Every other run helps to choose a threshold, and the rest is counted: Clopper-Pearson bounds on
    both error rates, at half of the level each, give ε. Runs that choose are not counted, so
    choosing costs no validity.

    Args:
        without: One score for each run without the record.
        with_record: One score for each run with it.
        delta: δ of the claim.
        confidence: How often the bound holds, at least.
        gaussian: Take the training for a Gaussian mechanism: the error rates give μ, and μ gives ε.
            Much tighter, and valid where that is what the training is.

    Returns:
        A lower bound of ε; 0 if nothing was learned.

    **Guarantee.** Needs independent runs; without ``gaussian``, no assumption on the training.
    """
    first, second = ([np.asarray(s)[i::2] for s in (without, with_record)] for i in (0, 1))
    options = [
        (_by_errors(*_errors(first, threshold, sign), delta, 0.5, gaussian), threshold, sign)
        for threshold in np.quantile(np.concatenate(first), np.linspace(0.02, 0.98, 49))
        for sign in (1.0, -1.0)
    ]
    _, threshold, sign = max(options)
    return _by_errors(*_errors(second, threshold, sign), delta, confidence, gaussian)


def _errors(pair: Sequence[np.ndarray], threshold: float, sign: float) -> tuple[int, int, int, int]:
    """Right answers and runs, without the record and with it; "with" is said above a threshold."""
    out, inside = (sign * one > sign * threshold for one in pair)
    return int((~out).sum()), len(out), int(inside.sum()), len(inside)


def _by_errors(
    right_out: int,
    out: int,
    right_in: int,
    inside: int,
    delta: float,
    confidence: float,
    gaussian: bool,
) -> float:
    from scipy.special import ndtri

    level = 1 - (1 - confidence) / 2
    negative, positive = _at_least(right_out, out, level), _at_least(right_in, inside, level)
    if gaussian:
        return gaussian_epsilon(ndtri(negative) + ndtri(positive), delta)
    odds = ((positive - delta) / (1 - negative), (negative - delta) / (1 - positive))
    return max(0.0, *(math.log(max(ratio, 1e-300)) for ratio in odds))


def _at_least(correct: int, tries: int, confidence: float) -> float:
    """The one-sided Clopper-Pearson bound of a probability from below."""
    from scipy.special import betaincinv

    return float(betaincinv(correct, tries - correct + 1, 1 - confidence)) if correct else 0.0


def _smallest_left(ruled_out: Callable[[float], bool]) -> float:
    """The smallest ε that is not ruled out, where small ones are; by bisection."""
    if not ruled_out(0.0):
        return 0.0
    low, high = 0.0, _LARGEST
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if ruled_out(middle) else (low, middle)
    return low
