"""Metrics against scikit-learn and against counting pairs."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss, mean_squared_error, roc_auc_score

from zetaclip import metrics

SCORES = st.integers(-3, 3).map(float) | st.sampled_from([math.inf, -math.inf, 1e-300])


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(SCORES, st.booleans()), min_size=2, max_size=30))
def test_auc_counts_pairs_exactly_with_ties(rows):
    scores, y = (
        torch.tensor([row[0] for row in rows], dtype=torch.float64),
        torch.tensor([float(row[1]) for row in rows]),
    )
    ones, zeros = scores[y == 1], scores[y == 0]
    found = metrics.auc(scores, y)
    if not len(ones) or not len(zeros):
        assert math.isnan(found)
        return
    wins = sum(float(a > b) + 0.5 * float(a == b) for a in ones for b in zeros)
    assert found == wins / (len(ones) * len(zeros))


@pytest.mark.parametrize("kind", ["distinct", "ties", "float32"])
def test_auc_is_scikit_learns(kind):
    y = torch.randint(0, 2, (5000,)).float()
    scores = torch.randn(5000) + y
    if kind == "ties":
        scores = scores.round()
    elif kind == "distinct":
        scores = scores.double()
    assert metrics.auc(scores, y) == pytest.approx(
        roc_auc_score(y.numpy(), scores.numpy()), abs=1e-12
    )
    assert metrics.auc(scores[:, None], y[:, None]) == metrics.auc(scores, y)  # columns will do


def test_accuracy_is_scikit_learns_and_ties_take_the_first():
    logits, y = torch.randn(1000, 5), torch.randint(0, 5, (1000,))
    assert metrics.accuracy(logits, y) == accuracy_score(y, logits.argmax(1))
    tied = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    assert metrics.accuracy(tied, torch.tensor([0, 1, 0])) == 1.0
    assert metrics.accuracy(tied, torch.tensor([1, 2, 2])) == 0.0
    assert (
        metrics.accuracy(
            torch.tensor([[1.0], [-1.0], [0.0], [3.0]]), torch.tensor([1.0, 0.0, 0.0, 0.0])
        )
        == 0.75
    )


def test_rmse_is_scikit_learns_in_the_units_of_the_target():
    prediction, y = torch.randn(500) * 1000, torch.randn(500) * 1000
    assert metrics.rmse(prediction[:, None], y) == pytest.approx(
        mean_squared_error(y, prediction) ** 0.5, rel=1e-6
    )
    big = torch.full((10**5,), 1e6)
    assert metrics.rmse(big + 1, big) == 1.0  # in float64, whatever comes in


def ece_by_hand(probabilities, y, bins):
    """The definition of Guo et al., by masks over (low, high]."""
    confidence, chosen = probabilities.max(1), probabilities.argmax(1)
    total = 0.0
    for low, high in zip(
        np.linspace(0, 1, bins + 1)[:-1], np.linspace(0, 1, bins + 1)[1:], strict=True
    ):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            total += inside.mean() * abs(confidence[inside].mean() - (chosen == y)[inside].mean())
    return total


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_ece_by_its_definition(bins):
    logits, y = 3 * torch.randn(4000, 7, dtype=torch.float64), torch.randint(0, 7, (4000,))
    wanted = ece_by_hand(torch.softmax(logits, 1).numpy(), y.numpy(), bins)
    assert metrics.ece(logits, y, bins) == pytest.approx(wanted, abs=1e-12)
    table = metrics.reliability(logits, y, bins)
    assert sum(row["count"] for row in table) == 4000 and len(table) == bins
    assert [row["low"] for row in table] == pytest.approx(np.linspace(0, 1, bins + 1)[:-1])
    mean = sum(row["count"] * row["accuracy"] for row in table if row["count"]) / 4000
    assert mean == pytest.approx(metrics.accuracy(logits, y))


def test_ece_sees_overconfidence_and_accepts_honesty():
    logits = 2 * torch.randn(200_000, 4, dtype=torch.float64)
    y = torch.multinomial(torch.softmax(logits, 1), 1)[:, 0]
    assert metrics.ece(logits, y) < 0.005
    assert metrics.ece(3 * logits, y) > 0.1
    assert log_loss(y, torch.softmax(logits, 1)) < log_loss(y, torch.softmax(3 * logits, 1))


def test_binary_calibration_is_that_of_two_classes():
    logit, y = 2 * torch.randn(3000, dtype=torch.float64), torch.randint(0, 2, (3000,))
    two = torch.stack([torch.zeros_like(logit), logit], dim=1)
    assert metrics.ece(logit, y.float()) == pytest.approx(metrics.ece(two, y), abs=1e-12)
    assert metrics.accuracy(logit, y.float()) == metrics.accuracy(two, y)


def test_a_confidence_on_an_edge_belongs_to_the_bin_below():
    logits = torch.log(torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64))
    counts = [row["count"] for row in metrics.reliability(logits, torch.tensor([0, 1]), 4)]
    assert counts == [0, 1, 1, 0]
    sure = torch.tensor([[50.0, -50.0]], dtype=torch.float64)
    assert metrics.reliability(sure, torch.tensor([0]))[-1]["count"] == 1


def test_a_network_that_gives_nan_is_never_flattered():
    logits, y = torch.randn(10, 3), torch.zeros(10, dtype=torch.long)
    logits[:, 0] = 9.0
    assert metrics.accuracy(logits, y) == 1.0
    logits[3, 1] = math.nan
    assert metrics.accuracy(logits, y) == 0.9
    assert math.isnan(metrics.ece(logits, y)) and metrics.reliability(logits, y) == []
    scores = torch.tensor([1.0, math.nan, 0.0])
    assert metrics.accuracy(scores, torch.tensor([1.0, 0.0, 0.0])) == pytest.approx(2 / 3)
    assert math.isnan(metrics.auc(scores, torch.tensor([1.0, 0.0, 0.0])))
    assert math.isnan(metrics.rmse(scores, torch.zeros(3)))


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="no records"):
        metrics.accuracy(torch.zeros(0, 3), torch.zeros(0))
    with pytest.raises(ValueError, match="one row per record"):
        metrics.rmse(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="one value per record"):
        metrics.auc(torch.zeros(3, 2), torch.zeros(3))
    with pytest.raises(ValueError, match="at least one bin"):
        metrics.ece(torch.zeros(3, 2), torch.zeros(3), bins=0)
