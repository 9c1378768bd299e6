"""From a target ε to σ, and to the number of updates that it allows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import suppress

from ..errors import AccountingError
from ..ledger import Event
from ._accountants import Compute, rdp_epsilon
from ._accounting import epsilon, lookup, warn_if_slow
from ._composed import merged

_SIGMA_RANGE = (0.01, 1e5)


def noise_multiplier_for(
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = "pld",
    tolerance: float = 1e-3,
) -> float:
    """The smallest σ for which ``steps`` steps at ``sample_rate`` stay within the target.

    Args:
        target_epsilon: ε that must not be exceeded.
        target_delta: δ.
        sample_rate: Probability with which each record joins a batch.
        steps: Number of steps.
        accountant: "pld", "prv" or "rdp".
        tolerance: Relative tolerance of σ.

    Returns:
        The noise multiplier σ.

    Raises:
        AccountingError: No σ reaches the target, or every σ does.
        ValueError: An argument has a value that is not allowed.

    **Guarantee.** ``epsilon`` was evaluated at the returned σ and is at or below the target. At
    ``(1 - tolerance)`` times this σ it is above.
    """
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must be in (0, 1], not {sample_rate}")
    if not (isinstance(steps, int) and steps > 0):
        raise ValueError(f"steps must be a positive whole number, not {steps!r}")
    return calibrate(
        lambda sigma: [Event(sample_rate, sigma, steps)],
        target_epsilon,
        target_delta,
        accountant,
        tolerance,
    )


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: float | None = None,
    steps: int | None = None,
    accountant: str = "pld",
) -> float:
    """σ for a target ε, with the arguments of Opacus's function of this name.

    Args:
        target_epsilon: ε that must not be exceeded.
        target_delta: δ.
        sample_rate: Probability with which each record joins a batch.
        epochs: Epochs of ceil(1 / sample_rate) steps, as the private loader counts them.
        steps: Number of steps, instead of ``epochs``.
        accountant: "pld", "prv" or "rdp".

    Returns:
        The noise multiplier σ.

    Raises:
        AccountingError: No σ reaches the target, or every σ does.
        TypeError: Neither or both of ``epochs`` and ``steps`` are given.
        ValueError: An argument has a value that is not allowed.

    Examples:
        >>> q = 256 / 60_000
        >>> sigma = get_noise_multiplier(
        ...     target_epsilon=3.0, target_delta=1e-5, sample_rate=q, epochs=8
        ... )
        >>> round(sigma, 1)
        0.7
    """
    if (epochs is None) == (steps is None):
        raise TypeError("give either epochs= or steps=")
    if epochs is not None:
        if not 0 < sample_rate <= 1:
            raise ValueError(f"sample_rate must be in (0, 1], not {sample_rate}")
        steps = math.ceil(epochs * math.ceil(1 / sample_rate - 1e-9) - 1e-9)
    assert steps is not None
    return noise_multiplier_for(target_epsilon, target_delta, sample_rate, steps, accountant)


def calibrate(
    make_events: Callable[[float], list[Event]],
    target_epsilon: float,
    target_delta: float,
    accountant: str = "pld",
    tolerance: float = 1e-3,
    start: float | None = None,
) -> float:
    """The smallest σ for which the steps of ``make_events(σ)`` stay within the target.

    Args:
        make_events: From σ to everything that a method would release: a schedule, several batches
            per update, a second query. A larger σ must mean more noise.
        target_epsilon: ε that must not be exceeded.
        target_delta: δ.
        accountant: "pld", "prv" or "rdp".
        tolerance: Relative tolerance of σ.
        start: First guess; one close to the answer saves evaluations.

    Returns:
        The noise multiplier σ.

    Raises:
        AccountingError: No σ reaches the target (it is below the accountant's resolution, or
            something is released without noise), or every σ does (δ is so large that records could
            be published).
        ValueError: An argument has a value that is not allowed.

    **Guarantee.** As ``noise_multiplier_for``. A σ at which the accountant fails is never returned.
    """
    compute = lookup(accountant, target_delta)
    if not 0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon must be positive and finite, not {target_epsilon}")
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must be in (0, 1), not {tolerance}")
    target = f"ε = {target_epsilon:g} at δ = {target_delta:g}"

    def excess(sigma: float, using: Compute = compute) -> float:
        """ln(ε / target): at most 0 if the target is met, and nearly linear in ln σ."""
        return math.log(max(using(merged(make_events(sigma)), target_delta) / target_epsilon, 1e-9))

    first = 0.1 if start is None else 4 * tolerance
    if start is None:
        start = 1.0
        if compute is not rdp_epsilon:
            # RDP takes milliseconds and is close enough as a first guess for slow accountants.
            with suppress(AccountingError):  # RDP may fail where the others do not
                start = _smallest(lambda sigma: excess(sigma, rdp_epsilon), 1.0, 0.02, target)
    if accountant == "prv":
        warn_if_slow(merged(make_events(start)), target_delta, evaluations=6)
    return _smallest(excess, start, tolerance, target, first)


def _smallest(
    excess: Callable[[float], float],
    start: float,
    tolerance: float,
    target: str,
    first: float = 0.1,
) -> float:
    """The smallest x with excess(x) <= 0, from above and to a relative ``tolerance``.

    ``first`` is the first step away from ``start``, in ln x.
    """
    least, most = (math.log(limit) for limit in _SIGMA_RANGE)
    seen: list[tuple[float, float]] = []  # every (position, finite excess), in order of evaluation

    def crossing() -> float:
        """The zero of the excess, interpolated from the last points; from one point by ε ~ 1/σ²."""
        if len(seen) == 1:
            return seen[0][0] + seen[0][1] / 2
        last = {excess: position for position, excess in seen[-3:]}
        return sum(
            position * math.prod(other / (other - excess) for other in last if other != excess)
            for excess, position in last.items()
        )

    def at(position: float) -> float:
        value = excess(math.exp(position))
        if math.isfinite(value):
            seen.append((position, value))
        return value

    def try_at(position: float) -> float:
        try:
            return at(position)
        except AccountingError:
            return math.inf  # counts as above the target, so this σ is never returned

    high, growth = math.log(start), first
    low: float | None = None
    # Up to a σ that meets the target, then down to one that does not, each time a little further
    # than the interpolated zero.
    while (at_high := at(high)) > 0:
        low = high
        if high >= most:
            raise AccountingError(
                f"no noise multiplier up to {_SIGMA_RANGE[1]:g} reaches {target} with this "
                "accountant: raise the target ε or δ, take fewer steps or a smaller sampling rate, "
                "or use accountant='pld', which resolves the smallest ε"
            )
        step = growth if math.isinf(at_high) else max(growth, min(1.2 * (crossing() - high), 1.0))
        high, growth = min(high + step, most), 2 * growth
    growth = first
    while low is None:
        trial = max(high - max(growth, min(1.2 * (high - crossing()), 1.0)), least)
        if try_at(trial) > 0:
            low = trial
        elif trial <= least:
            raise AccountingError(
                f"every noise multiplier down to {_SIGMA_RANGE[0]:g} reaches {target}, so the "
                "target requires no noise: lower the target δ (far below 1 / number of records) "
                "or ε"
            )
        else:
            high, growth = trial, 2 * growth
    widths = [math.inf, math.inf]
    while (width := high - low) > math.log1p(tolerance):
        middle = (low + high) / 2
        widths.append(width)
        if width <= widths[-3] / 2 and len(seen) > 1:
            # The interpolated zero, moved a little towards the farther end, so that a good guess
            # closes the bracket from both sides in two evaluations. If two guesses did not halve
            # the bracket, its middle is used instead.
            guess = crossing()
            guess += math.copysign(tolerance / 3, middle - guess)
            margin = 0.02 * (high - low)
            middle = min(max(guess, low + margin), high - margin)
        if try_at(middle) > 0:
            low = middle
        else:
            high = middle
    return math.exp(high)


def affordable(
    events_up_to: Callable[[int], list[Event]],
    done: int,
    most: int,
    limit: float,
    delta: float,
    accountant: str = "pld",
) -> int:
    """The largest number of updates, from ``done`` to ``most``, whose ε is at or below ``limit``.

    Args:
        events_up_to: From a number of updates to everything that is released up to then.
        done: Updates that have been made already; they are not checked.
        most: Upper limit. It may be far beyond the answer: the search starts from that of RDP,
            which is fast.
        limit: ε that must not be exceeded.
        delta: δ.
        accountant: "pld", "prv" or "rdp".

    Returns:
        The number of updates, including those that are done.

    Raises:
        AccountingError: The accountant fails for every number above ``done``.

    **Edge cases.** A number of updates for which the accountant fails counts as too many.
    """
    failed: AccountingError | None = None

    def fits(count: int, by: str = accountant) -> bool:
        nonlocal failed
        try:
            events = events_up_to(count)
            return not events or epsilon(events, delta, by) <= limit
        except AccountingError as error:
            failed = error
            return False

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="the PRV accountant will take about", category=UserWarning
        )
        low = done
        if accountant != "rdp":
            guess = _largest(lambda count: fits(count, "rdp"), done, most)
            failed = None
            if guess > done:
                if not fits(guess):  # possible, because a tight accountant also rounds up
                    most = guess - 1
                else:
                    low = guess
        found = _largest(fits, low, most)
    if found == done and failed is not None:
        raise failed
    return found


def _largest(fits: Callable[[int], bool], low: int, most: int) -> int:
    """The largest number up to ``most`` that fits, if ``low`` does, by galloping and bisection."""
    step = 1 + low // 8
    while low < most:
        trial = min(low + step, most)
        if not fits(trial):
            most = trial - 1
            break
        low, step = trial, 2 * step
    while low < most:
        middle = (low + most + 1) // 2
        low, most = (middle, most) if fits(middle) else (low, middle - 1)
    return low
