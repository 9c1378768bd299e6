"""Checks the names in a configuration before torch is imported or data are read."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError
from ..words import near
from .config import Config
from .known import FEATURES, METHODS, MODELS, SPECTRAL


def check_names(config: Config) -> None:
    """Checks method, model, features and their options, the data set, its files and its schema.

    Args:
        config: The settings.

    Raises:
        ConfigError: A name is unknown; the message gives near ones.
        InputError: The data set or its schema can't be used.

    **Edge cases.** Names of the form module:object are not looked up.
    """
    if ":" not in config.method:
        if config.method not in METHODS:
            raise ConfigError(
                f"there is no method {config.method!r}; {near(config.method, METHODS)}"
            )
        for key in config.method_options:
            if key not in (known := METHODS[config.method]):
                raise ConfigError(
                    f"method {config.method!r} has no option {key!r}; {near(key, known)}"
                )
    if config.model is not None and ":" not in config.model and config.model not in MODELS:
        raise ConfigError(
            f"there is no model {config.model!r}; {near(config.model, MODELS)} "
            "For a network of your own give package.module:callable"
        )
    _check_features(config)
    for key in config.spectral:
        if key not in SPECTRAL:
            raise ConfigError(
                f"the spectral controller has no setting {key!r}; {near(key, SPECTRAL)}"
            )
    from ..data.registry import check

    check(config.data, config.data_root, **config.data_arguments())
    if config.schema is not None:
        from ..data.declared import read_schema

        read_schema(Path(config.schema))


def _check_features(config: Config) -> None:
    every = {option for options in FEATURES.values() for option in options}
    known = every if config.features == "auto" else FEATURES.get(config.features, ())
    for key in config.features_options:
        if key not in known:
            there = near(key, known) if known else "they have none"
            raise ConfigError(f"features {config.features!r} have no option {key!r}; {there}")
