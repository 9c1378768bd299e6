"""The matrices inside a checkpoint file, read without running code from the file."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Keys under which a training checkpoint stores the model.
_MODEL_KEYS = ("state_dict", "model_state_dict", "model", "module", "network", "weights")

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class CheckpointError(ValueError):
    """A file cannot be read as a checkpoint; the message explains why."""


def load_matrices(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Every floating-point tensor with two or more dimensions, by name.

    Args:
        path: A ``.safetensors`` file, or a file that ``torch.save`` wrote.

    Returns:
        Tensors by their name in the checkpoint. If the file has the model under a key such as
        "state_dict", only that part is listed.

    Raises:
        CheckpointError: The file does not exist, cannot be read, or has no such tensor.

    **Guarantee.** A ``.safetensors`` file is parsed as data; everything else is read by
    ``torch.load`` with ``weights_only=True``. Neither runs code from the file.
    """
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder, not a checkpoint file")
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    content = _load_safetensors(path) if path.suffix == ".safetensors" else _load_torch(path)
    matrices = {
        name: tensor
        for name, tensor in _tensors(_model_part(content))
        if tensor.ndim >= 2 and tensor.is_floating_point() and tensor.numel()
    }
    if not matrices:
        raise CheckpointError(f"{path} contains no matrix with floating-point entries")
    return matrices


def _load_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's own message suggests loading with code execution allowed, so it is not repeated.
        raise CheckpointError(
            f"{path} is not a file of plain tensors: it contains other objects, or is not a "
            "checkpoint at all. Nothing in it was run. Save model.state_dict()"
        ) from error
    except Exception as error:  # the type depends on where the file is damaged
        first = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}: {first[:150]})"
        ) from error


def _model_part(content: Any) -> Any:
    """The model of a training checkpoint, so that optimizer state is not listed as layers."""
    if isinstance(content, Mapping):
        for key in _MODEL_KEYS:
            if isinstance(content.get(key), Mapping) and any(True for _ in _tensors(content[key])):
                return content[key]
    return content


def _tensors(content: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(content, Tensor):
        yield prefix or "tensor", content
    elif isinstance(content, (Mapping, list, tuple)):
        items = content.items() if isinstance(content, Mapping) else enumerate(content)
        for key, value in items:
            yield from _tensors(value, f"{prefix}.{key}" if prefix else str(key))


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    """Parses eight bytes with the length of a JSON header, the header, and the raw tensors."""
    data = path.read_bytes()
    try:
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 or length > len(data) - 8:
            raise ValueError("the header is longer than the file")
        header = json.loads(data[8 : 8 + length])
        body = memoryview(data)[8 + length :]
        tensors = {}
        for name, entry in header.items():
            dtype = _SAFETENSORS_DTYPES.get(entry["dtype"]) if name != "__metadata__" else None
            if dtype is None:
                continue
            start, stop = entry["data_offsets"]
            if not 0 <= start <= stop <= len(body):
                raise ValueError(f"{name} lies outside the file")
            if start == stop:
                continue
            # A copy: torch warns about read-only bytes.
            flat = torch.frombuffer(bytearray(body[start:stop]), dtype=dtype)
            tensors[name] = flat.reshape(entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} is not a safetensors file ({type(error).__name__}: {error})"
        ) from error
    return tensors
