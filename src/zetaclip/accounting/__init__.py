"""From a ledger to ε, from a target ε to the noise, and what several fits spend together.

Opacus, dp-accounting and scipy are imported when the first ε is asked for.
"""

from ._accounting import (
    ACCOUNTANTS,
    affordable,
    calibrate,
    epsilon,
    group_epsilon,
    noise_multiplier_for,
)
from ._budget import Budget

__all__ = [
    "ACCOUNTANTS",
    "Budget",
    "affordable",
    "calibrate",
    "epsilon",
    "group_epsilon",
    "noise_multiplier_for",
]
