"""Confusions, curves and residuals against scikit-learn."""

import json

import numpy as np
import pytest
import torch
from sklearn import metrics as theirs

from zetaclip import metrics
from zetaclip.training.evaluate import MOST_CLASSES, Task


def scored(count, ties, seed=0):
    """Scores and labels that go together somewhat; with ties, few different scores."""
    rng = np.random.default_rng(seed)
    y = (rng.random(count) < 0.3).astype(int)
    scores = rng.normal(size=count) + y
    return torch.tensor(np.round(scores, 0 if ties else 12)), torch.tensor(y)


@pytest.mark.parametrize("ties", [False, True])
def test_curves_are_scikit_learns(ties):
    scores, y = scored(500, ties)
    x, up, _ = theirs.roc_curve(y, scores, drop_intermediate=False)
    assert np.allclose(metrics.roc(scores, y), np.stack([x, up], 1))
    precision, recall, _ = theirs.precision_recall_curve(y, scores)
    mine = metrics.precision_recall(scores, y)
    # Theirs runs from the lowest score up, and ends with a point (0, 1) of its own.
    assert np.allclose(mine, np.stack([recall, precision], 1)[:-1][::-1])
    area = np.trapezoid(
        [v for _, v in metrics.roc(scores, y)], [u for u, _ in metrics.roc(scores, y)]
    )
    assert area == pytest.approx(metrics.auc(scores, y))


@pytest.mark.parametrize("classes", [2, 5])
def test_confusions_are_scikit_learns(classes):
    generator = torch.Generator().manual_seed(classes)
    logits = torch.randn(200, classes, generator=generator)
    y = torch.randint(0, classes, (200,), generator=generator)
    expected = theirs.confusion_matrix(y, logits.argmax(1), labels=range(classes))
    assert metrics.confusion(logits, y, classes) == expected.tolist()
    one = logits[:, 1] - logits[:, 0]
    if classes == 2:
        assert metrics.confusion(one, y.float(), 2) == expected.tolist()


def test_residuals_are_scikit_learns():
    generator = torch.Generator().manual_seed(1)
    y = torch.rand(300, generator=generator) * 50
    predicted = y + torch.randn(300, generator=generator) * 3 + 1
    found = metrics.residuals(predicted, y)
    assert found["absolute"] == pytest.approx(theirs.mean_absolute_error(y, predicted))
    assert found["r2"] == pytest.approx(theirs.r2_score(y, predicted))
    off = (predicted.double() - y.double()).numpy()
    assert found["quantiles"] == pytest.approx(np.percentile(off, [5, 25, 50, 75, 95]))
    counts, edges = np.histogram(off, bins=40)
    # numpy's bins are [low, high), ours (low, high]: no residual lies on an inner edge.
    assert found["histogram"]["counts"] == counts.tolist()
    assert np.allclose(found["histogram"]["edges"], edges)
    assert sum(row["count"] for row in found["by_target"]) == 300
    total = sum(row["count"] * row["prediction"] for row in found["by_target"])
    assert total == pytest.approx(float(predicted.double().sum()))


def test_a_long_curve_is_thinned_to_points_of_its_own():
    scores, y = scored(20_000, ties=False)
    whole = metrics.roc(scores, y)
    some = metrics.thinned(whole)
    assert len(whole) > 10_000 and 60 <= len(some) <= 100
    assert some[0] == [0.0, 0.0] and some[-1] == [1.0, 1.0]
    assert {tuple(point) for point in some} <= set(whole)
    area = np.trapezoid([v for _, v in some], [u for u, _ in some])
    assert area == pytest.approx(metrics.auc(scores, y), abs=2e-3)
    assert metrics.thinned([(0.0, 0.0), (1.0, 1.0)]) == [[0.0, 0.0], [1.0, 1.0]]


