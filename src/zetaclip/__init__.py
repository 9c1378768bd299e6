"""Differentially private PyTorch training whose clipping threshold tunes itself."""

from .clipping import Affine, ClipRule, Extra, Flat
from .engine import PrivacyEngine
from .errors import AccountingError, LedgerError, NoGuarantee
from .gradients import layer_rule
from .methods import Budget, Method, Pass, Plan
from .parity import check_parity
from .validation import ValidationError

__version__ = "0.1.0"

__all__ = [
    "AccountingError",
    "Affine",
    "Budget",
    "ClipRule",
    "Extra",
    "Flat",
    "LedgerError",
    "Method",
    "NoGuarantee",
    "Pass",
    "Plan",
    "PrivacyEngine",
    "ValidationError",
    "check_parity",
    "layer_rule",
]
