"""Label skew without a record twice."""

import numpy as np
import pytest
import torch

from zetaclip.data import Dataset, Split, dirichlet_skew, feasible_size
from zetaclip.errors import InputError


def dataset(counts=(50, 80, 60), task="classification", public=True):
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    y = y[torch.randperm(len(y))]
    x = torch.arange(float(len(y)))[:, None]
    labels = y.float() if task == "binary" else y
    outputs = 1 if task == "binary" else len(counts)
    return Dataset(
        "toy", task, Split(x, labels), Split(x[:5], labels[:5]), outputs, "one row", public=public
    )


@pytest.mark.parametrize("alpha", [1e-12, 0.1, 0.3, 1.0, 100.0, 1e9])
def test_the_same_size_for_every_alpha_and_no_record_twice(alpha):
    whole = dataset()
    for seed in range(20):
        skewed = dirichlet_skew(whole, alpha, seed)
        rows = skewed.train.x[:, 0].long()
        assert len(rows) == 50 == len(rows.unique()) == skewed.nominal_size
        assert torch.equal(skewed.train.y, whole.train.y[rows])  # labels stay with their records
        assert skewed.test is whole.test


def test_small_alpha_skews_more():
    def largest(alpha):
        draws = [
            dirichlet_skew(dataset((40,) * 10), alpha, seed).train.y.bincount().max() / 40
            for seed in range(60)
        ]
        return float(torch.stack(draws).mean())

    # The mean of the largest of ten shares, from an independent simulation of the Dirichlet
    # distribution.
    gamma = np.random.default_rng(5)
    for alpha in (10.0, 1.0, 0.1):
        shares = gamma.gamma(alpha, size=(20000, 10))
        expected = (shares / shares.sum(1, keepdims=True)).max(1)
        error = expected.std() / 60**0.5
        assert abs(largest(alpha) - expected.mean()) < 4 * error + 0.5 / 40
    assert (
        largest(0.1) > largest(1.0) + 0.1 > largest(10.0) + 0.2
    )  # and the test would see a wrong alpha


def test_seeds_are_public_and_repeatable():
    a, b, c = (dirichlet_skew(dataset(), 0.5, seed) for seed in (3, 3, 4))
    assert a.train.y.bincount(minlength=3).tolist() == b.train.y.bincount(minlength=3).tolist()
    assert a.train.y.bincount(minlength=3).tolist() != c.train.y.bincount(minlength=3).tolist()
    assert "alpha 0.5, seed 3, 50" in a.notes[-1] and a.private_statistics == ()


def test_a_larger_size_only_where_it_is_feasible():
    whole = dataset((1000, 700, 1200))
    for seed in range(5):
        feasible = feasible_size(whole, [0.1], [seed])
        assert feasible >= 700
        assert len(dirichlet_skew(whole, 0.1, seed, size=feasible).train) == feasible
        with pytest.raises(InputError, match=f"at most {feasible} are feasible"):
            dirichlet_skew(whole, 0.1, seed, size=feasible + 1)
    table = feasible_size(whole, [1.0, 0.1], range(5))
    assert table == min(
        feasible_size(whole, [alpha], [seed]) for alpha in (1.0, 0.1) for seed in range(5)
    )


def test_binary_and_own_data():
    skewed = dirichlet_skew(dataset((30, 70), task="binary", public=False), 1.0, 0)
    assert skewed.train.y.dtype == torch.float32 and len(skewed.train) == 30
    assert (
        skewed.nominal_size is None
        and "number of records of each class" in skewed.private_statistics[0]
    )


def test_what_cannot_be_skewed():
    with pytest.raises(InputError, match="needs classes"):
        dirichlet_skew(dataset(task="regression"), 1.0, 0)
    with pytest.raises(InputError, match="class 1 has no training record"):
        dirichlet_skew(dataset((5, 0, 5)), 1.0, 0)
    for alpha in (0, -1, float("nan"), float("inf"), "1"):
        with pytest.raises(InputError, match="must be a positive number"):
            dirichlet_skew(dataset(), alpha, 0)
