"""Attacks a configuration on purpose: a lower bound of ε, to be held against the claimed one.

``audit`` trains once with canaries that are in or out by secret coins; ``audit_pair`` trains a tiny
model many times on two neighbouring data sets. The bounds themselves are functions of counts.
"""

from ._bounds import f_dp, gaussian, gaussian_epsilon, one_run, two_data_sets
from ._pair import audit_pair, audit_pair_of
from ._run import ATTACKERS, AuditResult, audit

__all__ = [
    "ATTACKERS",
    "AuditResult",
    "audit",
    "audit_pair",
    "audit_pair_of",
    "f_dp",
    "gaussian",
    "gaussian_epsilon",
    "one_run",
    "two_data_sets",
]
