"""The tasks of `no-tuning`: real sets, and synthetic tables with what real ones have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ._exact import Problem

USUAL = (0.5, 1.0, 3.0, 8.0)
NOISY = (0.05, 0.1, 0.2)  # at these the law alone is run, for the warning before a training


@dataclass(frozen=True)
class Task:
    """One data set with one model.

    Args:
        name: Of the data.
        hidden: Widths of hidden layers; none is a linear model on records of length 1.
        seeds: Seeds, each with a split of its own where the set is small.
        chosen_by: Whether constants of the law were chosen by this task; the others are the half
            that nobody tuned on.
        features: "bins" or "patches": a linear model on these fixed features. "cnn" is no such
            thing, but a convolutional network, which the engine trains.
        epsilons: The budgets.
    """

    name: str
    hidden: tuple[int, ...]
    seeds: int
    chosen_by: bool
    features: str = ""
    epsilons: tuple[float, ...] = USUAL

    @property
    def label(self) -> str:
        """The data and the model."""
        model = self.features or "-".join(map(str, self.hidden))
        return self.name + (model and f", {model}")

    @property
    def large(self) -> bool:
        """Whether a cell takes minutes: it then has a short ladder and the law alone."""
        return self.epsilons == _ENDS


_DEEP = (128, 64)
_ENDS = (1.0, 8.0)  # of tasks that take minutes
# These gave the constants of the law. Some were in the other half until they were looked at.
_CHOSEN_BY = (
    *(Task(name, (), 10, True, "", NOISY + USUAL) for name in ("heart", "tiny", "ved", "digits")),
    *(
        Task(name, (), 10, True, "", NOISY + USUAL)
        for name in ("breast-cancer", "wine", "diabetes")
    ),
    *(Task(name, (), 10, True, "", NOISY + USUAL) for name in ("small-rare", "wide")),
    *(Task(name, (), 5, True) for name in ("rare", "sparse", "heavy", "outliers", "twenty")),
    *(Task(name, (), 5, True) for name in ("five", "adult")),
    Task("mnist", (), 3, True),
    *(Task(name, (64,), 10, True) for name in ("heart", "ved", "digits")),
    *(Task(name, (64,), 5, True) for name in ("rare", "outliers")),
    *(Task(name, _DEEP, 10, True) for name in ("breast-cancer", "wine", "diabetes", "few-numbers")),
    *(Task(name, _DEEP, 5, True) for name in ("five", "outliers")),
    *(Task(name, (), 10, True, "bins") for name in ("heart", "ved")),
    Task("adult", (), 5, True, "bins"),
    Task("digits", (), 10, True, "patches"),
    Task("digits", (), 2, True, "cnn", _ENDS),
    Task("cifar10", (), 1, True, "patches", _ENDS),
)
# These were run for the first time when all constants were fixed.
_UNTOUCHED = (
    *(Task(name, (), 10, False) for name in ("iris", "narrow", "flipped", "friedman")),
    *(Task(name, (), 5, False) for name in ("counts", "factor", "unequal", "fifty", "lognormal")),
    Task("emnist-letters-subset", (), 1, False, "", _ENDS),
    *(Task(name, (64,), 10, False) for name in ("iris", "narrow", "friedman")),
    *(Task(name, (64,), 5, False) for name in ("xor", "unequal", "lognormal", "factor")),
    Task("mnist", (64,), 1, False, "", _ENDS),
    *(Task(name, _DEEP, 10, False) for name in ("small-friedman", "flipped")),
    *(Task(name, _DEEP, 5, False) for name in ("xor", "counts")),
    *(Task(name, (), 10, False, "bins") for name in ("narrow", "friedman")),
    *(Task(name, (), 5, False, "bins") for name in ("counts", "lognormal")),
    *(Task(name, (), 1, False, "patches", _ENDS) for name in ("mnist", "emnist-letters-subset")),
    Task("mnist", (), 2, False, "cnn", _ENDS),
    Task("cifar100", (), 1, False, "patches", _ENDS),
)
TASKS = _CHOSEN_BY + _UNTOUCHED
# For tasks that miss the goal: why, and the same table without that. The twins are no tasks of
# their own; they tell whether the reason is the right one.
TWINS = {
    "xor, 64": (
        "Its signals are products of two columns",
        "the same columns added up",
        Task("straight", (64,), 5, False),
    ),
    "narrow, 64": (
        "The column that matters most has a spread of 1/24, another one 1/3",
        "columns of the same spread",
        Task("even", (64,), 10, False),
    ),
    "lognormal": (
        "R² counts its few large targets most, and a clipped gradient follows most records",
        "logarithms of the targets",
        Task("logarithms", (), 5, False),
    ),
    "rare, 64": (
        "3 % of its records are positive",
        "half of them positive",
        Task("balanced", (64,), 5, False),
    ),
}


def problem_of(task: Task, seed: int) -> Problem:
    """The records of a task; inputs are between -1 and 1, or of length 1 for a linear model.

    Raises:
        InputError: A data set is not there.
    """
    if task.features == "patches":
        return _patches(task.name, seed)
    found = _SOURCES[task.name](seed)
    if task.hidden:
        return found
    prepare = _bins(task.name, found) if task.features == "bins" else _unit
    # The knots of bins add up to a constant.
    bias = task.features != "bins"
    return replace(found, x=prepare(found.x), test_x=prepare(found.test_x), bias=bias)


def _bins(name: str, found: Problem) -> Callable[[Tensor], Tensor]:
    """The features that `zetaclip train` gives a table; columns of synthetic ones are numbers."""
    from ..data import load
    from ..data.columns import Column, Numeric
    from ..data.inputs import TableInput
    from ..features import bins

    columns: Sequence[Column]
    if name in ("heart", "adult", "ved"):
        inputs = load(name).inputs
        assert isinstance(inputs, TableInput)
        columns = inputs.columns
    else:
        columns = [Numeric(f"x{k}", -1.0, 1.0) for k in range(found.x.shape[1])]
    return bins(columns, found.regression)


def _patches(name: str, seed: int) -> Problem:
    """Features of pictures, which a session computes once."""
    from ..data import load
    from ..features import patches, precompute

    data = load(name)
    found = precompute(data, patches(data.input_shape))
    train, test = found.train, found.test
    assert test is not None
    # These features have a constant column of their own.
    if len(train.y) < 2000:
        split = _split(
            torch.cat((train.x, test.x)), torch.cat((train.y, test.y)), seed, data.outputs
        )
        return replace(split, bias=False)
    return Problem(train.x, train.y, test.x, test.y, data.outputs, bias=False)


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


def _made(
    rows: int, draw: Callable[[torch.Generator, int], tuple[Tensor, Tensor]], outputs: int = 1
) -> Callable[[int], Problem]:
    """A synthetic table by a function of its own, which returns columns and targets.

    A table of fewer than 2,000 records is another one for each seed. Numbers as targets are scaled
    by the range of the first records, 1 % off either end.
    """

    def make(seed: int) -> Problem:
        g = torch.Generator().manual_seed(4242 + seed * (rows < 2000))
        x, y = draw(g, rows + 4000)
        x = (x / 3).clamp(-1, 1)
        regression = y.is_floating_point()
        if regression:
            low, high = y[:rows].quantile(0.01), y[:rows].quantile(0.99)
            y = (2 * (y - low) / (high - low) - 1).clamp(-1, 1)
        return Problem(x[:rows], y[:rows], x[rows:], y[rows:], outputs, regression)

    return make


def _coin(g: torch.Generator, logit: Tensor) -> Tensor:
    return (torch.rand(len(logit), generator=g) < torch.sigmoid(logit)).long()


def _xor(g: torch.Generator, total: int) -> tuple[Tensor, Tensor]:
    """Signs of products: a linear model learns nothing."""
    x = torch.randn(total, 10, generator=g)
    return x, _coin(g, 3 * x[:, 0] * x[:, 1] + 2 * x[:, 2] * x[:, 3])


def _narrow(g: torch.Generator, total: int) -> tuple[Tensor, Tensor]:
    """Four columns on scales from 1 to 1/8."""
    x = torch.randn(total, 4, generator=g)
    return x / torch.tensor([1.0, 2.0, 4.0, 8.0]), _coin(g, x @ torch.tensor([1.0, -1.0, 1.0, 1.5]))


def _straight(g: torch.Generator, total: int) -> tuple[Tensor, Tensor]:
    """``_xor`` with sums for products; the logit has the same variance."""
    x = torch.randn(total, 10, generator=g)
    return x, _coin(g, 3 * x[:, 0] + 2 * x[:, 2])


def _even(g: torch.Generator, total: int) -> tuple[Tensor, Tensor]:
    """``_narrow`` with columns on the same scale."""
    x, y = _narrow(g, total)
    return x * torch.tensor([1.0, 2.0, 4.0, 8.0]), y


def _flipped(g: torch.Generator, total: int) -> tuple[Tensor, Tensor]:
    """A fifth of the labels are wrong."""
    x = torch.randn(total, 20, generator=g)
    wrong = torch.rand(total, generator=g) < 0.2
    return x, ((x @ torch.randn(20, generator=g) > 0) ^ wrong).long()


def _factor(g: torch.Generator, total: int) -> tuple[Tensor, Tensor]:
    """Sixty columns that mostly follow two common factors."""
    common = torch.randn(total, 2, generator=g)
    x = common @ torch.randn(2, 60, generator=g) + 0.5 * torch.randn(total, 60, generator=g)
    return x, _coin(g, 1.5 * common[:, 0] + x[:, :3].sum(1) / 2 - 1)


def _counts(g: torch.Generator, total: int) -> tuple[Tensor, Tensor]:
    """Counts with many zeros."""
    x = torch.poisson(torch.rand(total, 25, generator=g).square() * 2, generator=g)
    return x, _coin(g, (x - 0.66) @ torch.randn(25, generator=g) / 2)


def _unequal(g: torch.Generator, total: int) -> tuple[Tensor, Tensor]:
    """Four classes with shares of 70, 20, 7 and 3 %."""
    shares = torch.tensor([0.7, 0.2, 0.07, 0.03])
    y = torch.multinomial(shares, total, replacement=True, generator=g)
    return 0.8 * torch.randn(4, 15, generator=g)[y] + torch.randn(total, 15, generator=g), y


def _fifty(g: torch.Generator, total: int) -> tuple[Tensor, Tensor]:
    """Fifty classes that overlap."""
    y = torch.randint(0, 50, (total,), generator=g)
    return 0.6 * torch.randn(50, 60, generator=g)[y] + torch.randn(total, 60, generator=g), y


def _friedman(g: torch.Generator, total: int) -> tuple[Tensor, Tensor]:
    """Friedman's first function: five of ten columns matter, not all of them linearly."""
    u = torch.rand(total, 10, generator=g)
    y = 10 * torch.sin(math.pi * u[:, 0] * u[:, 1]) + 20 * (u[:, 2] - 0.5).square()
    return 6 * u - 3, y + 10 * u[:, 3] + 5 * u[:, 4] + torch.randn(total, generator=g)


