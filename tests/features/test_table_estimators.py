"""Estimators on tables and on lists of texts: a linear head on bins."""

import random

import numpy as np
import pytest

from zetaclip.models import Linear, Perceptron
from zetaclip.sklearn import PrivateClassifier, PrivateRegressor

DRAW = np.random.default_rng(0)
X = DRAW.uniform(-1, 1, (1000, 4))
CURVE = (np.abs(X[:, 0]) > 0.5).astype(int)  # no straight line can tell this


def classifier(**changes):
    values = {"bounds": (-1, 1), "classes": [0, 1], "num_examples": 1000, "random_state": 0}
    return PrivateClassifier(3.0, **{**values, **changes})


def test_a_classifier_learns_a_curve_with_its_defaults():
    model = classifier().fit(X, CURVE)
    assert isinstance(model.module_, Linear) and model.bins_.crosses == 0
    assert model.score(X, CURVE) > 0.85
    assert classifier(hidden=()).fit(X, CURVE).score(X, CURVE) < 0.7


def test_a_network_is_still_to_be_had():
    model = classifier(hidden=(8,), epochs=1).fit(X, CURVE)
    assert isinstance(model.module_, Perceptron) and model.bins_ is None


def test_a_regressor_learns_a_product():
    y = X[:, 0] * X[:, 1]
    model = PrivateRegressor(
        8.0, bounds=(-1, 1), target_bounds=(-1, 1), num_examples=1000, random_state=0
    ).fit(X, y)
    assert model.bins_.crosses == 3
    assert model.score(X, y) > 0.6


def test_missing_and_far_away_values_can_be_predicted():
    model = classifier().fit(X, CURVE)
    odd = np.array([[np.nan, 0, 0, 0], [1e9, -1e9, 0, 0]])
    shares = model.predict_proba(odd)
    near = model.predict_proba(np.array([[0.0, 0, 0, 0], [1, -1, 0, 0]]))
    np.testing.assert_allclose(shares, near)


@pytest.mark.parametrize("form", [list, np.array, lambda t: np.array(t, dtype=object)])
def test_a_list_of_texts_is_enough(form):
    draw = random.Random(0)
    shared = [f"word{i}" for i in range(200)]
    labels = [draw.choice(["good", "bad"]) for _ in range(600)]
    words = {"good": ["lovely", "kind"], "bad": ["awful", "rude"]}
    texts = [" ".join([*draw.sample(shared, 8), *words[label]]) for label in labels]
    model = PrivateClassifier(
        8.0, classes=["good", "bad"], num_examples=600, random_state=0, epochs=30
    ).fit(form(texts), labels)
    said = model.predict(form(["a lovely and kind man", "awful food, rude people"]))
    assert said.tolist() == ["good", "bad"]
