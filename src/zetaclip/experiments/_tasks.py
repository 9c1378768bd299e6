"""The tasks of `no-tuning`: real sets, and synthetic tables with what real ones have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ._exact import Problem


@dataclass(frozen=True)
class Task:
    """One data set with one model.

    Args:
        name: Of the data.
        hidden: Widths of hidden layers; none is a linear model on records of length 1.
        seeds: Seeds, each with a split of its own where the set is small.
        chosen_by: Whether constants of the law were chosen by this task; the others are the half
            that nobody tuned on.
    """

    name: str
    hidden: tuple[int, ...]
    seeds: int
    chosen_by: bool

    @property
    def label(self) -> str:
        """The data and the model."""
        return self.name + ("" if not self.hidden else f", {'-'.join(map(str, self.hidden))}")


TASKS = tuple(
    Task(name, hidden, seeds, chosen_by)
    for chosen_by, listed in (
        (
            True,
            [("heart", (), 10), ("tiny", (), 10), ("ved", (), 5), ("rare", (), 5)]
            + [("sparse", (), 5), ("heavy", (), 5), ("outliers", (), 5), ("twenty", (), 5)]
            + [("digits", (), 10), ("adult", (), 3), ("heart", (64,), 10), ("rare", (64,), 3)]
            + [("ved", (64,), 3), ("digits", (64,), 3)],
        ),
        (
            False,
            [("breast-cancer", (), 10), ("wine", (), 10), ("diabetes", (), 10)]
            + [("small-rare", (), 10), ("wide", (), 10), ("five", (), 5), ("mnist", (), 2)]
            + [("breast-cancer", (128, 64), 5), ("wine", (128, 64), 5)]
            + [("five", (128, 64), 3), ("diabetes", (128, 64), 5)],
        ),
    )
    for name, hidden, seeds in listed
)


def problem_of(task: Task, seed: int) -> Problem:
    """The records of a task; inputs are between -1 and 1, or of length 1 for a linear model.

    Raises:
        InputError: A data set is not there.
    """
    found = _SOURCES[task.name](seed)
    if task.hidden:
        return found
    return Problem(
        _unit(found.x), found.y, _unit(found.test_x), found.test_y, found.outputs, found.regression
    )


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True).clamp_min(1e-6)


def _split(x: Tensor, y: Tensor, seed: int, outputs: int, regression: bool = False) -> Problem:
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    held, kept = order[: len(y) // 5], order[len(y) // 5 :]
    return Problem(x[kept], y[kept], x[held], y[held], outputs, regression)


def _stored(name: str, shuffled: bool = False) -> Callable[[int], Problem]:
    def make(seed: int) -> Problem:
        from ..data import load

        data = load(name)
        assert data.test is not None
        y, test_y = data.train.y, data.test.y
        if data.target_range is not None:
            low, high = data.target_range
            y, test_y = ((2 * (t - low) / (high - low) - 1).clamp(-1, 1) for t in (y, test_y))
        x, test_x = data.train.x.flatten(1).float(), data.test.x.flatten(1).float()
        regression = data.task == "regression"
        if shuffled:
            return _split(
                torch.cat((x, test_x)), torch.cat((y, test_y)), seed, data.outputs, regression
            )
        return Problem(x, y, test_x, test_y, data.outputs, regression)

    return make


def _bundled(name: str, outputs: int, regression: bool = False) -> Callable[[int], Problem]:
    """Sets of scikit-learn; columns are scaled by their range, which is not private here."""

    def make(seed: int) -> Problem:
        from sklearn import datasets

        bunch = getattr(datasets, f"load_{name}")()
        x = torch.tensor(bunch.data, dtype=torch.float32)
        low, high = x.min(0).values, x.max(0).values
        x = 2 * (x - low) / (high - low).clamp_min(1e-6) - 1
        y = torch.tensor(bunch.target, dtype=torch.float32 if regression else torch.long)
        if regression:
            y = 2 * (y - y.min()) / (y.max() - y.min()) - 1
        return _split(x, y, seed, outputs, regression)

    return make


def _table(
    rows: int,
    columns: int,
    outputs: int = 1,
    *,
    shift: float = 0.0,
    strength: float = 1.5,
    matter: int | None = None,
    tails: bool = False,
    outliers: bool = False,
    own: bool = False,
) -> Callable[[int], Problem]:
    """A synthetic table.

    Args:
        rows: Training records.
        columns: Features.
        outputs: Classes, or 1.
        shift: Added to the logit; -4.6 gives 3 % positives.
        strength: Of the signal.
        matter: How many features matter; None for all.
        tails: Whether features have heavy tails.
        outliers: A number is predicted, and 5 % of the targets are far off.
        own: Whether each seed has a table of its own.
    """

    def make(seed: int) -> Problem:
        g = torch.Generator().manual_seed(77 + seed * own)
        total = rows + 4000

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g)

        x = normal(total, columns)
        if tails:
            x = x / normal(3, total, columns).square().mean(0).sqrt()
        w = normal(columns)
        if matter is not None:
            w[matter:] = 0
        score = strength * x @ (w / w.norm())
        if outputs > 1:
            y = torch.randint(0, outputs, (total,), generator=g)
            x = x + strength * normal(outputs, columns)[y]
        elif outliers:
            far = torch.rand(total, generator=g) < 0.05
            y = ((score + 0.3 * normal(total) + far * 8 * normal(total)) / 6).clamp(-1, 1)
        else:
            bent = score + shift + 0.4 * x[:, 0] * x[:, 1]
            y = (torch.rand(total, generator=g) < torch.sigmoid(bent)).long()
        x = (x / 4).clamp(-1, 1)
        return Problem(x[:rows], y[:rows], x[rows:], y[rows:], outputs, outliers)

    return make


_SOURCES: dict[str, Callable[[int], Problem]] = {
    "digits": _bundled("digits", 10),
    "heart": _stored("heart", shuffled=True),
    "adult": _stored("adult"),
    "ved": _stored("ved"),
    "mnist": _stored("mnist"),
    "breast-cancer": _bundled("breast_cancer", 1),
    "wine": _bundled("wine", 3),
    "diabetes": _bundled("diabetes", 1, regression=True),
    "rare": _table(8000, 30, shift=-4.6),
    "tiny": _table(200, 15, strength=2.0, own=True),
    "sparse": _table(6000, 200, matter=5),
    "heavy": _table(6000, 40, strength=1.2, tails=True),
    "outliers": _table(6000, 20, strength=1.0, outliers=True),
    "twenty": _table(10000, 40, 20, strength=0.7),
    "small-rare": _table(2000, 12, shift=-3.0, strength=2.0, own=True),
    "wide": _table(1000, 300, strength=3.0, own=True),
    "five": _table(3000, 25, 5, strength=0.5),
}
