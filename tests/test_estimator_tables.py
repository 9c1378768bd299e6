"""The estimators on tables with words, dates and gaps, with weights, and in searches."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import FitFailedWarning
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from zetaclip import Budget, BudgetExceeded, PrivacyLeakWarning
from zetaclip.errors import InputError
from zetaclip.integrations import _estimator, _fitting
from zetaclip.integrations.sklearn import PrivateClassifier, PrivateRegressor

pandas = pytest.importorskip("pandas")
N = 400
SCHEMA = {
    "classes": ["no", "yes"],
    "columns": {
        "age": {"type": "numeric", "bounds": [0, 100]},
        "town": {"type": "categorical", "values": ["A", "B", "C"]},
        "since": {"type": "date", "bounds": ["2020-01-01", "2025-01-01"]},
    },
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """σ by "rdp" takes milliseconds; these tests are not about ε."""
    monkeypatch.setattr(_fitting, "_ACCOUNTANT", "rdp")
    _fitting._sigma.cache_clear()
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def people():
    rng = np.random.default_rng(0)
    age = rng.integers(0, 100, N).astype(float)
    town = rng.choice(["A", "B", "C"], N)
    frame = pandas.DataFrame(
        {
            "age": np.where(rng.random(N) < 0.1, np.nan, age),
            "town": np.where(rng.random(N) < 0.1, None, town),
            "since": pandas.Timestamp("2020-01-01")
            + pandas.to_timedelta(rng.integers(0, 1800, N), "D"),
        }
    )
    return frame, np.where(age + 40 * (town == "C") > 60, "yes", "no")


def quick(kind=PrivateClassifier, **options):
    base = {"epsilon": 50.0, "method": "dp-sgd", "hidden": (16,), "epochs": 5, "num_examples": N}
    return kind(**{**base, "random_state": 0, **options})


def test_words_dates_and_gaps_by_a_declared_schema(people):
    frame, y = people
    fitted = quick(schema=SCHEMA).fit(frame, y)  # no warning: all is declared
    assert fitted.score(frame, y) > 0.8 and list(fitted.classes_) == ["no", "yes"]
    assert list(fitted.feature_names_in_) == ["age", "town", "since"] and fitted.n_features_in_ == 3
    assert fitted.module_.fc1.in_features == 1 + 3 + 5
    one = fitted.predict_proba(frame[:1])
    assert np.array_equal(one, fitted.predict_proba(frame)[:1])  # a row stands for itself
    unknown = frame[:1].assign(town="nowhere")
    assert fitted.predict_proba(unknown).shape == (1, 2)
    with pytest.raises(ValueError, match="feature names"):
        fitted.predict(frame.rename(columns={"town": "city"}))
    with pytest.raises(InputError, match="in column age is not a finite number"):
        fitted.predict(frame[:1].assign(age="old"))


def test_without_a_schema_it_is_inferred_with_a_warning(people):
    frame, y = people
    with pytest.warns(PrivacyLeakWarning, match="schema was not declared"):
        fitted = quick(classes=["no", "yes"]).fit(frame, y)
    assert any("schema taken from the data" in note for note in fitted.ledger_.header.notes)
    words = frame.astype(object).where(frame.notna(), None).to_numpy()
    with pytest.warns(PrivacyLeakWarning):
        array = quick(classes=["no", "yes"]).fit(words, y)
    assert np.array_equal(array.predict_proba(words), fitted.predict_proba(frame))
    with pytest.raises(ValueError, match="declare every column in schema="):
        quick(bounds=(0, 1)).fit(frame, y)
    with pytest.raises(ValueError, match="'town' needs a type"):
        quick(schema={"columns": {"town": {}}}).fit(frame, y)


def test_a_missing_number_is_the_middle_of_its_bounds(people):
    rng = np.random.default_rng(1)
    x = rng.uniform(0, 10, (N, 3))
    y = (x[:, 0] > 5).astype(int)
    gaps, middle = x.copy(), x.copy()
    gaps[::7, 1], middle[::7, 1] = np.nan, 5.0
    options = {"bounds": (0, 10), "classes": [0, 1]}
    a, b = quick(**options).fit(gaps, y), quick(**options).fit(middle, y)
    assert np.array_equal(a.predict_proba(gaps), b.predict_proba(middle))
    with pytest.warns(PrivacyLeakWarning):
        inferred = quick(classes=[0, 1]).fit(np.c_[gaps, np.full(N, np.nan)], y)
    assert inferred.feature_low_[3] == 0 and inferred.feature_high_[1] <= 10
    gaps[0, 0] = np.inf
    with pytest.raises(ValueError, match="infinity"):
        quick(**options).fit(gaps, y)


def test_a_regression_on_a_table(people):
    frame, _ = people
    target = frame["age"].fillna(50) + 10 * (frame["town"] == "C")
    schema = {"target_bounds": [0, 110], "columns": SCHEMA["columns"]}
    fitted = quick(PrivateRegressor, schema=schema, epochs=20).fit(frame, target)
    assert fitted.score(frame, target) > 0.5
    assert (fitted.target_low_, fitted.target_high_) == (0.0, 110.0)


def test_weights_of_records(people):
    frame, y = people
    by_class = quick(schema=SCHEMA, class_weight={"no": 0.5}).fit(frame, y)
    weights = np.where(y == "no", 0.5, 1.0)
    by_record = quick(schema=SCHEMA).fit(frame, y, sample_weight=weights)
    assert np.allclose(by_class.predict_proba(frame), by_record.predict_proba(frame), atol=1e-6)
    none = quick(schema=SCHEMA).fit(frame, y)
    assert not np.allclose(none.predict_proba(frame), by_record.predict_proba(frame), atol=1e-3)
    # Weights are clipped to the declared bound.
    large = quick(schema=SCHEMA).fit(frame, y, sample_weight=7 * weights)
    ones = quick(schema=SCHEMA).fit(frame, y, sample_weight=np.ones(N))
    assert np.array_equal(large.predict_proba(frame), ones.predict_proba(frame))
    assert large.epsilon_ == none.epsilon_
    with pytest.raises(ValueError, match="max_sample_weight must be a positive"):
        quick(schema=SCHEMA, max_sample_weight=-1).fit(frame, y, sample_weight=weights)


def test_rate_batch_and_progress(people, capsys):
    frame, y = people
    options = {"schema": SCHEMA, "epochs": 2}
    plain = quick(**options).fit(frame, y)
    assert capsys.readouterr().err == ""
    other = quick(**options, batch_size=100, lr=0.01, verbose=True).fit(frame, y)
    (event,) = other.ledger_.events()
    assert (event.sample_rate, event.count) == (0.25, 2 * 4)
    said = capsys.readouterr().err
    assert "PrivateClassifier: 8 updates" in said and "ε = " in said
    slow = quick(**options, lr=1e-6).fit(frame, y)
    start, moved = (
        torch.cat([p.flatten() for p in fitted.module_.parameters()]) for fitted in (slow, plain)
    )
    assert (start - moved).abs().max() > 0.01  # one of them hardly moved


def test_labels_that_never_repeat_are_refused(people):
    frame, _ = people
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The number of unique classes")  # scikit-learn's
        with pytest.raises(ValueError, match="another label in each of the 400 rows"):
            quick(schema={"columns": SCHEMA["columns"]}).fit(frame, np.arange(N))


def test_frames_from_a_transformer(people):
    frame, y = people
    columns = ColumnTransformer(
        [("same", FunctionTransformer(feature_names_out="one-to-one"), ["age", "town"])],
        verbose_feature_names_out=False,
    )
    schema = {**SCHEMA, "columns": {k: SCHEMA["columns"][k] for k in ("age", "town")}}
    pipeline = make_pipeline(columns, quick(schema=schema)).set_output(transform="pandas")
    assert pipeline.fit(frame, y).score(frame, y) > 0.8
    assert list(pipeline[-1].feature_names_in_) == ["age", "town"]


# -- a search with a budget


def search(budget, kind=GridSearchCV, **options):
    model = quick(schema=SCHEMA, epsilon=1.0, delta=1e-5, epochs=1, budget=budget)
    grid = {"hidden": [(8,), (16,)]}
    return kind(model, grid, cv=2, **options)


def fit(search, people):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="num_examples = 400 was declared")
        warnings.filterwarnings("ignore", category=FitFailedWarning)
        warnings.filterwarnings("ignore", message="One or more of the test scores are non-finite")
        return search.fit(*people)


def test_a_search_that_does_not_fit_its_budget_is_refused_at_the_start(people):
    budget = Budget(1.5, 1e-5)
    with pytest.raises(BudgetExceeded, match="a search of 4 fits and a refit, each like"):
        fit(search(budget, error_score="raise"), people)
    with pytest.raises(ValueError, match="a search of 4 fits and a refit"):
        fit(search(budget), people)  # as scikit-learn reports fits that failed
    assert budget.spendings == []
    with pytest.raises(BudgetExceeded, match="a search of 2 fits and a refit"):
        fit(search(budget, RandomizedSearchCV, n_iter=1, error_score="raise"), people)


def test_a_search_that_fits_has_its_refit(people):
    budget = Budget(4.0, 1e-5)
    found = fit(search(budget, error_score="raise"), people)
    assert len(budget.spendings) == 5 and budget.spent <= 4.0
    assert found.best_estimator_.epsilon_ <= 1.0


def test_what_was_spent_in_between_does_not_take_the_refit_away(people):
    """Another fit on the same budget, after the search has begun: folds stop, the refit goes on."""
    budget = Budget(2.6, 1e-5)
    fit(search(Budget(9.0, 1e-5), error_score="raise"), people)  # imports, and caches of σ
    searching = search(budget, error_score=np.nan)
    spend = _estimator.spend
    calls = []

    def spending(budget, events, what, search, rows):
        receipt = spend(budget, events, what, search, rows)
        if not calls:
            budget.spend(events, "somebody else")
            while budget.allows(events, events):
                budget.spend(events, "somebody else")
        calls.append(rows)
        return receipt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_estimator, "spend", spending)
        fit(searching, people)
    assert calls[-1] == N and len(calls) == 2  # one fold, then the refit on all rows
    assert searching.best_estimator_.epsilon_ <= 1.0 and budget.spent <= 2.6


def test_a_search_through_a_pipeline_and_other_processes_is_noticed(people):
    budget = Budget(1.5, 1e-5)
    inner = search(budget).estimator
    pipeline = make_pipeline(FunctionTransformer(), inner)
    grid = {"privateclassifier__hidden": [(8,), (16,)]}
    searching = GridSearchCV(pipeline, grid, cv=2, error_score="raise", n_jobs=2)
    with pytest.raises(BudgetExceeded, match="a search of 4 fits and a refit"):
        fit(searching, people)
    assert budget.spendings == []


@pytest.mark.filterwarnings("ignore:noise will dominate")
@pytest.mark.parametrize("grouped", [True, False])
def test_rows_and_groups_on_one_budget_are_warned_of(grouped):
    x, y = np.random.default_rng(0).uniform(0, 1, (60, 3)), np.arange(60) % 2
    budget, people = Budget(20.0, 1e-3), np.arange(60) // 3

    def fit(groups):
        model = PrivateClassifier(
            epsilon=1.0, delta=1e-4, bounds=(0, 1), classes=[0, 1], epochs=1, batch_size=10,
            num_examples=60 if groups is None else 20, budget=budget,
        )  # fmt: skip
        model.fit(x, y, groups=groups)

    first, second = (people, None) if grouped else (None, people)
    fit(first)
    fit(first)
    with pytest.warns(PrivacyLeakWarning, match="its ε is for neither"):
        fit(second)


def test_groups_are_protected_with_all_their_rows():
    x, y = np.random.default_rng(0).uniform(0, 1, (300, 3)), np.arange(300) % 2
    people = [f"person {number}" for number in np.arange(300) // 5]
    terms = {"epsilon": 3.0, "bounds": (0, 1), "epochs": 3, "random_state": 0}
    model = PrivateClassifier(classes=[0, 1], num_examples=60, rows_per_unit=4, **terms)
    head = model.fit(x, y, groups=people).ledger_.header
    assert head.adjacency == "add/remove one unit (at most 4 rows per batch)"
    assert head.num_examples == 60
    regressor = PrivateRegressor(target_bounds=(0, 1), num_examples=60, **terms)
    head = regressor.fit(x, y.astype(float), groups=people).ledger_.header
    assert head.adjacency == "add/remove one unit (at most 10 rows per batch)"
    with pytest.raises(ValueError, match="groups has 2 entries, but X has 300 rows"):
        model.fit(x, y, groups=["a", "b"])
    for missing in (None, float("nan")):
        with pytest.raises(ValueError, match="groups has a missing entry"):
            model.fit(x, y, groups=[*people[:-1], missing])
