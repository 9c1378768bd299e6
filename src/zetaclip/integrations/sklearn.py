"""Estimators for scikit-learn: a linear head on bins, or a perceptron, trained privately."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import secrets
import time
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    check_consistent_length,
    check_is_fitted,
    validate_data,
)

from ..accounting import Budget
from ..errors import PrivacyLeakWarning
from ._pictures import Pictures
from ._rows import as_table, declared, has_words, table_input
from ._search import Search, search_above, spend

if TYPE_CHECKING:
    import torch

    from ..data import Dataset
    from ..data.inputs import TableInput
    from ..features import Bins
    from ..methods import Method
    from ..training.config import Config
    from ..training.steps import PrivateSteps

__all__ = ["PrivateClassifier", "PrivateRegressor"]

# Searching σ with "pld" takes about a second.
_ACCOUNTANT = "pld"
# Lineages (an estimator and its clones) that have released something in this process.
_FITTED: set[str] = set()
_ROWS = 1024  # rows that are predicted at a time
# Fewer rows may have labels that are all different by chance.
_FEWEST = 10


class _Private(BaseEstimator):
    """What both estimators share: declared bounds, the private fit, the network's outputs."""

    module_: torch.nn.Module
    _lineage: str
    _search: Search | None = None

    def __sklearn_clone__(self) -> Any:
        """A clone that knows its origin, so that a second fit can be noticed."""
        twin: Any = super().__sklearn_clone__()
        twin._lineage = self._family()
        twin._search = self._search
        if twin._search is None and twin.budget is not None:
            twin._search = search_above()
        return twin

    def _family(self) -> str:
        if "_lineage" not in vars(self):
            self._lineage = secrets.token_hex(8)
        return self._lineage

    def _read(self, X: Any, y: Any, leaks: list[str], numeric: bool) -> tuple[np.ndarray, Any]:
        """Rows in [-1, 1] and checked targets; remembers how rows are prepared."""
        given: Any = self
        about = declared(given.schema)
        self.input_: TableInput | None = None
        self.pictures_: Pictures | None = None
        if getattr(given, "features", None) is not None:
            x, y = validate_data(self, X, y, dtype=Pictures.TYPES, allow_nd=True)
            self.pictures_ = Pictures.of(given.features, x, given.bounds, leaks)
            return self.pictures_.features(x), y
        if not (about.get("columns") or has_words(X)):
            x, y = validate_data(
                self,
                X,
                y,
                dtype=np.float64,
                ensure_min_samples=2,
                y_numeric=numeric,
                ensure_all_finite="allow-nan",
            )
            self.feature_low_, self.feature_high_ = _bounds(given.bounds, x, leaks)
            return self._rescaled(x), y
        if given.bounds is not None:
            raise ValueError(
                "bounds= is for tables of numbers alone; declare every column in schema="
            )
        y = validate_data(self, X="no_validation", y=y, y_numeric=numeric)
        validate_data(self, X, skip_check_array=True)
        check_consistent_length(X, y)
        self.input_, inferred = table_input(X, about.get("columns", {}))
        if inferred:
            leaks.append("schema")
        return self._rows(X), y

    def _rows(self, X: Any) -> np.ndarray:
        """Rows of a table with declared columns, in [-1, 1]."""
        assert self.input_ is not None
        rows: np.ndarray = self.input_.prepare(*as_table(X)).double().numpy()
        return rows

    def _rescaled(self, x: np.ndarray) -> np.ndarray:
        """Numbers scaled from their bounds to [-1, 1] and clipped; a missing one is the middle."""
        low, high = self.feature_low_, self.feature_high_
        width = np.where(high > low, high - low, 1.0)
        return np.nan_to_num(2.0 * (np.clip(x, low, high) - low) / width - 1.0, nan=0.0)

    def _weight(self, sample_weight: Any, x: np.ndarray) -> Any:
        """Weights of the records between 0 and the declared bound, as a tensor."""
        import torch

        if sample_weight is None:
            return None
        bound = getattr(self, "max_sample_weight", None)
        if not isinstance(bound, (int, float)) or not 0 < bound < float("inf"):
            raise ValueError(f"max_sample_weight must be a positive number, not {bound!r}")
        weights = _check_sample_weight(sample_weight, x, dtype=np.float64)
        return torch.from_numpy(np.clip(weights, 0.0, bound)).float()

    def _train(
        self, dataset: Dataset, leaks: list[str], weights: dict[str, float] | None = None
    ) -> None:
        """Trains a new network and sets all fitted attributes."""
        from ..training.progress import Display
        from ..training.recipe import build_method
        from ..training.steps import PrivateSteps

        given: Any = self  # the subclasses have the constructor's arguments
        if given.budget is not None and not isinstance(given.budget, Budget):
            raise TypeError(
                f"budget must be a zetaclip.Budget or None, not {type(given.budget).__name__}"
            )
        _say_leaks(leaks)
        seed = _seed(given.random_state)
        dataset = self._binned(dataset)
        model, layer = _network(dataset, given.hidden, seed)
        config = _config(given, layer, seed).changed(class_weight=weights)
        method = build_method(config)
        if not method.private:
            raise ValueError(
                f"method {given.method!r} is not private; use scikit-learn's own MLPClassifier"
                " instead"
            )
        config = _with_sigma(config, dataset, method, model)
        method = build_method(config)
        steps = PrivateSteps(config, dataset, method, model)
        if given.num_examples is not None:
            for note in steps.notes:
                warnings.warn(note, stacklevel=3)
        header = steps.engine.ledger.header
        not_covered = tuple(f"{what} taken from the data: ε does not cover it" for what in leaks)
        steps.engine.ledger.header = dataclasses.replace(
            header, notes=(*header.notes, *not_covered)
        )
        budget: Budget | None = given.budget
        receipt = ""
        if budget is None:
            self._say_again()
        else:
            planned = steps.engine.planned_events(0, steps.total)
            what = f"{type(self).__name__}(epsilon={given.epsilon:g})"
            receipt = spend(budget, planned, what, self._search, len(dataset.train))
            # The folds of a cross-validation share a random_state, but must not share noise.
            steps.engine.reseed(f"charge {budget.number_of(receipt)}")
        display = Display(quiet=not given.verbose)
        begun = time.perf_counter()
        try:
            with display.bar(0, steps.total) as bar:
                while steps.done < steps.total:
                    for done in steps.updates(steps.total):
                        bar.step(done, dict)
        finally:
            if len(steps.engine.ledger):
                _FITTED.add(self._family())
            elif budget is not None:
                budget.refund(receipt)
        _detach(steps)
        if steps.average is not None:
            with steps.average.applied():
                weights = copy.deepcopy(model.state_dict())
            model.load_state_dict(weights)
        self.module_ = model.eval()
        self.delta_ = config.delta
        self.epsilon_ = steps.epsilon()
        self.ledger_ = steps.engine.ledger
        self.clip_history_ = steps.optimizer.clip_history
        display.say(
            f"{type(self).__name__}: {steps.done} updates in {time.perf_counter() - begun:.1f} s,"
            f" ε = {self.epsilon_:.3g} at δ = {self.delta_:.3g}"
        )

    def _binned(self, dataset: Dataset) -> Dataset:
        """The data with bins in place of rows, if no network was asked for."""
        from ..data.columns import Numeric
        from ..features import bins, features_of

        given: Any = self
        self.bins_: Bins | None = None
        if given.hidden is not None or dataset.feature_map or given.method == "ww-dp-sgd":
            return dataset  # the spectral controller needs a network with wide layers
        columns = (
            self.input_.columns
            if self.input_ is not None
            else [Numeric(f"x{i}", -1, 1) for i in range(dataset.input_shape[0])]
        )
        self.bins_ = bins(columns, dataset.task == "regression")
        train = dataclasses.replace(dataset.train, x=features_of(self.bins_, dataset.train.x))
        return dataclasses.replace(dataset, train=train, feature_map=self.bins_.describe())

    def _say_again(self) -> None:
        if self._family() in _FITTED:
            warnings.warn(
                "this estimator, or a clone of the same estimator, was fitted before: each fit"
                " spends its epsilon again, and epsilon_ is that of the last fit only. Pass"
                " budget=zetaclip.Budget(epsilon, delta) to add them up",
                PrivacyLeakWarning,
                stacklevel=4,
            )

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "module_")  # a failed fit may have set bounds and classes

    def _outputs(self, X: Any) -> np.ndarray:
        """The network's outputs, in double precision so that rows don't affect each other."""
        import torch

        check_is_fitted(self)
        if self.pictures_ is not None:
            x = validate_data(self, X, dtype=Pictures.TYPES, allow_nd=True, reset=False)
            x = self.pictures_.features(x)
        elif self.input_ is not None:
            validate_data(self, X, skip_check_array=True, reset=False)
            x = self._rows(X)
        else:
            x = self._rescaled(
                validate_data(self, X, dtype=np.float64, reset=False, ensure_all_finite="allow-nan")
            )
        network = copy.deepcopy(self.module_).double()
        with torch.no_grad():
            parts = torch.from_numpy(x).split(_ROWS)
            if self.bins_ is not None:
                parts = tuple(self.bins_(part) for part in parts)
            outputs: np.ndarray = torch.cat([network(part) for part in parts]).numpy()
        return outputs

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        return tags


