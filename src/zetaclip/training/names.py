"""Names that a configuration may use, checked before torch is imported or data are read.

The methods and the spectral controller import torch, which takes a second. So their names are
listed here once more; ``tests/test_interfaces.py`` compares the lists.
"""

from __future__ import annotations

from pathlib import Path

from ..words import near
from .config import Config, ConfigError

METHODS = (
    "sgd", "adam", "auto", "dp-sgd", "dp-adam", "dp-adam-bc", "dp-adamw", "adp-adamw", "dp-is",
    "dp-sam", "dp-sat", "auto-s", "dp-psac", "adaclip", "adadpigu", "dp-adam-ac", "quantile",
    "bounded-adaptive", "slaclip", "ww-dp-sgd",
)  # fmt: skip
# The arguments of ``zetaclip.Spectral``, and what ``recipe.build_spectral`` adds.
SPECTRAL = (
    "initial", "probe", "period", "smoothing", "center", "radius", "gain", "bounds", "fit",
    "start", "anti_windup", "zone", "sign", "law", "gain_by_error", "signal", "integral_gain",
    "derivative_gain", "signal_seed", "paper", "aggregate",
)  # fmt: skip


def check_names(config: Config) -> None:
    """Checks the method, the data set and its files, the schema, and the spectral settings.

    Args:
        config: The settings.

    Raises:
        ConfigError: A name is unknown; the message gives near ones.
        InputError: The data set or its schema can't be used.

    **Edge cases.** Names of the form module:object are not looked up.
    """
    if ":" not in config.method and config.method not in METHODS:
        raise ConfigError(f"there is no method {config.method!r}; {near(config.method, METHODS)}")
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
