"""Fixed features before a trained head: which ones a run has, and its defaults then."""

from __future__ import annotations

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


def choose(config: Config, dataset: Dataset) -> str:
    """The features of a run: the setting, with "auto" decided.

    Raises:
        ConfigError: The features are not for such data.
    """
    from ..features import fits

    shape = dataset.input_shape
    if config.features == "auto":
        # A spectral probe needs a network with wide layers, and a head has none.
        spectral = config.clipping == "spectral" or config.method == "ww-dp-sgd" or config.spectral
        own_network = config.model is not None or config.recipe == "paper" or spectral
        return "none" if own_network or not fits(shape) or _rescaled(config) else "patches"
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


def _rescaled(config: Config) -> bool:
    return config.data_options.get("scaling", "symmetric") != "symmetric"


def head_defaults(config: Config, method: Method, size: int) -> dict[str, Any]:
    """Batch size, length, rate and momentum for a head on features of unit length."""
    epsilon = config.epsilon or 3.0
    epochs, rate = next((e, r) for most, e, r in _BY_EPSILON if epsilon < most)
    found: dict[str, Any] = {"batch_size": min(size, max(_SMALLEST, min(_LARGEST, size // 10)))}
    if method.private and method.family == "sgd":
        found |= {"lr": rate, "momentum": 0.9}
    if config.steps is None:
        found["epochs"] = epochs
    return found


def frozen(
    config: Config, dataset: Dataset, say: Callable[[str], None] = lambda text: None
) -> Fixed | None:
    """The frozen module of a run; None if it has no fixed features.

    Args:
        config: The settings, all of them chosen.
        dataset: The pictures.
        say: Told when constants are made, which takes seconds to minutes.

    Raises:
        ConfigError: The features are not for such pictures, or have no such option.
    """
    from ..features import build

    if config.features == "none":
        return None
    try:
        return build(config.features, dataset.input_shape, config.features_options, say)
    except ValueError as error:
        raise ConfigError(f"features = {config.features!r}: {error}") from error


def applied(fixed: Fixed, dataset: Dataset, display: Display | None = None) -> Dataset:
    """The data set with features in place of pictures, computed on all cores.

    They are kept in memory only: features of private records are private.
    """
    from ..features import precompute

    display = display or Display(quiet=True)
    total = len(dataset.train) + (0 if dataset.test is None else len(dataset.test))
    display.say(f"computing the features of {total} pictures")
    done = 0
    with display.bar(0, total, "picture") as bar:

        def moved(rows: int) -> None:
            nonlocal done
            done += rows
            bar.step(done, dict)

        return precompute(dataset, fixed, moved)
