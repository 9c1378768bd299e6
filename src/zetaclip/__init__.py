"""Train PyTorch models with differential privacy, with nothing to tune.

Names are loaded when they are first used: ``zetaclip --help`` must not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "accounting": ("Budget", "get_noise_multiplier"),
    "clipping": ("Affine", "ClipRule", "Extra", "Flat"),
    "control": ("Replay", "Schedule", "Spectral"),
    "engine": ("PrivacyEngine", "ValidationError", "check_parity", "fix"),
    "errors": (
        "AccountingError",
        "BudgetExceeded",
        "LedgerError",
        "LossError",
        "NoGuarantee",
        "PrivacyLeakWarning",
    ),
    "gradients": ("layer_rule",),
    "inference": ("load_run",),
    "integrations.opacus": ("attach_spectral",),
    "methods": ("Method", "Pass", "Plan"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AccountingError",
    "Affine",
    "Budget",
    "BudgetExceeded",
    "ClipRule",
    "Extra",
    "Flat",
    "LedgerError",
    "LossError",
    "Method",
    "NoGuarantee",
    "Pass",
    "Plan",
    "PrivacyEngine",
    "PrivacyLeakWarning",
    "Replay",
    "Schedule",
    "Spectral",
    "ValidationError",
    "attach_spectral",
    "check_parity",
    "fix",
    "get_noise_multiplier",
    "layer_rule",
    "load_run",
    "losses",
    "methods",
    "optim",
]

if TYPE_CHECKING:
    from . import losses, methods, optim
    from .accounting import Budget, get_noise_multiplier
    from .clipping import Affine, ClipRule, Extra, Flat
    from .control import Replay, Schedule, Spectral
    from .engine import PrivacyEngine, ValidationError, check_parity, fix
    from .errors import (
        AccountingError,
        BudgetExceeded,
        LedgerError,
        LossError,
        NoGuarantee,
        PrivacyLeakWarning,
    )
    from .gradients import layer_rule
    from .inference import load_run
    from .integrations.opacus import attach_spectral
    from .methods import Method, Pass, Plan


def __getattr__(name: str) -> Any:
    if name in (
        "losses",
        "methods",
        "optim",
    ):  # tables to look things up in, so modules and not names of them
        return import_module(f".{name}", __name__)
    if name not in _HOME_OF:
        raise AttributeError(f"module 'zetaclip' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
