"""What paired differences prove: tests against a smallest effect, in looks at ever more seeds.

A method's values minus its rival's, seed by seed, are tested by Student's t. Four statements can be
proved of their mean d, with Δ the smallest effect that matters and g the gain that the paper
reports: *better* (d > Δ), *worse* (d < -Δ), *equivalent* (both d < Δ and d > -Δ: two one-sided
tests), and *the published gain is excluded* (d < g). What is not proved can't be told.

Where runs are cheap, there are looks at 5, 10 and 20 seeds, and a comparison may stop at any of
them. Each look has a share of the error that is allowed, by the spending function of Lan and DeMets
in Pocock's form, ln(1 + (e - 1) t) for the share t of seeds. A p-value is the smallest of the
looks', each divided by its share: the shares add up to 1, so it is one whatever rule stops.

**Edge cases.** Differences spread at least by one step of what is measured, such as one test record
of 10,000: equal differences in all seeds are chance, not certainty. Differences of zero in all
seeds are the same training, and certain.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

BETTER, WORSE, EQUIVALENT = "better", "worse", "equivalent"
EXCLUDED, OPEN = "the published gain is excluded", "can't be told"
WORDS = (BETTER, WORSE, EQUIVALENT, EXCLUDED)
# Half of "equivalent"; a table has no word for it.
NOT_WORSE = "not worse"

# One table's statements: each side of a 95 % interval. The page of claims: all together.
ONE_SIDED = 0.025
FAMILY = 0.05

Key = TypeVar("Key")


@dataclass(frozen=True)
class Rules:
    """How a comparison is judged, fixed before it is run.

    Args:
        looks: Numbers of seeds at which it may be judged, rising.
        effect: The smallest difference that matters, above zero.
        overlap: The ratio of test to training records, if every seed has a split of its own: the
            splits share records, and the variance of a mean is s² (1/n + overlap) (Nadeau and
            Bengio, 2003).
        step: The least standard deviation of differences; what is measured comes in such steps.
    """

    looks: tuple[int, ...]
    effect: float
    overlap: float = 0.0
    step: float = 0.0

    @property
    def shares(self) -> tuple[float, ...]:
        """Each look's share of the error; they add up to 1."""
        spent = [math.log1p((math.e - 1) * look / self.looks[-1]) for look in self.looks]
        return tuple(now - before for before, now in zip([0.0, *spent], spent))

    def reached(self, seeds: int) -> tuple[tuple[int, float], ...]:
        """The looks that so many seeds allow, with their shares."""
        both = zip(self.looks, self.shares, strict=True)
        return tuple((look, share) for look, share in both if look <= seeds)


def counted(differences: Sequence[float], rules: Rules) -> Sequence[float]:
    """Those that the tests are over: up to the last look that is reached; all before the first."""
    reached = rules.reached(len(differences))
    return differences[: reached[-1][0]] if reached else differences


def p_below(differences: Sequence[float], bound: float, rules: Rules) -> float:
    """The p-value of "the mean difference is below the bound".

    Args:
        differences: One per seed, in the order of seeds.
        bound: The bound.
        rules: The looks. Seeds beyond the last look that is reached don't count.

    Returns:
        At most 1; 1 before the first look.
    """
    from scipy import stats

    smallest = 1.0
    for look, share in rules.reached(len(differences)):
        mean, error = _mean_and_error(differences[:look], rules)
        if error == 0:
            p = 0.0 if mean < bound else 1.0
        else:
            p = float(stats.t.cdf((mean - bound) / error, look - 1))
        smallest = min(smallest, p / share)
    return smallest


def p_values(
    differences: Sequence[float], rules: Rules, published: float | None = None
) -> dict[str, float]:
    """The p-value of each statement.

    Args:
        differences: By seed; positive is good.
        rules: Looks and smallest effect.
        published: The gain that the paper reports; None, or none above zero, excludes nothing.
    """
    above = [-one for one in differences]
    effect = rules.effect
    not_worse = p_below(above, effect, rules)
    found = {
        BETTER: p_below(above, -effect, rules),
        WORSE: p_below(differences, -effect, rules),
        EQUIVALENT: max(p_below(differences, effect, rules), not_worse),
        NOT_WORSE: not_worse,
    }
    if published is not None and published > 0:
        found[EXCLUDED] = p_below(differences, published, rules)
    return found


def word(p: Mapping[str, float], level: float = ONE_SIDED) -> str:
    """The strongest statement whose p-value is at most the level."""
    return next((one for one in WORDS if p.get(one, 1.0) <= level), OPEN)


def interval(differences: Sequence[float], rules: Rules) -> tuple[float, float] | None:
    """The 95 % interval of the mean difference that holds at all looks together.

    Returns:
        The part that the intervals of all looks have in common, each at its share of the error; the
        last look's by itself if that part does not contain its mean: a seed far from the others was
        added, say one whose training failed. None before the first look.
    """
    from scipy import stats

    low, high, mean, last = -math.inf, math.inf, math.nan, None
    for look, share in rules.reached(len(differences)):
        mean, error = _mean_and_error(differences[:look], rules)
        half = float(stats.t.isf(ONE_SIDED * share, look - 1)) * error
        last = (mean - half, mean + half)
        low, high = max(low, last[0]), min(high, last[1])
    return (low, high) if low <= mean <= high else last


def best_of(rivals: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """p-values of a row against several rivals, from those against each.

    *Better* and *equivalent* mean all of them (the largest p-value); *worse* and *excluded* mean at
    least one (the smallest, times their number).
    """
    found = {one: max(p[one] for p in rivals) for one in (BETTER, EQUIVALENT)}
    for one in (WORSE, EXCLUDED):
        some = [p[one] for p in rivals if one in p]
        if some:
            found[one] = min(1.0, len(rivals) * min(some))
    return found


def holm(p: Mapping[Key, float], level: float = FAMILY) -> set[Key]:
    """The hypotheses that Holm's procedure rejects: with all of them, one error in 1 / level."""
    rejected: set[Key] = set()
    for key in sorted(p, key=lambda one: p[one]):
        if p[key] > level / (len(p) - len(rejected)):
            break
        rejected.add(key)
    return rejected


def _mean_and_error(values: Sequence[float], rules: Rules) -> tuple[float, float]:
    """The mean and its standard error; rounding errors of equal values are no spread."""
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    if spread <= 1e-9 * max(1.0, *map(abs, values)):
        spread = 0.0
    if any(values):
        spread = max(spread, rules.step)
    return mean, spread * math.sqrt(1 / len(values) + rules.overlap)
