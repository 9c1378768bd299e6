"""From an estimator's arguments to a network, settings and noise."""

from __future__ import annotations

import itertools
import secrets
import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sklearn.utils import check_random_state

if TYPE_CHECKING:
    import torch

    from ..data import Dataset
    from ..methods import Method
    from ..training.config import Config
    from ..training.steps import PrivateSteps

# Searching σ with "pld" takes about a second.
_ACCOUNTANT = "pld"


def detach(steps: PrivateSteps) -> None:
    """Gives the module back; warnings about the spectrum name the estimator's arguments."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps.engine.detach()
    for warning in caught:
        warnings.warn(
            f"{warning.message} (here: use wider layers in hidden=, or method='dp-sgd', whose C is"
            " fixed)",
            stacklevel=4,
        )


def network(dataset: Dataset, hidden: Any, seed: int | None) -> tuple[Any, str]:
    """A new perceptron, and the layer of largest rank, which a spectral probe should read."""
    import torch

    from ..features import needs_bias
    from ..models import Linear, Perceptron
    from ..randomness._forward import alone

    if hidden is None:
        if dataset.feature_map is not None:
            made = dataset.feature_map
            bias = made["kind"] == "bins" and needs_bias(made["layout"])
            return Linear(dataset.input_shape, dataset.outputs, bias), "fc"
        hidden = (128, 64)
    try:
        widths = tuple(int(width) for width in hidden)
    except (TypeError, ValueError):
        raise ValueError(
            f"hidden must be a sequence of widths, such as (128, 64), not {hidden!r}"
        ) from None
    if any(width < 1 for width in widths):
        raise ValueError(f"hidden must contain positive widths, not {hidden}")
    features = dataset.input_shape
    with alone():
        torch.manual_seed(secrets.randbits(63) if seed is None else seed)
        model = Perceptron(features, dataset.outputs, widths)
    sides = [*features, *widths, dataset.outputs]
    ranks = [min(pair) for pair in itertools.pairwise(sides)]
    return model, model.layers[ranks.index(max(ranks))]


def seed(random_state: Any) -> int | None:
    """The seed of a fit; None stays None, so that the noise is secret.

    A RandomState is drawn from, so that its next fit gets other noise.
    """
    return (
        None if random_state is None else int(check_random_state(random_state).randint(2**31 - 1))
    )


def config(given: Any, layer: str, seed: int | None) -> Config:
    """The settings of a fit, as far as the estimator's arguments say them."""
    from ..training.config import Config

    return Config(
        method=given.method,
        epsilon=given.epsilon,
        delta=given.delta,
        epochs=given.epochs,
        num_examples=given.num_examples,
        lr=given.lr,
        batch_size=given.batch_size,
        accountant=_ACCOUNTANT,
        seed=seed,
        spectral={"probe": layer} if given.method == "ww-dp-sgd" else {},
    )


def with_sigma(config: Config, dataset: Dataset, method: Method, model: torch.nn.Module) -> Config:
    """The settings with every choice made, and with the noise that they need."""
    from ..training.recipe import resolve, total_steps
    from ..training.records import nominal_size

    resolved = resolve(config, dataset, method, model)
    size, _ = nominal_size(resolved, dataset)
    assert (
        resolved.batch_size is not None
        and resolved.epsilon is not None
        and resolved.delta is not None
    )
    rate = min(1.0, resolved.batch_size / size)
    sigma = _sigma(resolved.epsilon, resolved.delta, rate, total_steps(resolved, size))
    return resolved.changed(epsilon=None, sigma=sigma)


@lru_cache(maxsize=256)
def _sigma(epsilon: float, delta: float, rate: float, steps: int) -> float:
    from ..accounting import noise_multiplier_for

    return noise_multiplier_for(epsilon, delta, rate, steps, _ACCOUNTANT)
