"""Constants that are made once and kept in the user's cache folder.

They are made from synthetic pictures, so there is nothing private in them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..data.files import cache_folder
from ..files import replace_file


def constants(
    digest: str, shapes: Mapping[str, torch.Size], make: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Tensors by name, from the cache or made.

    Args:
        digest: A name for everything that they depend on.
        shapes: The names and shapes that they have.
        make: Makes them.

    **Edge cases.** A file that is damaged or does not fit is made anew. If the cache can't be
    written, the constants are made each time.
    """
    from safetensors.torch import load, save

    target = cache_folder() / f"features-{digest[:32]}.safetensors"
    try:
        raw = target.read_bytes()
        seal, body = raw[:64], raw[64:]
        if seal == _seal(body):
            found = load(body)
            if {name: value.shape for name, value in found.items()} == dict(shapes):
                return found
    except OSError:
        pass  # missing, or not readable
    made = {name: value.contiguous() for name, value in make().items()}
    body = save(made)
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replace_file(target) as file:
            file.write(_seal(body) + body)
    except OSError:
        pass  # disk full or no permission
    return made


def _seal(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
