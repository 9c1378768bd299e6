"""Fixed features before a trained head: which ones a run has, and its defaults then."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .config import Config, ConfigError
from .progress import Display

if TYPE_CHECKING:
    from ..data import Dataset
    from ..features import Fixed
    from ..methods import Method

# ε: (epochs of a tenth of the records each update, learning rate of a decoupled step).
_BY_EPSILON = ((2.0, 15.0, 20.0), (5.0, 20.0, 30.0), (float("inf"), 30.0, 60.0))
_LARGEST, _SMALLEST = 5000, 1500
_PLAIN_RATE = 16.0
# Heads on tables: updates, records that are processed in all, how far noise may move a logit and
# the output for a target in [-1, 1], and how far one update may move an output.
_UPDATES, _RECORDS = 300, 2_000_000
_REACH = (2.0, 0.2)
_LARGEST_STEP = 500.0


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


def is_table(dataset: Dataset) -> bool:
    """Whether the records are rows of a table whose columns are known."""
    return dataset.inputs is not None and dataset.inputs.kind == "table"


def _rescaled(config: Config) -> bool:
    return config.data_options.get("scaling", "symmetric") != "symmetric"


def head_defaults(config: Config, method: Method, size: int, task: str) -> dict[str, Any]:
    """Batch size, length, rate and momentum for a head on features of unit length."""
    if not method.private:  # nothing bounds the step but stability
        return {"lr": _PLAIN_RATE} if method.family == "sgd" else {}
    if config.features == "bins":
        return _table_defaults(config, method, size, task)
    epsilon = config.epsilon or 3.0
    epochs, rate = next((e, r) for most, e, r in _BY_EPSILON if epsilon < most)
    found: dict[str, Any] = {"batch_size": min(size, max(_SMALLEST, min(_LARGEST, size // 10)))}
    if method.private and method.family == "sgd":
        found |= {"lr": rate, "momentum": 0.9}
    if config.steps is None:
        found["epochs"] = epochs
    return found


def _table_defaults(config: Config, method: Method, size: int, task: str) -> dict[str, Any]:
    """As ``head_defaults``, for a table: about 300 updates, with batches as large as time allows.

    The rate is the one at which noise moves an output by ``_REACH`` by the end of the training:
    under a linear decay to zero it moves it by rate · σ / batch · √(updates / 3), and momentum
    multiplies the rate by 1 / (1 - momentum). All of these numbers are public.
    """
    from ..accounting import noise_multiplier_for

    batch = config.batch_size or min(size, round(max(_RECORDS, 10 * size) / _UPDATES))
    steps = config.steps or _UPDATES
    if config.steps is None and config.epochs is not None:
        steps = max(1, math.ceil(config.epochs * size / batch))
    found: dict[str, Any] = {"batch_size": batch}
    if config.steps is None:
        found["epochs"] = steps / -(-size // batch)
    if not (method.private and method.family == "sgd"):
        return found
    found["momentum"] = 0.9
    if config.lr is not None:
        return found
    delta = config.delta or min(1e-5, size**-1.1)
    rate = min(1.0, batch / size)
    sigma = config.sigma
    if sigma is None:
        sigma = noise_multiplier_for(config.epsilon or 3.0, delta, rate, steps, config.accountant)
    momentum = 0.9 if config.momentum is None else config.momentum
    free = _REACH[task == "regression"] * batch / math.sqrt(steps / 3)
    found["lr"] = (1 - momentum) * min(free / max(sigma, 1e-9), _LARGEST_STEP)
    return found


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
