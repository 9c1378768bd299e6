"""The engine: turns an ordinary training loop into a private one, batch by batch."""

from ._engine import PrivacyEngine
from ._fix import fix
from ._parity import check_parity
from ._validation import ValidationError

__all__ = ["PrivacyEngine", "ValidationError", "check_parity", "fix"]