class PrivateClassifier(ClassifierMixin, _Private):
    """A linear head on fixed features, or a perceptron, trained with differential privacy.

    After ``fit``: ``epsilon_`` and ``delta_`` (what was spent, from the ledger), ``ledger_``,
    ``clip_history_``, ``classes_``, ``module_``.

    Args:
        epsilon: What one fit may spend.
        delta: The δ; None takes the smaller of 1e-5 and N^-1.1.
        hidden: Widths of the hidden layers; ``()`` is logistic regression. None: a linear
            head on fixed features: smooth bins of the declared columns (``zetaclip.features.bins``)
            or ``features``; for the method ww-dp-sgd (128, 64).
        epochs: Expected passes over the data; None lets the method choose.
        method: A name from ``zetaclip.methods.names()``.
        bounds: (lowest, highest) of the features, each a number or one number per feature. Values
            outside are clipped.
        classes: All possible labels.
        num_examples: A public number of records.
        budget: A ``zetaclip.Budget`` that all fits are charged to.
        random_state: Makes a fit repeatable; anyone who knows it can remove the noise. None takes
            secret noise. Fits charged to one ``budget`` draw different noise from the same number.
            Without a budget they share the noise, and the difference of two such models is exact.
        class_weight: {label: weight} from public knowledge; other labels have weight 1. "balanced"
            is an error, because it would count private labels. Give weights below 1 to classes that
            should count less: a clipped gradient can't grow.
        schema: For tables with words, dates or missing values: what the columns are, as in the
            schema of ``zetaclip.data.load``, as a mapping or a file. ``classes`` may be in it, too.
        lr: Learning rate; None takes the method's.
        batch_size: Expected batch size; None chooses one by the number of records.
        max_sample_weight: The bound of ``sample_weight`` in ``fit``; larger ones are clipped to it.
        verbose: Whether to show progress.
        features: "patches" or "scattering" for an array of pictures: the estimator is then a head
            on fixed features, which no real picture was used for; ``hidden`` is best left out.
            X has the shape (rows, height, width), (rows, channels, height, width) or (rows, height,
            width, channels), and ``bounds`` are black and white; for uint8 they are 0 and 255.

    **Guarantee.** The fitted estimator is (``epsilon_``, ``delta_``)-differentially private with
    respect to adding or removing one row of (X, y), if ``bounds``, ``classes`` and ``num_examples``
    were not taken from the data.

    **Edge cases.** A missing number is the middle of its bounds; a missing or unknown word is no
    word at all. What is not declared is taken from the data, with a ``PrivacyLeakWarning`` and a
    note in the ledger. ``score`` on private data is a release of its own. A second fit spends
    again; see ``budget``.

    Examples:
        >>> model = PrivateClassifier(epsilon=1.0, bounds=(0, 1), classes=[0, 1], num_examples=1000)
        >>> model.fit(X, y).predict(X_new)  # doctest: +SKIP
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float | None = None,
        hidden: tuple[int, ...] | None = None,
        epochs: float | None = None,
        method: str = "auto",
        bounds: Any = None,
        classes: Any = None,
        num_examples: int | None = None,
        budget: Budget | None = None,
        random_state: Any = None,
        class_weight: Any = None,
        schema: Any = None,
        lr: float | None = None,
        batch_size: int | None = None,
        max_sample_weight: float = 1.0,
        verbose: bool | int = False,
        features: str | None = None,
    ) -> None:
        self.features = features
        self.epsilon = epsilon
        self.delta = delta
        self.hidden = hidden
        self.epochs = epochs
        self.method = method
        self.bounds = bounds
        self.classes = classes
        self.class_weight = class_weight
        self.num_examples = num_examples
        self.budget = budget
        self.random_state = random_state
        self.schema = schema
        self.lr = lr
        self.batch_size = batch_size
        self.max_sample_weight = max_sample_weight
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> PrivateClassifier:
        """Trains on the rows of X and their labels y.

        Args:
            X: Rows: numbers, with NaN where one is missing, or a table with a ``schema``.
            y: Labels.
            sample_weight: Weight of each record's loss, from 0 to ``max_sample_weight``. It must be
                an attribute of the record, and not depend on other records.

        Returns:
            The estimator.

        Raises:
            ValueError: A label is not among the declared classes, or an argument is wrong.
            BudgetExceeded: The budget does not allow this fit.
        """
        import torch

        from ..data import Dataset, Split

        leaks: list[str] = []
        x, y = self._read(X, y, leaks, numeric=False)
        check_classification_targets(y)
        known = self._known_classes(y)
        if known is None:
            leaks.append("classes")
        self.classes_ = np.unique(y if known is None else known)
        _check_repeats(self.classes_, y, known is None)
        if len(self.classes_) < 2:
            raise ValueError(f"{type(self).__name__} needs at least two classes, but got 1 class")
        codes = np.minimum(np.searchsorted(self.classes_, y), len(self.classes_) - 1)
        if np.any(self.classes_[codes] != y):
            raise ValueError("y contains labels that are not among the declared classes=")
        weights = self._class_weights()
        inputs = torch.from_numpy(x).float()
        two = len(self.classes_) == 2
        targets = torch.from_numpy(codes)
        self._train(
            Dataset(
                name="the user's table",
                task="binary" if two else "classification",
                train=Split(
                    inputs,
                    targets.float() if two else targets.long(),
                    self._weight(sample_weight, x),
                ),
                test=None,
                outputs=1 if two else len(self.classes_),
                unit="one row" if self.pictures_ is None else "one image",
                public=False,
                nominal_size=self.num_examples,
                feature_map=None if self.pictures_ is None else self.pictures_.describe(),
            ),
            _with_size(leaks, self.num_examples),
            weights,
        )
        return self

    def _known_classes(self, y: np.ndarray) -> np.ndarray | None:
        """The declared labels, of the kind that y has; None if there are none."""
        if self.classes is not None:
            return np.asarray(self.classes)
        named = declared(self.schema).get("classes")
        return None if named is None else np.asarray(named).astype(y.dtype)

    def _class_weights(self) -> dict[str, float] | None:
        """The declared weights, by the number of each class."""
        if self.class_weight is None:
            return None
        if not isinstance(self.class_weight, Mapping):
            raise ValueError(
                f"class_weight={self.class_weight!r}: weights computed from the data reveal how"
                " many records each class has, which epsilon_ does not cover. Declare them from"
                " public knowledge, as {label: weight}"
            )
        numbers = {label: number for number, label in enumerate(self.classes_.tolist())}
        unknown = [label for label in self.class_weight if label not in numbers]
        if unknown:
            raise ValueError(f"class_weight names {unknown[0]!r}, which is not among the classes")
        return {str(numbers[label]): float(weight) for label, weight in self.class_weight.items()}

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each class, in the order of ``classes_``."""
        outputs = self._outputs(X)
        if outputs.shape[1] == 1:
            outputs = np.concatenate((np.zeros_like(outputs), outputs), axis=1)
        shares = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        probabilities: np.ndarray = shares / shares.sum(axis=1, keepdims=True)
        return probabilities

    def predict(self, X: Any) -> np.ndarray:
        """The most likely class of each row."""
        best = self.predict_proba(X).argmax(axis=1)
        labels: np.ndarray = self.classes_[best]
        return labels

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # The 300 records of scikit-learn's checks are too few to learn from at ε = 1.
        tags.classifier_tags.poor_score = True
        return tags


