"""The weights of a run, in and out of its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .folder import RunFolder

if TYPE_CHECKING:
    from torch import nn

NAME = "model.safetensors"


def save_weights(model: nn.Module, path: Path, facts: dict[str, Any]) -> None:
    """Writes a network's weights.

    Args:
        model: The network.
        path: The file.
        facts: What travels with the weights, in the file's header: updates, and ε and δ if they are
            known.

    Raises:
        OSError: The file can't be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    state = {
        name: value.detach().cpu().clone().contiguous()
        for name, value in model.state_dict().items()
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # One key: safetensors writes several in any order, and equal runs have equal files.
        save_file(state, temporary, {"zetaclip": json.dumps(facts)})
    except SafetensorError as error:  # a full disk is not reported as an OSError
        raise OSError(f"{path.name}: {error}") from error
    os.replace(temporary, path)


def load_weights(model: nn.Module, folder: RunFolder) -> dict[str, Any]:
    """Puts the weights of a run into its network.

    A run that is finished, or was stopped by a signal, has its weights in model.safetensors. One
    that was killed has those of its last checkpoint.

    Args:
        model: The network as it was built.
        folder: The run folder.

    Returns:
        For a checkpoint: its ledger, under ``ledger``, and ``steps``. Otherwise the facts in the
        header of the file.

    Raises:
        InputError: There are no weights, or they don't fit the network.
    """
    path = folder / NAME
    try:
        if path.exists():
            from safetensors import safe_open

            with safe_open(path, framework="pt") as file:
                facts = json.loads((file.metadata() or {}).get("zetaclip", "{}"))
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            model.load_state_dict(state)
        elif folder.executed:
            facts = _from_checkpoint(model, folder.checkpoint)
        else:
            raise InputError(f"{folder.path} has no weights yet: the run has not taken a step")
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the weights in {folder.path} can't be used: {error}") from error
    return facts


def _from_checkpoint(model: nn.Module, path: Path) -> dict[str, Any]:
    import torch

    from ..methods import WeightAverage

    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["module"])
    saved = state["extra"]["average"]
    if saved is not None:
        average = WeightAverage([p for p in model.parameters() if p.requires_grad], saved["decay"])
        average.load_state_dict(saved)
        average.fix()
    steps = state["done"] if "done" in state else state["counts"]["step"]
    return {"steps": int(steps), "ledger": state.get("ledger")}