def _lognormal(g: torch.Generator, total: int) -> tuple[Tensor, Tensor]:
    """A number whose logarithm follows the columns, such as a price."""
    x = torch.randn(total, 15, generator=g)
    w = torch.randn(15, generator=g)
    return x, torch.exp(0.7 * x @ (w / w.norm()) + 0.3 * torch.randn(total, generator=g))


def _logarithms(g: torch.Generator, total: int) -> tuple[Tensor, Tensor]:
    """``_lognormal`` with the logarithms of the targets."""
    x, y = _lognormal(g, total)
    return x, y.log()


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
    "few-numbers": _table(400, 12, strength=1.0, outliers=True, own=True),
    # The untouched half's own.
    "emnist-letters-subset": _stored("emnist-letters-subset"),
    "iris": _bundled("iris", 3),
    "narrow": _made(500, _narrow),
    "flipped": _made(1500, _flipped),
    "friedman": _made(1000, _friedman),
    "small-friedman": _made(300, _friedman),
    "xor": _made(4000, _xor),
    "factor": _made(5000, _factor),
    "counts": _made(3000, _counts),
    "unequal": _made(5000, _unequal, 4),
    "fifty": _made(20000, _fifty, 50),
    "lognormal": _made(3000, _lognormal),
    # Twins of such.
    "straight": _made(4000, _straight),
    "even": _made(500, _even),
    "logarithms": _made(3000, _logarithms),
    "balanced": _table(8000, 30),
}
