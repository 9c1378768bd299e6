"""Makes every choice that the settings leave open, and builds the method and the network."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .clipping import build_clipping
from .config import Config
from .fixed import choose, frozen, head_for, rate_of_auto
from .records import nominal_size

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..data import Dataset
    from ..features import Fixed
    from ..methods import Method

# Default of expected batch size and epochs: the paper's if stated, else chosen for the set's size.
_LENGTHS = {
    "digits": (256, 30.0),
    "mnist": (256, 8.0),
    "fashion-mnist": (256, 8.0),
    "emnist": (256, 8.0),
    "emnist-letters-subset": (256, 8.0),
    "cifar10": (256, 6.0),
    "cifar100": (256, 6.0),
    "imagenet100": (256, 6.0),
    "adult": (256, 20.0),
    "heart": (32, 20.0),
    "ved": (256, 20.0),
}
# The paper does not state the learning rates of its recipe; these are starting points.
_PAPER_RATES = {
    "digits": 0.25,
    "mnist": 0.25,
    "fashion-mnist": 0.25,
    "cifar10": 0.5,
    "cifar100": 0.5,
    "imagenet100": 0.5,
}
_PAPER_RATES |= {"adult": 0.1, "heart": 0.1, "ved": 0.1}
DEFAULT_EPSILON = 3.0


def steps_per_epoch(config: Config, size: int) -> int:
    """Updates per epoch, for ``size`` records."""
    assert config.batch_size is not None
    return max(1, -(-size // config.batch_size))


def total_steps(config: Config, size: int) -> int:
    """Updates of the whole run, for ``size`` records."""
    if config.steps is not None:
        return config.steps
    assert config.epochs is not None
    return max(1, math.ceil(config.epochs * steps_per_epoch(config, size) - 1e-9))


def build_method(config: Config) -> Method:
    """The method with its options.

    Raises:
        ConfigError: There is no such method or option.
    """
    from ..methods import _table as methods

    if ":" in config.method:
        return _own_method(config)
    options = dict(config.method_options)
    if (
        config.clip is not None
        and config.clipping is None
        and config.method not in methods.names(private=False)
    ):
        options.setdefault("clip", config.clip)
    try:
        return methods.get(config.method, **options)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error


def _own_method(config: Config) -> Method:
    """The method of ``module:object``: a ``Method``, or a callable that returns one."""
    from ..methods import Method
    from ..models import imported

    found = imported(config.method, "method")
    options = dict(config.method_options)
    if config.clip is not None and config.clipping is None:
        options.setdefault("clip", config.clip)
    if not isinstance(found, Method):
        try:
            found = found(**options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"method {config.method!r}: {error}") from error
    elif options:
        raise ConfigError(
            f"method {config.method!r} is an object, so {', '.join(options)} can't be set here; "
            "give a function that takes them and returns a Method"
        )
    if not isinstance(found, Method):
        raise ConfigError(
            f"method {config.method!r} is {type(found).__name__}, not a zetaclip.Method, nor a"
            " callable that returns one"
        )
    return found


def check_choices(config: Config, method: Method) -> None:
    """Checks what needs no data: the network's name, and the settings of clipping.

    Raises:
        ConfigError: The settings of clipping are wrong.
        InputError: There is no such network.
    """
    from ..models import check

    if config.model is not None:
        check(config.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said when the run is put together
        build_clipping(config, method)


def build_model(config: Config, dataset: Dataset, fixed: Fixed | None = None) -> nn.Module:
    """The network, on its device; a head if it gets fixed features.

    Args:
        config: The settings, all of them chosen.
        dataset: The data.
        fixed: The fixed features that the network gets; None for the records themselves.

    Raises:
        ConfigError: There is no such network, or it can't be built.
    """
    from ..models import build

    assert config.model is not None
    shape = tuple(dataset.train.x.shape[1:]) if fixed is None else (fixed.columns,)
    try:
        model = build(config.model, shape, dataset.outputs)
    except (ValueError, ImportError, AttributeError) as error:
        raise ConfigError(f"model {config.model!r}: {error}") from error
    return model.to(config.device)


def resolve(
    config: Config,
    dataset: Dataset,
    method: Method,
    model: nn.Module | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Config:
    """Makes every choice that ``config`` leaves open; what is set stays as it is.

    Args:
        config: The settings.
        dataset: The data.
        method: The method.
        model: The network, if it is not the one that ``config`` names.
        say: Told when constants of features are made, which takes seconds to minutes.

    Raises:
        ConfigError: The settings don't fit the data or the method.
    """
    from ..methods._updates import defaults
    from ..models import default_for

    if model is None:
        config = config.changed(features=choose(config, dataset))
        network = default_for(dataset) if config.features == "none" else head_for(config, dataset)
        config = config.changed(model=config.model or network)
    else:
        there = dataset.feature_map is not None
        config = config.changed(features=choose(config, dataset) if there else "none")
    if config.epsilon is None and config.sigma is None and method.private:
        config = config.changed(epsilon=DEFAULT_EPSILON)
    size, _ = nominal_size(config, dataset)
    if config.method == "auto":
        config = _resolve_auto(config, dataset, model, size, say)
    elif config.minutes is not None:
        raise ConfigError("minutes is for the method 'auto', which chooses the length of a run")
    batch, epochs = _LENGTHS.get(dataset.name, (min(256, max(16, size // 40)), 20.0))
    paper = config.recipe == "paper"
    options = {**defaults(method.family), **method.update}
    chosen: dict[str, Any] = {
        "batch_size": min(batch, size),
        "lr": _paper_rate(dataset, method) if paper else method.lr,
        "schedule": "constant" if paper else "late" if config.method == "auto" else "linear",
        "decouple": method.private and not paper,
        "momentum": float(options.get("momentum", 0.0)),
        "weight_decay": float(options["weight_decay"]),
        "weight_average": method.weight_average,
        "delta": min(1e-5, size**-1.1),
        "eval_every": 1,
    }
    if config.steps is None:
        chosen["epochs"] = epochs
    if config.features != "none" and not paper:
        chosen |= _for_features(config, dataset, method, model, size, say)
    if config.method == "auto":
        chosen["lr"] = rate_of_auto(config, size)
    filled = {name: value for name, value in chosen.items() if getattr(config, name) is None}
    resolved = config.changed(**filled)
    if resolved.batch_size is not None and resolved.batch_size > size:
        raise ConfigError(
            f"batch_size {resolved.batch_size} is more than the {size} training records; q would"
            " exceed 1"
        )
    if not method.private:
        for name in ("epsilon", "sigma", "max_epsilon", "clip", "clipping"):
            if getattr(config, name) is not None:
                raise ConfigError(
                    f"method {config.method!r} is not private, so `{name}` means nothing for it;"
                    " leave it out"
                )
        if config.views > 1:
            raise ConfigError(
                f"`views` are averaged before clipping, and method {config.method!r} does not clip;"
                " leave them out"
            )
    return resolved


def _for_features(
    config: Config,
    dataset: Dataset,
    method: Method,
    model: nn.Module | None,
    size: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Defaults of a network on fixed features; those of the method "auto" are chosen before."""
    from . import lengths

    if config.method == "auto":
        return {}
    if not method.private:
        return {"lr": lengths.PLAIN_RATE} if method.family == "sgd" else {}
    _, _, network = _measured(config, dataset, model, say)
    return lengths.head_defaults(config, method, size, network, dataset.task == "regression")


