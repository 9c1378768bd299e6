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
    """Subsamples the training records so that the class shares follow one draw of Dirichlet(alpha, ..., alpha).

    ``size`` records are kept; the default is the number of records of the smallest class. That many are feasible for
    every alpha and every draw, so all severities train on the same N. ``feasible_size`` tells how many more the draws of one
    table allow.

    Guarantee: no record is kept twice. A repeated record would weigh twice in a sum, and the ε of one record would not
    hold. ε is for a record of the skewed set. Draw and choice come from the public seed.
    Edge cases: a size that this draw can't give without repeating is refused, and the largest feasible one is named.
    """
    import torch

    y, available = _counted(dataset)
    generator = np.random.default_rng(seed)
    shares = _shares(len(available), alpha, generator)
    wanted = int(available.min()) if size is None else size
    counts = _whole(shares, wanted)
    if (counts > available).any():
        raise InputError(
            f"{wanted} records with these shares need a class more often than it is there; at most {_largest(shares, available)} are "
            "feasible"
        )
    kept = [generator.permutation(np.flatnonzero(y == k))[:n] for k, n in enumerate(counts)]
    rows = torch.from_numpy(np.sort(np.concatenate(kept)))
    note = (
        f"label skew: Dirichlet alpha {alpha:g}, seed {seed}, {wanted} of the training records, none twice; "
        "ε is for a record of this skewed set"
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
    """The largest size that every one of these draws can give without repeating a record, for a table of severities."""
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
            f"class {int(available.argmin())} has no training record, so no skew of all classes can be drawn"
        )
    return y, available


def _shares(count: int, alpha: float, generator: np.random.Generator) -> np.ndarray:
    if not (isinstance(alpha, int | float) and math.isfinite(alpha) and alpha > 0):
        raise InputError(f"the Dirichlet alpha must be a positive number, not {alpha!r}")
    shares = generator.dirichlet(np.full(count, float(alpha)))
    if not np.isfinite(shares).all():  # every gamma draw underflowed; the limit is one class
        shares = np.eye(count)[generator.integers(count)]
    return shares


def _largest(shares: np.ndarray, available: np.ndarray) -> int:
    """The largest total whose rounded counts are there."""
    with np.errstate(divide="ignore"):
        total = int(min((available / shares).min(), available.sum())) + len(shares)
    while (_whole(shares, total) > available).any():
        total -= 1
    return total


def _whole(shares: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers with this total, as near to the shares as can be (largest remainders)."""
    exact = shares * total
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return counts