class PrivateRegressor(RegressorMixin, _Private):
    """As ``PrivateClassifier``, for a number.

    The attributes, the guarantee and the edge cases are those of ``PrivateClassifier``.

    Args:
        epsilon: What one fit may spend.
        delta: The δ; None takes the smaller of 1e-5 and N^-1.1.
        hidden: Widths of the hidden layers; ``()`` is linear regression. None: a linear
            head on smooth bins of the declared columns; for the method ww-dp-sgd (128, 64).
        epochs: Expected passes over the data; None lets the method choose.
        method: A name from ``zetaclip.methods.names()``.
        bounds: See ``PrivateClassifier``.
        target_bounds: (lowest, highest) of the target. Targets and predictions outside are clipped.
        num_examples: A public number of records.
        budget: A ``zetaclip.Budget`` that all fits are charged to.
        random_state: See ``PrivateClassifier``.
        schema: See ``PrivateClassifier``; ``target_bounds`` may be in it, too.
        lr: See ``PrivateClassifier``.
        batch_size: See ``PrivateClassifier``.
        max_sample_weight: See ``PrivateClassifier``.
        verbose: See ``PrivateClassifier``.
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float | None = None,
        hidden: tuple[int, ...] | None = None,
        epochs: float | None = None,
        method: str = "auto",
        bounds: Any = None,
        target_bounds: tuple[float, float] | None = None,
        num_examples: int | None = None,
        budget: Budget | None = None,
        random_state: Any = None,
        schema: Any = None,
        lr: float | None = None,
        batch_size: int | None = None,
        max_sample_weight: float = 1.0,
        verbose: bool | int = False,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.hidden = hidden
        self.epochs = epochs
        self.method = method
        self.bounds = bounds
        self.target_bounds = target_bounds
        self.num_examples = num_examples
        self.budget = budget
        self.random_state = random_state
        self.schema = schema
        self.lr = lr
        self.batch_size = batch_size
        self.max_sample_weight = max_sample_weight
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> PrivateRegressor:
        """Trains on the rows of X and their targets y.

        Args:
            X: See ``PrivateClassifier.fit``.
            y: Targets.
            sample_weight: See ``PrivateClassifier.fit``.

        Returns:
            The estimator.

        Raises:
            ValueError: An argument is wrong.
            BudgetExceeded: The budget does not allow this fit.
        """
        import torch

        from ..data import Dataset, Split

        leaks: list[str] = []
        x, y = self._read(X, y, leaks, numeric=True)
        low, high = self._target_range(y, leaks)
        inputs = torch.from_numpy(x).float()
        self.target_low_, self.target_high_ = low, high
        self._train(
            Dataset(
                name="the user's table",
                task="regression",
                train=Split(
                    inputs,
                    torch.from_numpy(np.clip(y, low, high)).float(),
                    self._weight(sample_weight, x),
                ),
                test=None,
                outputs=1,
                unit="one row",
                public=False,
                nominal_size=self.num_examples,
                target_range=(low, high),
            ),
            _with_size(leaks, self.num_examples),
        )
        return self

    def _target_range(self, y: np.ndarray, leaks: list[str]) -> tuple[float, float]:
        bounds = self.target_bounds
        if bounds is None:
            bounds = declared(self.schema).get("target_bounds")
        if bounds is None:
            leaks.append("target_bounds")
            low, high = float(y.min()), float(y.max())
            return (low, high) if low < high else (low - 0.5, high + 0.5)
        try:
            low, high = (float(bound) for bound in bounds)
        except (TypeError, ValueError):
            raise ValueError(
                f"target_bounds must be two numbers, (lowest, highest), not {bounds!r}"
            ) from None
        if not (np.isfinite(low) and np.isfinite(high) and low < high):
            raise ValueError(f"target_bounds must be (lowest, highest), finite, not {bounds}")
        return low, high

    def predict(self, X: Any) -> np.ndarray:
        """The target of each row, within its bounds."""
        outputs = self._outputs(X)[:, 0]
        low, high = self.target_low_, self.target_high_
        return np.clip(outputs * (high - low) / 2 + (high + low) / 2, low, high)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True  # as above
        return tags


_SIDES: Any = ((np.min, np.inf), (np.max, -np.inf))


def _check_repeats(classes: np.ndarray, y: np.ndarray, inferred: bool) -> None:
    """Refuses labels that are all different, as a number of the row or a name would be.

    Raises:
        ValueError: There are as many classes as rows.
    """
    if inferred and len(classes) == len(y) >= _FEWEST:
        raise ValueError(
            f"y has another label in each of the {len(y)} rows, so there is nothing to learn about"
            " its classes: is it a number of the row? For a quantity take PrivateRegressor"
        )


def _bounds(given: Any, x: np.ndarray, leaks: list[str]) -> tuple[np.ndarray, np.ndarray]:
    if given is None:
        leaks.append("bounds")
        there = np.isnan(x).all(axis=0)  # columns without any number
        low, high = (side(x, axis=0, where=~np.isnan(x), initial=start) for side, start in _SIDES)
        return np.where(there, 0.0, low), np.where(there, 0.0, high)
    try:
        low, high = (
            np.broadcast_to(np.asarray(side, dtype=np.float64), x.shape[1]).copy() for side in given
        )
    except (TypeError, ValueError):
        raise ValueError(
            f"bounds must be (lowest, highest), each a number or one number for each of the"
            f" {x.shape[1]} features"
        ) from None
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        raise ValueError(
            "bounds must be finite, and the lowest below the highest for every feature"
        )
    return low, high


def _with_size(leaks: list[str], num_examples: int | None) -> list[str]:
    return leaks if num_examples is not None else [*leaks, "num_examples"]


def _say_leaks(leaks: list[str]) -> None:
    if leaks:
        arguments = " and ".join(", ".join(leaks).rsplit(", ", 1))
        warnings.warn(
            f"{arguments} {'was' if len(leaks) == 1 else 'were'} not declared and came from the"
            " data, which is not private: epsilon_ does not cover what they reveal."
            f" Declare {', '.join(f'{name}=' for name in leaks)} from public knowledge",
            PrivacyLeakWarning,
            stacklevel=4,
        )


def _detach(steps: PrivateSteps) -> None:
    """Gives the module back; warnings about the spectrum name the estimator's arguments."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps.engine.detach()
    for warning in caught:
        warnings.warn(
            f"{warning.message} (here: use wider layers in hidden=, or method='dp-sgd', whose C is"
            " fixed)",
            stacklevel=4,
        )


