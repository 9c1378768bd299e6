"""From the released events to ε.

Everything is for add/remove-one-record adjacency and Poisson batches. There are three accountants:
``"pld"`` (privacy loss distributions as in dp-accounting: the tightest, and fast; the default),
``"prv"`` (Opacus's numerical composition: its σ for a target ε is 0.05 to 2 % larger, and it is
slow for very many steps) and ``"rdp"`` (Rényi divergences: milliseconds, ε 15 to 25 % too
large). Importing either library takes long, so only ``_accountants.py`` imports them, on first use.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from ..errors import AccountingError, NoGuarantee
from ..ledger import Event
from ._accountants import (
    ACCOUNTANTS,
    COMPUTE,
    PRV_SECONDS_PER_POINT,
    Compute,
    group_epsilon,
    prv_size,
    renyi,
)
from ._composed import closed_form, condense, merged, steps_of

__all__ = [
    "ACCOUNTANTS",
    "AccountingError",
    "NoGuarantee",
    "epsilon",
    "group_epsilon",
    "renyi",
]


def epsilon(events: Iterable[Event], delta: float, accountant: str = "pld") -> float:
    """ε at ``delta`` of all ``events`` together.

    Args:
        events: What was released, for example ``Ledger.events()``.
        delta: δ.
        accountant: "pld", "prv" or "rdp".

    Returns:
        An upper bound on ε.

    Raises:
        AccountingError: The accountant would be unreliable here, for example "prv" and "pld" for δ
            below about 1e-15 per step.
        ValueError: An argument has a value that is not allowed.

    **Guarantee.** An upper bound on the ε of Poisson-subsampled Gaussians with these rates and
    multipliers, in any order, if the multipliers were fixed in advance. "rdp" is the smallest of
    the bounds over Opacus's Rényi orders and further ones; it is never below about ln(1/δ)/1000.
    "prv" is Opacus's upper bound, whose error is set to 0.01 for ε from 0.5 to 10, to 2 % of ε
    below (at least 0.002) and to 0.1 % above. "pld" rounds losses upwards, on a grid that costs
    about 0.1 % of ε. "prv" and "pld" reserve a part of δ for the rounding errors of their Fourier
    transforms.

    **Edge cases.** No events: 0. A multiplier of 0: infinity. If every sampling rate is 1, the
    composition is one Gaussian, and "prv" and "pld" both give its exact ε in closed form. If there
    are more than 64 kinds of step (a schedule that changes at every step), similar ones are rounded
    towards less noise. "prv" warns before it computes for more than 10 seconds or 10^5 steps.

    Examples:
        >>> round(epsilon([Event(0.01, 1.0, 1000)], 1e-5, "pld"), 1)
        1.8
    """
    compute = lookup(accountant, delta)
    kinds = merged(events)
    if accountant == "prv":
        warn_if_slow(kinds, delta, evaluations=1)
    return compute(kinds, delta)


def lookup(accountant: str, delta: float) -> Compute:
    """The function of an accountant, after a check of its name and of δ."""
    if accountant not in COMPUTE:
        raise ValueError(f"unknown accountant {accountant!r}: use one of {', '.join(ACCOUNTANTS)}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be between 0 and 1, not {delta}")
    return COMPUTE[accountant]


def warn_if_slow(events: list[Event], delta: float, evaluations: int) -> None:
    """Warns before a computation by PRV that takes longer than some seconds.

    Args:
        events: The steps, joined by kind.
        delta: δ.
        evaluations: How often ε will be computed.
    """
    if closed_form(events, delta) is not None:
        return
    steps, kinds = steps_of(events), len(condense(events))
    seconds = evaluations * kinds * (0.1 + PRV_SECONDS_PER_POINT * prv_size(events, delta)[0])
    if steps > 10**5 or seconds > 10:
        warnings.warn(
            f"the PRV accountant will take about {max(seconds, 1):.0f} s for {steps} steps; "
            f"accountant='pld' is as tight and {'much' if kinds < 8 else 'somewhat'} faster",
            stacklevel=3,
        )
