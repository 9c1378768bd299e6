"""model.json: how a run's network is built again, and how new records are prepared for it.

    raw records ─ input ─▶ x ─ features (optional, frozen) ─▶ network ─▶ outputs ─ target ─▶ answer

Everything in it is a public constant: names, shapes, declared ranges and vocabularies. What was
inferred from private data instead of declared is kept apart, in private/input.json.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .config import Config
from .folder import RunFolder

if TYPE_CHECKING:
    from torch import nn

    from ..data import Dataset

NAME = "model.json"
_VERSION = 1
# Feature modules by the "kind" of their settings: (module of this package, function). The function
# gets the settings and returns the frozen module; it raises InputError if it can't build the same.
FEATURES: dict[str, tuple[str, str]] = {
    "patches": ("features", "rebuilt"),
    "scattering": ("features", "rebuilt"),
    "bins": ("features", "rebuilt"),
}
# Parts that may hold what was inferred from the records: a layout tells how many values each column
# has, and which have missing ones.
_PREPARATION = ("input", "target", "features")


def describe(config: Config, dataset: Dataset) -> dict[str, Any]:
    """The description of a run's network and data.

    Args:
        config: The settings, all of them chosen.
        dataset: The data.
    """
    return {
        "zetaclip_model": _VERSION,
        "task": dataset.task,
        "network": {
            "name": config.model,
            "arguments": {"input_shape": list(dataset.input_shape), "outputs": dataset.outputs},
        },
        "features": None if dataset.feature_map is None else dict(dataset.feature_map),
        "input": None if dataset.inputs is None else dataset.inputs.describe(),
        "target": {
            "name": dataset.target,
            "classes": list(dataset.classes),
            "range": None if dataset.target_range is None else list(dataset.target_range),
            "unit": dataset.target_unit,
        },
    }


def hides(dataset: Dataset) -> bool:
    """Whether names and ranges of the data were inferred from private records."""
    return bool(dataset.private_statistics) and not dataset.public


def public(config: Config, dataset: Dataset) -> dict[str, Any]:
    """The description without what was inferred from private data."""
    whole = describe(config, dataset)
    if not hides(dataset):
        return whole
    word = (
        "what is missing here is in private/input.json: it holds what was inferred from private"
        " data, which ε does not cover"
    )
    hidden = _hidden(whole)
    return {**{n: v for n, v in whole.items() if n not in hidden}, "private": word}


def _hidden(whole: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(n for n in _PREPARATION if n != "features" or "layout" in (whole[n] or {}))


def shown_features(dataset: Dataset) -> dict[str, Any] | None:
    """The settings of the fixed features, for the result: without a layout that was inferred."""
    if dataset.feature_map is None:
        return None
    inferred = bool(dataset.private_statistics) and not dataset.public
    return {n: v for n, v in dataset.feature_map.items() if n != "layout" or not inferred}


def write(folder: RunFolder, config: Config, dataset: Dataset) -> None:
    """Writes model.json, and private/input.json if something was inferred from private data.

    Args:
        folder: The run folder.
        config: The settings, all of them chosen.
        dataset: The data.

    **Guarantee.** model.json holds no value that comes from a private record.
    """
    whole, shown = describe(config, dataset), public(config, dataset)
    if "private" in shown:
        folder.write_hidden({name: whole[name] for name in _hidden(whole)})
    folder.write_json(NAME, shown)


def read(folder: RunFolder) -> dict[str, Any]:
    """The description of a run; without input and target if they are private and not there.

    Raises:
        InputError: There is none, or it can't be read.
    """
    try:
        found = json.loads((folder / NAME).read_text(encoding="utf-8"))
        if folder.hidden.exists() and "private" in found:
            found |= json.loads(folder.hidden.read_text(encoding="utf-8"))
    except FileNotFoundError:
        why = "a version before model.json trained it" if folder.begun else "it is no run folder"
        raise InputError(f"{folder.path} has no model.json: {why}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{folder.path}: model.json can't be read: {error}") from error
    if not isinstance(found, dict) or found.get("zetaclip_model") != _VERSION:
        raise InputError(f"{folder.path}: model.json is of another version of zetaclip")
    return found


def build_network(description: Mapping[str, Any]) -> nn.Module:
    """The network that is trained, with fresh weights.

    Raises:
        InputError: It can't be built here, e.g. because its module is missing.
    """
    from ..models import build

    network = description["network"]
    arguments = dict(network["arguments"])
    return build(network["name"], tuple(arguments.pop("input_shape")), **arguments)


def build_features(settings: Mapping[str, Any] | None) -> nn.Module | None:
    """The frozen module before the network; None if there is none.

    Raises:
        InputError: It can't be built here.
    """
    if settings is None:
        return None
    kind = settings.get("kind")
    if kind not in FEATURES:
        raise InputError(f"unknown features {kind!r}; known: {', '.join(FEATURES) or 'none'}")
    module, function = FEATURES[kind]
    made: nn.Module = getattr(importlib.import_module(f"..{module}", __package__), function)(
        settings
    )
    return made.eval().requires_grad_(False)
