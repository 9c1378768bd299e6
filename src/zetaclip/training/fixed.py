"""Fixed features before a trained head: which ones a run has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .config import Config
from .progress import Display

if TYPE_CHECKING:
    from ..data import Dataset
    from ..features import Fixed

# Of many pictures the law's rate is too high for a head: noise is small, and the features can fit
# more than they should. Chosen on held-out training records of CIFAR-10 and digits, see
# docs/features.md; the factor is on the rate of the method "auto".
_MANY, _RATE_OF_MANY = 10_000, 0.75


def rate_of_auto(config: Config, size: int) -> float:
    """The factor on the rate of "auto": below 1 for a head on features of many pictures."""
    many = config.features in ("patches", "scattering") and size >= _MANY
    return _RATE_OF_MANY if many else 1.0


def choose(config: Config, dataset: Dataset) -> str:
    """The features of a run: the setting, with "auto" decided.

    Raises:
        ConfigError: The features are not for such data.
    """
    from ..features import fits

    if dataset.feature_map is not None:  # they were applied before
        return str(dataset.feature_map["kind"])
    shape, table = dataset.input_shape, is_table(dataset)
    if config.features == "auto":
        # A spectral probe needs a network with wide layers, and a head has none.
        spectral = config.clipping == "spectral" or config.method == "ww-dp-sgd" or config.spectral
        own_network = config.model is not None or config.recipe == "paper" or spectral
        if own_network:
            return "none"
        if table:
            return "bins"
        return "patches" if fits(shape) and not _rescaled(config) else "none"
    if config.features == "bins":
        if not table:
            raise ConfigError(
                f"features = 'bins' are for tables, and {dataset.name} is none; leave features out"
            )
        return config.features
    if config.features != "none":
        if len(shape) != 3:
            raise ConfigError(
                f"features = {config.features!r} are for pictures, and records of {dataset.name}"
                f" have the shape {shape}; leave features out"
            )
        if _rescaled(config):
            raise ConfigError(
                "fixed features take pixels from -1 to 1; leave data_options.scaling out"
            )
    return config.features


def head_for(config: Config, dataset: Dataset) -> str:
    """The head of fixed features by name; pictures' have a constant column, tables' mostly do."""
    from ..features import bins, needs_bias

    if config.features != "bins":
        return "head"
    if dataset.feature_map is not None:
        layout = dataset.feature_map["layout"]
    else:
        layout = bins(dataset.inputs.columns).layout  # type: ignore[union-attr]
    return "linear" if needs_bias(layout) else "head"


def is_table(dataset: Dataset) -> bool:
    """Whether the records are rows of a table whose columns are known."""
    return dataset.inputs is not None and dataset.inputs.kind == "table"


def _rescaled(config: Config) -> bool:
    return config.data_options.get("scaling", "symmetric") != "symmetric"


def frozen(
    config: Config, dataset: Dataset, say: Callable[[str], None] = lambda text: None
) -> Fixed | None:
    """The frozen module of a run; None if it has no fixed features, or they are there already.

    Args:
        config: The settings, all of them chosen.
        dataset: The pictures, or the table.
        say: Told when constants are made, which takes seconds to minutes.

    Raises:
        ConfigError: The features are not for such data, or have no such option.
    """
    from ..data.inputs import TableInput
    from ..features import bins, build

    if config.features == "none" or dataset.feature_map is not None:
        return None
    try:
        if config.features == "bins":
            assert isinstance(dataset.inputs, TableInput)
            regression = dataset.task == "regression"
            return bins(dataset.inputs.columns, regression, config.features_options)
        return build(config.features, dataset.input_shape, config.features_options, say)
    except ValueError as error:
        raise ConfigError(f"features = {config.features!r}: {error}") from error


def applied(fixed: Fixed, dataset: Dataset, display: Display | None = None) -> Dataset:
    """The data set with features in place of its records, computed on all cores.

    They are kept in memory only: features of private records are private.

    Args:
        fixed: The features.
        dataset: The data.
        display: Shows the progress; None for nothing.
    """
    from ..features import precompute

    display = display or Display(quiet=True)
    total = len(dataset.train) + (0 if dataset.test is None else len(dataset.test))
    display.say(f"computing the features of {total} records")
    done = 0
    with display.bar(0, total, "record") as bar:

        def moved(rows: int) -> None:
            nonlocal done
            done += rows
            bar.step(done, dict)

        return precompute(dataset, fixed, moved)
