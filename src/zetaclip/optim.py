"""Optimizers for private gradients.

    optimizer = zetaclip.optim.Auto(model.parameters(), gain=zetaclip.optim.gain(model, inputs))
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, clipping="auto", ...
    )

``inputs`` are made up: any numbers with the shape and the scale of the real ones. A single linear
layer on inputs of length 1 needs no gain.
"""

from .methods._auto import Auto, gain
from .methods._updates import AdamBC

__all__ = ["AdamBC", "Auto", "gain"]
