"""Label skew: a training set whose class shares are drawn from a Dirichlet distribution."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ..errors import InputError
from .dataset import Dataset, Split


def dirichlet_skew(dataset: Dataset, alpha: float, seed: int, *, size: int | None = None) -> Dataset:
    """Subsamples the training records so that the class shares follow one draw of Dirichlet(alpha, ..., alpha).

    ``size`` records are kept; the default is the number of records of the smallest class. That many are feasible for
    every alpha and every draw, so all severities train on the same N. A larger size may be feasible for one draw.

    Guarantee: no record is kept twice. A repeated record would weigh twice in a sum, and the ε of one record would not
    hold. ε is for a record of the skewed set. Draw and choice come from the public seed.
    Edge cases: a size that this draw can't give without repeating is refused, and the largest feasible one is named.
    """
    import torch

    if dataset.task == "regression":
        raise InputError("label skew needs classes; this is a regression")
    if not (isinstance(alpha, int | float) and math.isfinite(alpha) and alpha > 0):
        raise InputError(f"the Dirichlet alpha must be a positive number, not {alpha!r}")
    count = 2 if dataset.task == "binary" else dataset.outputs
    y = dataset.train.y.long().cpu().numpy()
    available = np.bincount(y, minlength=count)
    if available.min() == 0:
        raise InputError(
            f"class {int(available.argmin())} has no training record, so no skew of all classes can be drawn"
        )
    generator = np.random.default_rng(seed)
    shares = generator.dirichlet(np.full(count, float(alpha)))
    if not np.isfinite(shares).all():  # every gamma draw underflowed; the limit is one class
        shares = np.eye(count)[generator.integers(count)]
    wanted = int(available.min()) if size is None else size
    counts = _whole(shares, wanted)
    if (counts > available).any():
        with np.errstate(divide="ignore"):
            feasible = int(np.floor((available / shares).min()))
        raise InputError(
            f"{wanted} records with these shares need a class more often than it is there; at most about {feasible} are feasible"
        )
    kept = [generator.permutation(np.flatnonzero(y == k))[:n] for k, n in enumerate(counts)]
    rows = torch.from_numpy(np.sort(np.concatenate(kept)))
    note = (
        f"label skew: Dirichlet alpha {alpha:g}, seed {seed}, {wanted} of the training records, none twice; "
        "ε is for a record of this skewed set"
    )
    seen = () if dataset.public else ("the number of records of each class decided which were kept",)
    return replace(
        dataset,
        train=Split(dataset.train.x[rows], dataset.train.y[rows]),
        notes=(*dataset.notes, note),
        private_statistics=(*dataset.private_statistics, *seen),
        nominal_size=wanted if dataset.public or size is not None else None,
    )


def _whole(shares: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers with this total, as near to the shares as can be (largest remainders)."""
    exact = shares * total
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return counts