def test_what_can_not_be_drawn_is_empty():
    y = torch.tensor([0, 1, 1])
    nan = torch.tensor([0.1, float("nan"), 0.3])
    assert metrics.roc(nan, y) == metrics.precision_recall(nan, y) == []
    assert metrics.roc(torch.rand(3), torch.ones(3)) == []  # one class only
    assert metrics.confusion(nan, y, 2) == [] and metrics.residuals(nan, y) == {}
    assert metrics.residuals(torch.ones(3), torch.ones(3))["r2"] is None
    assert Task("binary", "auc").details(nan[:, None], y, ()) == {}


def test_details_by_task_are_small_and_plain():
    scores, y = scored(5000, ties=False)
    found = Task("binary", "auc").details(scores[:, None], y.float(), ("no", "yes"))
    assert found["classes"] == ["no", "yes"] and len(found["roc"]) <= 100
    assert found["per_class"][1]["accuracy"] == pytest.approx(
        theirs.recall_score(y, scores > 0), abs=1e-6
    )
    assert len(json.dumps(found)) < 12_000
    many = MOST_CLASSES + 1
    found = Task("classification", "accuracy").details(torch.eye(many), torch.arange(many), ())
    assert "confusion" not in found and len(found["per_class"]) == many
    assert found["classes"][:2] == ["0", "1"]
    found = Task("regression", "rmse", 10.0, 5.0).details(
        torch.tensor([[0.0], [1.0]]), torch.tensor([10.0, 16.0]), ()
    )
    assert found["residuals"]["mean"] == -0.5  # 10 for 10, 15 for 16


def farthest(points, x, y):
    """How far a point is from the nearest one of a curve, at most."""
    curve = torch.tensor([list(map(float, x)), list(map(float, y))], dtype=torch.float64).T
    return float(torch.cdist(torch.tensor(points, dtype=torch.float64), curve).min(1).values.max())


def test_more_than_two_classes_have_curves_of_one_against_the_rest():
    generator = torch.Generator().manual_seed(5)
    y = torch.randint(0, 4, (900,), generator=generator)
    logits = torch.randn(900, 4, generator=generator) + 1.5 * torch.nn.functional.one_hot(y, 4)
    found = Task("classification", "accuracy").details(logits, y, ())
    chances = torch.softmax(logits.double(), dim=1).numpy()
    wanted = theirs.roc_auc_score(y, chances, multi_class="ovr", average=None)
    assert [part["auc"] for part in found["per_class"]] == pytest.approx(wanted.tolist(), abs=1e-6)
    assert found["auc"] == pytest.approx(wanted.mean(), abs=1e-6)
    of_class = (y == 2).numpy()
    false, true, _ = theirs.roc_curve(of_class, chances[:, 2], drop_intermediate=False)
    assert 30 <= len(found["per_class"][2]["roc"]) <= 40
    assert farthest(found["per_class"][2]["roc"], false, true) < 1e-5
    precision, recall, _ = theirs.precision_recall_curve(of_class, chances[:, 2])
    assert farthest(found["per_class"][2]["precision_recall"], recall, precision) < 1e-5
    assert farthest(found["per_class"][1]["roc"], false, true) > 1e-3  # of another class
    # All pairs of a record and a class: scikit-learn's micro average.
    truth = torch.nn.functional.one_hot(y, 4).numpy()
    pooled = theirs.roc_auc_score(truth, chances, average="micro")
    x, t = zip(*metrics.roc(torch.from_numpy(chances).flatten(), torch.from_numpy(truth).flatten()))
    area = sum((b - a) * (u + v) / 2 for a, b, u, v in zip(x, x[1:], t, t[1:]))
    assert area == pytest.approx(pooled, abs=1e-9)
    assert len(found["roc"]) <= 100 and len(json.dumps(found)) < 20_000
    missing = Task("classification", "accuracy").details(logits, y.clamp(max=2), ())
    assert missing["per_class"][3]["auc"] is None and missing["per_class"][3]["roc"] == []
