"""The engine: turns an ordinary training loop into a private one, batch by batch."""

from ._checkpoint import CheckpointError, Remedy
from ._engine import PrivacyEngine
from ._fix import fix
from ._hooks import Hooks
from ._loader import PoissonLoader
from ._optimizer import PrivateOptimizer
from ._parity import check_parity
from ._validation import ValidationError

__all__ = [
    "CheckpointError",
    "Hooks",
    "PoissonLoader",
    "PrivacyEngine",
    "PrivateOptimizer",
    "Remedy",
    "ValidationError",
    "check_parity",
    "fix",
]
