"""Estimators for scikit-learn: a linear head on bins, or a perceptron, trained privately."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

try:
    from sklearn.base import ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
except ImportError as problem:
    raise ImportError(
        "zetaclip.sklearn needs scikit-learn: pip install 'zetaclip[sklearn]'"
    ) from problem

from ._estimator import Private
from ._rows import declared

if TYPE_CHECKING:
    from ..accounting import Budget

__all__ = ["PrivateClassifier", "PrivateRegressor"]

# Fewer rows may have labels that are all different by chance.
_FEWEST = 10


class PrivateClassifier(ClassifierMixin, Private):
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
        rows_per_unit: The largest number of rows that one of ``groups`` brings into a batch.
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
        rows_per_unit: int = 10,
    ) -> None:
        self.rows_per_unit = rows_per_unit
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

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None
    ) -> PrivateClassifier:
        """Trains on the rows of X and their labels y.

        Args:
            X: Rows: numbers, with NaN where one is missing, or a table with a ``schema``.
            y: Labels.
            sample_weight: Weight of each record's loss, from 0 to ``max_sample_weight``. It must be
                an attribute of the record, and not depend on other records.
            groups: Whose row each is. ε is then for one group with all its rows, and
                ``num_examples`` and ``batch_size`` count groups.

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
                **self._owners(groups, len(x)),
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


class PrivateRegressor(RegressorMixin, Private):
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
        rows_per_unit: See ``PrivateClassifier``.
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
        rows_per_unit: int = 10,
    ) -> None:
        self.rows_per_unit = rows_per_unit
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

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None
    ) -> PrivateRegressor:
        """Trains on the rows of X and their targets y.

        Args:
            X: See ``PrivateClassifier.fit``.
            y: Targets.
            sample_weight: See ``PrivateClassifier.fit``.
            groups: See ``PrivateClassifier.fit``.

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
                **self._owners(groups, len(x)),
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


def _with_size(leaks: list[str], num_examples: int | None) -> list[str]:
    return leaks if num_examples is not None else [*leaks, "num_examples"]