def _measured(
    config: Config, dataset: Dataset, model: nn.Module | None, say: Callable[[str], None]
) -> tuple[nn.Module, Tensor, tuple[int, int | None, float]]:
    """The network, made-up inputs for it, and what ``lengths.measure`` tells of both.

    The network is built from a fixed seed for that, so that a run that is resumed finds the same.
    """
    import torch

    from ..randomness._forward import alone
    from . import lengths

    fixed = frozen(config, dataset, say)
    if model is None:
        with alone():
            torch.manual_seed(0)
            model = build_model(config, dataset, fixed)
    columns = None if fixed is None else fixed.columns
    described: Mapping[str, Any] = {} if fixed is None else fixed.describe()
    if dataset.feature_map is not None:
        columns, described = dataset.input_shape[0], dataset.feature_map
    inputs = lengths.made_up(dataset, columns, float(described.get("length", 1.0)))
    try:
        return model, inputs, lengths.measure(model, inputs)
    except ValueError as error:
        raise ConfigError(
            f"the step size of method {config.method!r} can't be read off this network: {error}"
        ) from error


def _resolve_auto(
    config: Config,
    dataset: Dataset,
    model: nn.Module | None,
    size: int,
    say: Callable[[str], None],
) -> Config:
    """The choices of the method "auto": batch, length, and what its step size is made from."""
    from . import lengths

    if config.recipe == "paper":
        raise ConfigError("recipe 'paper' is for the paper's methods; name one, e.g. ww-dp-sgd")
    if config.minutes is not None and (config.epochs is not None or config.steps is not None):
        raise ConfigError("give minutes, or epochs or steps, not both")
    model, inputs, (depth, width, gain) = _measured(config, dataset, model, say)
    records = None if config.minutes is None else lengths.records_in(config.minutes, model, inputs)
    batch, epochs = lengths.length(
        size,
        config.epsilon,
        depth == 1,
        inputs=width,
        batch=config.batch_size,
        epochs=config.epochs,
        steps=config.steps,
        records=records,
    )
    planned = steps_per_epoch(config.changed(batch_size=batch), size)
    passes = epochs if epochs is not None else (config.steps or 1) / planned
    return config.changed(
        batch_size=batch,
        epochs=epochs,
        eval_every=config.eval_every or max(1, round(passes / lengths.EVALUATIONS)),
        method_options={"gain": gain, **config.method_options},
    )


def _paper_rate(dataset: Dataset, method: Method) -> float:
    """The method's published learning rate; in the SGD family it scales with the data set's."""
    own = _PAPER_RATES.get(dataset.name, 0.25 if dataset.train.x.ndim > 2 else 0.1)
    if method.paper_lr is None:
        return own if method.family == "sgd" else method.lr
    return (
        method.paper_lr * own / _PAPER_RATES["mnist"] if method.family == "sgd" else method.paper_lr
    )


def rate_at(config: Config, step: int, steps: int) -> float:
    """The learning rate of update number ``step`` of ``steps``.

    It depends on public numbers only, so nothing needs to be saved.

    Args:
        config: The settings.
        step: The update, from 0.
        steps: The planned number of updates.
    """
    from ..methods._auto import left

    assert config.lr is not None
    done = step / steps
    if config.schedule == "late":
        return config.lr * left(done)
    if config.schedule == "linear":
        return config.lr * (1 - done)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * done))
    return config.lr
