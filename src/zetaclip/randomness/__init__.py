"""Secret randomness: streams of keys, and the noise and uniform numbers made from a key.

All random numbers that privacy depends on come from here and from one cipher, ChaCha12: noise,
Poisson batches and the random choices of clip rules. ``generator`` and ``generator_state`` put a
key's bits into torch's own generator, for dropout masks and augmentation, which torch draws itself.
"""

from ._forward import generator, generator_state
from ._noise import (
    FARTHEST,
    LARGEST,
    _compiled,
    add_noise,
    noise_source,
    normals,
    poisson_indices,
    uniforms,
)
from ._numpy import to_whole
from ._streams import Stream, drawn_and_next, subkey

__all__ = [
    "FARTHEST",
    "LARGEST",
    "Stream",
    "_compiled",
    "add_noise",
    "drawn_and_next",
    "generator",
    "generator_state",
    "noise_source",
    "normals",
    "poisson_indices",
    "subkey",
    "to_whole",
    "uniforms",
]
