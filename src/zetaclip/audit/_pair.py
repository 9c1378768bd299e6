"""An audit by many short runs on two neighbouring data sets, the worst ones for DP-SGD."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ..accounting import epsilon, noise_multiplier_for
from ..engine import PrivacyEngine
from ..errors import ConfigError
from ..training.clipping import build_clipping
from ..training.config import Config
from ..training.recipe import build_method, resolve, steps_per_epoch, total_steps
from ..training.records import load_data, nominal_size
from ._bounds import SURE, two_data_sets

# Gradients of the records that both data sets have, and of the one that only one has, over C. They
# point in opposite directions, so a mistake that lets a record change what others add shows most.
_OTHERS, _EXTRA = -1.0, 10.0
_MOST = 1e5  # updates in all runs with the record


def audit_pair(
    make: Callable[..., Any] | None = None,
    *,
    noise_multiplier: float,
    steps: int = 1,
    sample_rate: float = 1.0,
    records: int = 7,
    runs: int = 1000,
    delta: float = 1e-5,
    confidence: float = 0.99,
    seed: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains many times with and without one record, and tells the ε that the releases show.

    A model with one weight is trained on ``records`` equal records. Their gradients point in one
    direction; that of the further record points in the other. The score of a run is the sum of what
    it releases. This finds what one run with canaries can't: a sum that is divided by the number of
    records drawn, and records that are clipped together.

    Args:
        make: Makes the engine of a run, from a seed; default: ``PrivacyEngine``.
        noise_multiplier: σ.
        steps: Updates of each run.
        sample_rate: q.
        records: The number of records that both data sets have. An odd number leaves one record
            alone if an engine pairs them.
        runs: How many runs with the record, and as many without.
        delta: δ of the claim.
        confidence: How often the bound holds, at least.
        seed: Makes the audit repeatable.
        options: Further arguments of ``make_private``.

    Returns:
        ``epsilon_claimed`` (what the rows of the ledger give, also for a form that claims
        nothing), ``epsilon_found``, ``excess`` (whether more is found at 99.9 %), ``confidence``,
        ``bound``, ``delta`` and ``runs``.

    **Guarantee.** At q = 1 the bound takes the training for a Gaussian mechanism, which DP-SGD with
    a fixed norm is. At a smaller q it assumes nothing, and can't find more than about the logarithm
    of the number of runs.
    """
    make = make or (lambda seed: PrivacyEngine(accountant="rdp", seed=seed))
    streams = np.random.SeedSequence(seed).generate_state(2 * runs)
    without: list[float] = []
    with_record: list[float] = []
    engine: Any = None
    for number, stream in enumerate(streams):
        engine = make(int(stream))
        extra = number % 2
        (with_record if extra else without).append(
            _score(engine, extra, noise_multiplier, steps, sample_rate, records, options)
        )
    claimed = epsilon(engine.ledger.events(), delta, "rdp" if sample_rate < 1 else "prv")
    normal = sample_rate == 1
    return {
        "epsilon_claimed": claimed,
        "epsilon_found": two_data_sets(without, with_record, delta, confidence, normal),
        "excess": two_data_sets(without, with_record, delta, SURE, normal) > claimed,
        "confidence": confidence,
        "bound": "two data sets, gaussian" if normal else "two data sets",
        "delta": delta,
        "runs": 2 * runs,
    }


def audit_pair_of(config: Config, *, runs: int = 1000, confidence: float = 0.99) -> dict[str, Any]:
    """``audit_pair`` with the method, σ, q and length that a training with these settings has.

    Args:
        config: The settings, as for ``zetaclip train``.
        runs: How many runs with the record, and as many without.
        confidence: How often the bound holds, at least.

    Raises:
        ConfigError: The settings can't be audited in this way; the message says why.
    """
    dataset, method = load_data(config), build_method(config)
    config = resolve(config, dataset, method)
    clipping = build_clipping(config, method)
    if not method.private or getattr(clipping, "probe", None) is not None:
        raise ConfigError(
            f"method {config.method!r} can't be audited on a model with one weight; use"
            " --attacker transcript, or another method"
        )
    size, _ = nominal_size(config, dataset)
    steps, rate = total_steps(config, size), min(1.0, (config.batch_size or size) / size)
    if steps * runs > _MOST:
        raise ConfigError(
            f"{steps} steps in each of {2 * runs} runs would take too long; audit a few steps"
            " (--steps 1)"
        )
    assert config.delta is not None
    if config.sigma is None:
        assert config.epsilon is not None
        sigma = noise_multiplier_for(config.epsilon, config.delta, rate, steps, config.accountant)
    else:
        sigma = config.sigma
    return audit_pair(
        noise_multiplier=sigma,
        steps=steps,
        sample_rate=rate,
        runs=runs,
        delta=config.delta,
        confidence=confidence,
        seed=config.seed,
        method=method,
        clipping=clipping,
        normalize=config.normalize,
        empty=config.empty,
        epochs=steps / steps_per_epoch(config, size),
        target_delta=config.delta,
    )


def _score(
    engine: Any,
    extra: int,
    noise_multiplier: float,
    steps: int,
    sample_rate: float,
    records: int,
    options: dict[str, Any],
) -> float:
    """What one run on a worst-case data set releases, added up."""
    x = torch.tensor([[_OTHERS]] * records + [[_EXTRA]] * extra)
    model = nn.Linear(1, 1, bias=False)
    method = options.get("method")
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1)
        if method is None
        else method.optimizer(model.parameters(), 0.1)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of literal forms, which are audited on purpose
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(x), batch_size=records),
            noise_multiplier=noise_multiplier,
            sample_rate=sample_rate,
            num_examples=records,
            loss_reduction="sum",
            **({"clipping": 1.0} if method is None else {}) | options,
        )
    total, done = 0.0, 0
    while done < steps:
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            total += float(model.weight.grad)
            done += 1
            if done == steps:
                break
    return total
