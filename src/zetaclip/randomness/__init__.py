"""Secret randomness: streams of keys, and the noise and coins that are made from a key.

Everything that decides about privacy comes from here, and all of it from one cipher, ChaCha12:
noise, Poisson batches and the coins of clip rules. ``generator`` and ``generator_state`` put a key's bits
into torch's own generator, for dropout masks and augmentation, which torch draws itself.
"""

from ._noise import LARGEST, _compiled, add_noise, noise_source, normals, uniforms
from ._streams import Stream, drawn_and_next, generator, generator_state, subkey

__all__ = [
    "LARGEST",
    "Stream",
    "_compiled",
    "add_noise",
    "drawn_and_next",
    "generator",
    "generator_state",
    "noise_source",
    "normals",
    "subkey",
    "uniforms",
]