def _network(dataset: Dataset, hidden: Any, seed: int | None) -> tuple[Any, str]:
    """A new perceptron, and the layer of largest rank, which a spectral probe should read."""
    import torch

    from ..models import Linear, Perceptron
    from ..randomness._forward import alone

    if hidden is None:
        if dataset.feature_map is not None:
            return Linear(dataset.input_shape, dataset.outputs), "fc"
        hidden = (128, 64)
    try:
        widths = tuple(int(width) for width in hidden)
    except (TypeError, ValueError):
        raise ValueError(
            f"hidden must be a sequence of widths, such as (128, 64), not {hidden!r}"
        ) from None
    if any(width < 1 for width in widths):
        raise ValueError(f"hidden must contain positive widths, not {hidden}")
    features = dataset.input_shape
    with alone():
        torch.manual_seed(secrets.randbits(63) if seed is None else seed)
        model = Perceptron(features, dataset.outputs, widths)
    sides = [*features, *widths, dataset.outputs]
    ranks = [min(pair) for pair in itertools.pairwise(sides)]
    return model, model.layers[ranks.index(max(ranks))]


def _seed(random_state: Any) -> int | None:
    """The seed of a fit; None stays None, so that the noise is secret.

    A RandomState is drawn from, so that its next fit gets other noise.
    """
    return (
        None if random_state is None else int(check_random_state(random_state).randint(2**31 - 1))
    )


