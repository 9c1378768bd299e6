"""Per-example norms and clipped sums from one backward pass.

Only ``zetaclip.mechanism`` may read the contents of a ``Chunk``.
"""

from .attach import Refusal, make_shadows
from .capture import CaptureBuffer, CaptureError, LayerCapture, is_private
from .layout import Layout
from .reduce import Chunk
from .rules import LAYER_RULES, LayerRule, layer_rule

__all__ = [
    "LAYER_RULES",
    "CaptureBuffer",
    "CaptureError",
    "Chunk",
    "LayerCapture",
    "LayerRule",
    "Layout",
    "Refusal",
    "is_private",
    "layer_rule",
    "make_shadows",
]
