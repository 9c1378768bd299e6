"""Label skew: a training set whose class shares are drawn from a Dirichlet distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..errors import InputError
from .dataset import Dataset, Split


def dirichlet_skew(
    dataset: Dataset, alpha: float, seed: int, *, size: int | None = None
) -> Dataset:
    """Subsamples the training records so that class shares follow a Dirichlet(alpha, ..., alpha).

    Args:
        dataset: A classification.
        alpha: Concentration; smaller values give more skew.
        seed: Public seed of the shares and of the chosen records.
        size: Number of records to keep. The default is the number of records of the smallest class,
            which is feasible for every alpha and draw, so that all severities train on the same
            number. ``feasible_size`` gives the largest size for a table of draws.

    Returns:
        The dataset with fewer training records.

    Raises:
        InputError: The size needs more records of a class than there are (the message gives the
            largest feasible size), a class is empty, or the task is a regression.

    **Guarantee.** No record is kept twice: a repeated record would count twice in a sum, and the ε
    of one record would not hold. ε is for a record of the skewed set.
    """
    import torch

    y, available = _counted(dataset)
    generator = np.random.default_rng(seed)
    shares = _shares(len(available), alpha, generator)
    wanted = int(available.min()) if size is None else size
    counts = _whole(shares, wanted)
    if (counts > available).any():
        raise InputError(
            f"{wanted} records with these shares need more records of a class than there are; "
            f"at most {_largest(shares, available)} are feasible"
        )
    kept = [generator.permutation(np.flatnonzero(y == k))[:n] for k, n in enumerate(counts)]
    rows = torch.from_numpy(np.sort(np.concatenate(kept)))
    note = (
        f"label skew: Dirichlet alpha {alpha:g}, seed {seed}, {wanted} of the training records, "
        "none twice; ε is for a record of this skewed set"
    )
    seen = (
        () if dataset.public else ("the number of records of each class decided which were kept",)
    )
    return replace(
        dataset,
        train=Split(dataset.train.x[rows], dataset.train.y[rows]),
        notes=(*dataset.notes, note),
        private_statistics=(*dataset.private_statistics, *seen),
        nominal_size=wanted if dataset.public or size is not None else None,
    )


def feasible_size(dataset: Dataset, alphas: Sequence[float], seeds: Sequence[int]) -> int:
    """The largest size of ``dirichlet_skew`` that is feasible for every alpha with every seed.

    Args:
        dataset: A classification.
        alphas: Concentrations.
        seeds: Public seeds.

    Returns:
        The number of records.

    Raises:
        InputError: There is no alpha or no seed, a class is empty, or the task is a regression.
    """
    _, available = _counted(dataset)
    draws = [
        _shares(len(available), alpha, np.random.default_rng(seed))
        for alpha in alphas
        for seed in seeds
    ]
    if not draws:
        raise InputError("at least one alpha and one seed are needed")
    return min(_largest(shares, available) for shares in draws)


def _counted(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Each training record's class, and the number of records of each class."""
    if dataset.task == "regression":
        raise InputError("label skew needs classes; this is a regression")
    y = dataset.train.y.long().cpu().numpy()
    available = np.bincount(y, minlength=2 if dataset.task == "binary" else dataset.outputs)
    if available.min() == 0:
        raise InputError(
            f"class {int(available.argmin())} has no training record, "
            "so no skew of all classes can be drawn"
        )
    return y, available


def _shares(count: int, alpha: float, generator: np.random.Generator) -> np.ndarray:
    if not (isinstance(alpha, int | float) and math.isfinite(alpha) and alpha > 0):
        raise InputError(f"the Dirichlet alpha must be a positive number, not {alpha!r}")
    shares = generator.dirichlet(np.full(count, float(alpha)))
    if not np.isfinite(
        shares
    ).all():  # every gamma draw underflowed; in the limit one class has all
        shares = np.eye(count)[generator.integers(count)]
    return shares


def _largest(shares: np.ndarray, available: np.ndarray) -> int:
    """The largest total whose rounded counts are available."""
    with np.errstate(divide="ignore"):
        total = int(min((available / shares).min(), available.sum())) + len(shares)
    while (_whole(shares, total) > available).any():
        total -= 1
    return total


def _whole(shares: np.ndarray, total: int) -> np.ndarray:
    """Integers with this total that are closest to the shares (largest remainder method)."""
    exact = shares * total
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return counts
