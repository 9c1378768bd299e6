"""Whether each setting of a ``Config`` has a value that can be used."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError

_TABLES = ("data_options", "features_options", "method_options", "spectral")
_POSITIVE = (
    "skew", "skew_size", "num_examples", "minutes", "epochs", "steps", "batch_size",
    "physical_batch_size", "lr", "clip", "epsilon", "max_epsilon", "threads", "eval_every",
    "rows_per_unit", "views",
)  # fmt: skip


def check_types(config: Any) -> None:
    """Checks the type of every setting, and converts what can be converted without loss.

    Args:
        config: A ``Config`` that is being made; its fields are replaced in place.

    Raises:
        ConfigError: A setting has another type; the message names it.
    """
    for f in dataclasses.fields(config):
        value, kind = getattr(config, f.name), f.metadata.get("kind", str)
        if f.name in _TABLES:
            if not isinstance(value, dict):
                raise ConfigError(f"{f.name} is a table (key = value), not {value!r}")
        elif f.name == "clipping":
            object.__setattr__(config, "clipping", _clipping(value))
        elif f.name == "class_weight":
            object.__setattr__(config, "class_weight", _class_weight(value))
        elif value is None:
            if f.default is not None:
                raise ConfigError(f"`{f.name}` needs a value")
        elif kind is float and _is_number(value):
            object.__setattr__(config, f.name, float(value))
        elif (
            kind is int
            and _is_number(value)
            and (isinstance(value, numbers.Integral) or float(value).is_integer())
        ):
            object.__setattr__(config, f.name, int(value))
        elif not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"`{f.name}` takes {_kind_name(kind)}, not {value!r}")


def _is_number(value: Any) -> bool:
    """Also true for numpy's numbers, e.g. from a grid search."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _kind_name(kind: type) -> str:
    return {str: "text", int: "a whole number", float: "a number", bool: "true or false"}[kind]


def _clipping(value: Any) -> Any:
    if isinstance(value, str) and value != "spectral":
        try:
            value = float(value)
        except ValueError:
            raise ConfigError(f"`clipping` is 'spectral' or a number, not {value!r}") from None
    if isinstance(value, bool) or not (
        value is None or isinstance(value, (str, int, float, Mapping))
    ):
        raise ConfigError(
            f"`clipping` is 'spectral', a number or a table with a kind, not {value!r}"
        )
    return (
        dict(value)
        if isinstance(value, Mapping)
        else float(value)
        if isinstance(value, int)
        else value
    )


def _class_weight(value: Any) -> dict[str, float] | None:
    """Weights by label, from a table or from "LABEL=WEIGHT,..."."""
    if value is None:
        return None
    if isinstance(value, str):
        if "=" not in value:
            raise ConfigError(
                f"class_weight is LABEL=WEIGHT,..., not {value!r}. Weights computed from the data,"
                " like 'balanced', reveal how many records each class has, which ε does not cover:"
                " declare weights from public knowledge"
            )
        value = dict(part.rsplit("=", 1) for part in value.split(",") if "=" in part)
    try:
        found = {str(label).strip(): float(weight) for label, weight in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(f"class_weight is a table of numbers by label, not {value!r}") from None
    if not found or not all(math.isfinite(weight) and weight >= 0 for weight in found.values()):
        raise ConfigError("class_weight takes finite weights of at least 0")
    return found


def check_values(config: Any) -> None:
    """Checks choices, bounds and settings that exclude each other.

    Args:
        config: A ``Config`` whose types were checked.

    Raises:
        ConfigError: A value can't be used; the message says what can.
    """
    for f in dataclasses.fields(config):
        value, choices = getattr(config, f.name), f.metadata.get("choices", ())
        if choices and value is not None and value not in choices:
            raise ConfigError(f"`{f.name}` is one of {', '.join(choices)}, not {value!r}")
    for name in _POSITIVE:
        value = getattr(config, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"`{name}` must be positive, not {value:g}")
    if config.image_size is not None and "size" in config.data_options:
        raise ConfigError("give image_size or data_options.size, not both")
    if config.epochs is not None and config.steps is not None:
        raise ConfigError("give `epochs` or `steps`, not both")
    if config.epsilon is not None and config.sigma is not None:
        raise ConfigError("give `epsilon` (which determines σ) or `sigma`, not both")
    if config.sigma is not None and not (math.isfinite(config.sigma) and config.sigma >= 0):
        raise ConfigError(f"`sigma` must be at least 0, not {config.sigma:g}")
    if config.delta is not None and not 0 < config.delta < 1:
        raise ConfigError(f"`delta` must be between 0 and 1, not {config.delta:g}")
    if not 0 <= config.validation < 1:
        raise ConfigError(
            "`validation` is a share of the training records, at least 0 and below 1, not"
            f" {config.validation:g}"
        )
    if config.weight_average is not None and not 0 < config.weight_average < 1:
        raise ConfigError(
            f"weight_average is a decay between 0 and 1, not {config.weight_average:g}"
        )
    if isinstance(config.clipping, float) and config.clip is not None:
        raise ConfigError("a number for `clipping` is the clipping norm itself: leave `clip` out")
