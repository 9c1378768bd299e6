"""The engine's part of a Trainer's checkpoint."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path

import torch

from ..engine import Hooks
from ..files import replace_file
from .terms import Updates, secret_path

_STATE = "zetaclip.pt"


def save_engine(hooks: Hooks, folder: Path) -> None:
    """Writes the engine's state into a checkpoint, and its secret streams beside it."""
    public, secret = hooks.collect(folder.parent)
    for name in ("module", "optimizer"):  # the trainer saves them itself
        del public[name]
    folder.mkdir(parents=True, exist_ok=True)
    hooks.write_secrets(secret_path(folder), {public["identity"]: secret})
    with replace_file(folder / _STATE) as file:
        torch.save(public, file)
    hooks.saved_in(folder.parent)  # not in the checkpoint, which the trainer removes later


def load_engine(hooks: Hooks, updates: Updates, folder: Path) -> None:
    """Continues from a checkpoint whose weights and optimizer the trainer has loaded."""
    if not (folder / _STATE).exists():
        warnings.warn(
            f"{folder.name} holds no private state: the ledger does not contain what was trained"
            " before it, and ε does not count it",
            stacklevel=3,
        )
        return
    public = torch.load(folder / _STATE, map_location=hooks.device, weights_only=True)
    public |= copy.deepcopy(hooks.weights_and_optimizer())
    updates.resume(public, folder.parent, secret_path(Path(os.path.abspath(folder))))
