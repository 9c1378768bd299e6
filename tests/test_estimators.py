"""The scikit-learn estimators: scikit-learn's own checks, and what they say about privacy."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder
from sklearn.utils.estimator_checks import check_estimator

from zetaclip import Budget, BudgetExceeded, PrivacyLeakWarning
from zetaclip.accounting import epsilon
from zetaclip.integrations import _fitting
from zetaclip.integrations.sklearn import PrivateClassifier, PrivateRegressor

N = 600
EXPECTED = {
    "check_sample_weight_equivalence_on_dense_data": "other rows are drawn, with other noise",
}
PLD = ("test_what_a_fit_spends", "test_scikit_learns_own_checks_with_the_defaults")


@pytest.fixture(autouse=True)
def _quick(request, monkeypatch):
    """σ by "rdp" takes milliseconds; tests that are about ε take the accountant that users get."""
    if request.function.__name__ not in PLD:
        monkeypatch.setattr(_fitting, "_ACCOUNTANT", "rdp")
    _fitting._sigma.cache_clear()


@pytest.fixture(scope="module")
def table():
    """Two features that decide, one that does not."""
    rng = np.random.default_rng(3)
    x = rng.uniform(0, 10, (N, 3))
    return x, (x[:, 0] + x[:, 1] > 10).astype(int)


def classifier(**options):
    declared = {
        "bounds": (0, 10),
        "classes": [0, 1],
        "num_examples": N,
        "random_state": 0,
        "hidden": (32, 32),
        "epochs": 3,
    }
    return PrivateClassifier(**{**declared, **options})


def regressor(**options):
    declared = {
        "bounds": (0, 10),
        "target_bounds": (0, 20),
        "num_examples": N,
        "random_state": 0,
        "hidden": (32, 32),
    }
    return PrivateRegressor(**{**declared, "epochs": 3, **options})


def weights(estimator):
    return torch.cat([p.detach().flatten() for p in estimator.module_.parameters()])


@pytest.mark.parametrize("kind", [PrivateClassifier, PrivateRegressor])
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_own_checks(kind):
    results = check_estimator(kind(epochs=1), on_fail=None, expected_failed_checks=EXPECTED)
    failed = {r["check_name"]: repr(r["exception"]) for r in results if r["status"] == "failed"}
    skipped = {r["check_name"] for r in results if r["status"] == "skipped"}
    assert failed == {} and skipped <= {"check_array_api_input"} and len(results) > 40
    assert {r["check_name"] for r in results if r["status"] == "xfail"} == set(EXPECTED)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PrivateClassifier, PrivateRegressor])
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_own_checks_with_the_defaults(kind):
    assert not [
        r["check_name"]
        for r in check_estimator(kind(), on_fail=None, expected_failed_checks=EXPECTED)
        if r["status"] == "failed"
    ]


def test_what_a_fit_spends(table):
    fitted = classifier(method="ww-dp-sgd", epsilon=2.0, delta=1e-6).fit(*table)
    assert fitted.epsilon_ == epsilon(fitted.ledger_.events(), 1e-6, "pld")
    assert 1.9 < fitted.epsilon_ <= 2.0 and fitted.delta_ == 1e-6
    # L = 16 of 600 records: 38 updates an epoch.
    (event,) = fitted.ledger_.events()
    assert (event.sample_rate, event.count) == (16 / N, 3 * 38)
    assert (
        fitted.ledger_.header.num_examples_source == "declared"
        and fitted.ledger_.header.noise_seed_known
    )
    assert len(fitted.clip_history_) == 3 * 38 // 50


def test_the_fit_is_private(table):
    """With room it learns; with next to none it does not, as it would if the noise were not
    added."""
    x, y = table
    learned = classifier(epsilon=100.0, epochs=6).fit(x, y).score(x, y)
    drowned = np.mean(
        [classifier(epsilon=0.05, epochs=6, random_state=s).fit(x, y).score(x, y) for s in range(3)]
    )
    assert learned > 0.95 and drowned < 0.8


@pytest.mark.parametrize("missing", ["bounds", "classes", "num_examples"])
def test_what_is_not_declared_is_warned_of_and_noted(table, missing):
    with pytest.warns(
        PrivacyLeakWarning,
        match=f"^{missing} was not declared and came from the data.* Declare {missing}=",
    ):
        fitted = classifier(**{missing: None}).fit(*table)
    assert f"{missing} taken from the data: ε does not cover it" in fitted.ledger_.header.notes
    source = "taken from the data" if missing == "num_examples" else "declared"
    assert fitted.ledger_.header.num_examples_source == source


def test_all_that_is_missing_in_one_warning(table):
    x, y = table
    with pytest.warns(PrivacyLeakWarning) as caught:
        PrivateRegressor(hidden=(32, 32), epochs=1, random_state=0).fit(x, y)
    assert len(caught) == 1 and "bounds, target_bounds and num_examples were not declared" in str(
        caught[0].message
    )
    assert caught[0].filename == __file__


def test_a_wrong_declared_size_is_warned_of(table):
    with pytest.warns(
        UserWarning, match="num_examples = 1000 was declared, but the dataset has 600"
    ):
        classifier(num_examples=1000).fit(*table)


def test_values_outside_the_bounds_count_as_the_bounds(table):
    x, y = table
    wild, tame = x.copy(), x.copy()
    wild[:5, 2], tame[:5, 2] = 1e9, 10.0
    assert torch.equal(weights(classifier().fit(wild, y)), weights(classifier().fit(tame, y)))
    each = classifier(bounds=([0, 0, 0], [10, 10, 10])).fit(wild, y)
    assert torch.equal(weights(each), weights(classifier().fit(tame, y)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bounds": (1, 0)}, "the lowest below the highest"),
        ({"bounds": 3}, "each of the 3 features"),
        ({"bounds": ([0, 0], [1, 1])}, "each of the 3 features"),
        ({"classes": [0, 2]}, "not among the declared classes"),
        ({"classes": [1]}, "at least two classes"),
        ({"method": "sgd"}, "is not private"),
        ({"method": "dp-smg"}, "did you mean 'dp-sgd'"),
        ({"epsilon": -1.0}, "`epsilon` must be positive"),
        ({"hidden": (0,)}, "positive widths"),
        ({"hidden": 16}, r"sequence of widths, such as \(128, 64\), not 16"),
    ],
)
def test_arguments_that_can_not_be(table, options, message):
    with pytest.raises(ValueError, match=message):
        classifier(**options).fit(*table)


def test_a_budget_must_be_one(table):
    with pytest.raises(TypeError, match=r"zetaclip\.Budget or None"):
        classifier(budget=3.0).fit(*table)


def test_noise_is_secret_unless_a_seed_is_given(table):
    assert torch.equal(weights(classifier().fit(*table)), weights(classifier().fit(*table)))
    first, second = (
        classifier(random_state=None).fit(*table),
        classifier(random_state=None).fit(*table),
    )
    assert not torch.equal(weights(first), weights(second))
    assert not first.ledger_.header.noise_seed_known
    shared = np.random.RandomState(0)
    one, two = (classifier(random_state=shared).fit(*table) for _ in range(2))
    assert not torch.equal(weights(one), weights(two))


def test_the_users_torch_stream_is_left_alone(table):
    before = torch.get_rng_state()
    classifier(random_state=None).fit(*table)
    assert torch.equal(before, torch.get_rng_state())


def test_class_weights_move_the_decision_and_are_never_counted_from_the_data(table):
    x, y = table
    labels = np.array(["no", "yes"])[y]
    shares = [
        (
            classifier(classes=["no", "yes"], class_weight=weight).fit(x, labels).predict(x)
            == "yes"
        ).mean()
        for weight in (
            {"yes": 0.02},
            None,
            {"no": 0.02},
        )  # a clipped gradient can shrink and not grow
    ]
    assert shares[0] < shares[1] - 0.1 and shares[2] > shares[1] + 0.1
    with pytest.raises(ValueError, match="public knowledge"):
        classifier(class_weight="balanced").fit(x, y)
    with pytest.raises(ValueError, match="names 7, which is not among the classes"):
        classifier(class_weight={7: 2.0}).fit(x, y)


def test_declared_classes_have_a_column_each(table):
    x, y = table
    names = np.array(["no", "yes"])[y]
    fitted = classifier(classes=["yes", "maybe", "no"], epsilon=50.0, epochs=6).fit(x, names)
    assert list(fitted.classes_) == ["maybe", "no", "yes"]
    shares = fitted.predict_proba(x)
    assert shares.shape == (N, 3) and np.allclose(shares.sum(1), 1) and fitted.score(x, names) > 0.9


def test_regression(table):
    x, _ = table
    y = x[:, 0] + x[:, 1]
    fitted = regressor(epsilon=50.0, epochs=10).fit(x, y)
    assert fitted.score(x, y) > 0.8 and fitted.epsilon_ <= 50.0
    narrow = regressor(target_bounds=(5, 6)).fit(x, y).predict(x)
    assert narrow.min() >= 5 and narrow.max() <= 6


def test_layers_without_a_spectrum_are_told(table):
    with pytest.warns(UserWarning, match="the clipping norm never moved.*wider layers in hidden="):
        classifier(method="ww-dp-sgd", hidden=(4,)).fit(*table)


@pytest.mark.parametrize("method", ["dp-sgd", "dp-adam", "dp-sam"])
def test_other_methods(table, method):
    fitted = classifier(method=method, epsilon=20.0).fit(*table)
    assert fitted.epsilon_ <= 20.0 and fitted.ledger_.header.method == method


def test_a_fitted_estimator_can_be_pickled(table):
    fitted = classifier(budget=Budget(3.0, 1e-5)).fit(*table)
    back = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(back.predict_proba(table[0]), fitted.predict_proba(table[0]))
    assert (
        back.ledger_.events() == fitted.ledger_.events()
        and back.budget.spent == fitted.budget.spent
    )


def test_frames_pipelines_and_column_transformers(table):
    pandas = pytest.importorskip("pandas")
    x, y = table
    frame = pandas.DataFrame(
        {"a": x[:, 0], "b": x[:, 1], "colour": np.where(x[:, 2] > 5, "red", "blue")}
    )
    fitted = classifier().fit(frame[["a", "b"]], y)
    assert list(fitted.feature_names_in_) == ["a", "b"]
    with pytest.raises(ValueError, match="feature names"):
        fitted.predict(frame[["b", "a"]])
    columns = ColumnTransformer(
        [("colour", OneHotEncoder(categories=[["blue", "red"]]), ["colour"])],
        remainder="passthrough",
        sparse_threshold=0,
    )
    whole = make_pipeline(
        columns, classifier(epsilon=50.0, epochs=6, bounds=([0, 0, 0, 0], [1, 1, 10, 10]))
    )
    assert whole.fit(frame, y).score(frame, y) > 0.9


# -- several fits ----------------------------------------------------------------------------------


def test_a_second_fit_warns_that_epsilon_is_spent_again(table):
    base = classifier()
    clone(base).fit(*table)
    with pytest.warns(PrivacyLeakWarning, match="each fit spends its epsilon again") as caught:
        clone(base).fit(*table)
    assert caught[0].filename == __file__
    with pytest.warns(PrivacyLeakWarning, match="each fit spends"):
        clone(clone(base)).fit(*table)
    classifier().fit(*table)  # an estimator of its own
    alone = classifier().fit(*table)
    with pytest.warns(PrivacyLeakWarning, match="each fit spends"):
        alone.fit(*table)


def test_a_budget_adds_up_what_clones_spend(table):
    x, y = table
    budget = Budget(4.0, 1e-5)
    search = GridSearchCV(
        classifier(delta=1e-5, budget=budget),
        {"hidden": [(32, 32), (40, 32)]},
        cv=2,
        error_score="raise",
    )
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="num_examples = 600 was declared"
        )  # a fold has half of them
        search.fit(x, y)
        assert len(budget.spendings) == 5 and 1.0 < budget.spent < 4.0
        for _ in range(20):
            if not budget.allows(search.best_estimator_.ledger_.events()):
                break
            clone(search.best_estimator_).fit(x, y)
        spent = budget.spent
        with pytest.raises(BudgetExceeded, match=r"PrivateClassifier\(epsilon=1\) would bring"):
            clone(search.best_estimator_).fit(x, y)
    assert budget.spent == spent <= 4.0


def test_fits_of_one_budget_never_share_noise(table):
    """One random_state, as the folds of a cross-validation have it, on data that differ by one
    record."""
    x, y = table

    def apart(**options):
        first, second = (
            classifier(epochs=1, **options).fit(x[rows], y[rows])
            for rows in (slice(None), slice(N - 1))
        )
        return (weights(first) - weights(second)).norm().item()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyLeakWarning)  # the fits without a budget
        shared, distinct = apart(), apart(budget=Budget(8.0, 1e-5))
        secret = apart(random_state=None)
    assert shared < 0.1 * secret  # what sharing looks like: the noise cancels
    assert 0.5 * secret < distinct < 2 * secret
    again = [weights(classifier(epochs=1, budget=Budget(8.0, 1e-5)).fit(x, y)) for _ in range(2)]
    assert torch.equal(*again)  # and a sequence of fits can be repeated


def test_the_ledgers_of_two_fits_of_one_budget_add_up(table):
    budget = Budget(8.0, 1e-5)
    first, second = (classifier(epochs=1, budget=budget).fit(*table).ledger_ for _ in range(2))
    releases = len(first)
    assert first.merge(second.rows()) == releases == len(second)


def test_a_fit_that_releases_nothing_is_refunded(table, monkeypatch):
    budget = Budget(4.0, 1e-5)

    def broken(self, outputs, y, reduction="mean"):
        raise KeyboardInterrupt

    monkeypatch.setattr("zetaclip.training.evaluate.Task.loss", broken)
    with pytest.raises(KeyboardInterrupt):
        classifier(budget=budget).fit(*table)
    assert budget.spent == 0.0
    estimator = classifier()
    with pytest.raises(KeyboardInterrupt):
        estimator.fit(*table)
    with pytest.raises(NotFittedError):
        estimator.predict(table[0])
    monkeypatch.undo()
    estimator.fit(*table)  # nothing was spent before, so nothing is warned of


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_processes_of_n_jobs_count(table):
    budget = Budget(4.0, 1e-5)
    cross_val_score(classifier(budget=budget), *table, cv=4, n_jobs=2, error_score="raise")
    assert len(budget.spendings) == 4 and budget.spent > 1.0