def _config(given: Any, layer: str, seed: int | None) -> Config:
    from ..training.config import Config

    return Config(
        method=given.method,
        epsilon=given.epsilon,
        delta=given.delta,
        epochs=given.epochs,
        num_examples=given.num_examples,
        lr=given.lr,
        batch_size=given.batch_size,
        accountant=_ACCOUNTANT,
        seed=seed,
        spectral={"probe": layer} if given.method == "ww-dp-sgd" else {},
    )


def _with_sigma(config: Config, dataset: Dataset, method: Method, model: torch.nn.Module) -> Config:
    from ..training.recipe import nominal_size, resolve, total_steps

    resolved = resolve(config, dataset, method, model)
    size, _ = nominal_size(resolved, dataset)
    assert (
        resolved.batch_size is not None
        and resolved.epsilon is not None
        and resolved.delta is not None
    )
    rate = min(1.0, resolved.batch_size / size)
    sigma = _sigma(resolved.epsilon, resolved.delta, rate, total_steps(resolved, size))
    return resolved.changed(epsilon=None, sigma=sigma)


@lru_cache(maxsize=256)
def _sigma(epsilon: float, delta: float, rate: float, steps: int) -> float:
    from ..accounting import noise_multiplier_for

    return noise_multiplier_for(epsilon, delta, rate, steps, _ACCOUNTANT)
