"""From a ledger to ε, from a target ε to the noise, and budgets that several fits share.

scipy is imported when the first ε is computed; Opacus, and torch with it, for PRV only;
dp-accounting for groups only.
"""

from ._accounting import ACCOUNTANTS, epsilon, group_epsilon
from ._budget import Budget
from ._calibration import affordable, calibrate, get_noise_multiplier, noise_multiplier_for

__all__ = [
    "ACCOUNTANTS",
    "Budget",
    "affordable",
    "calibrate",
    "epsilon",
    "get_noise_multiplier",
    "group_epsilon",
    "noise_multiplier_for",
]
