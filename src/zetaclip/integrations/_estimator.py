"""What both estimators share: declared bounds, the private fit, the network's outputs."""

from __future__ import annotations

import copy
import dataclasses
import secrets
import time
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import (
    _check_sample_weight,
    check_consistent_length,
    check_is_fitted,
    validate_data,
)

from ..accounting import Budget
from ..errors import PrivacyLeakWarning
from . import _fitting as fitting
from ._pictures import Pictures
from ._rows import as_table, declared, has_words, table_input
from ._search import Search, search_above, spend

if TYPE_CHECKING:
    import torch

    from ..data import Dataset
    from ..data.inputs import TableInput
    from ..features import Bins

# Lineages (an estimator and its clones) that have released something in this process.
_FITTED: set[str] = set()
_PER_GROUP = ", per group"  # in the description of a fit that is charged to a budget
_ROWS = 1024  # rows that are predicted at a time
_SIDES: Any = ((np.min, np.inf), (np.max, -np.inf))


class Private(BaseEstimator):
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

    def _owners(self, groups: Any, rows: int) -> dict[str, Any]:
        """The fields of a ``Dataset`` that say whose rows they are."""
        import torch

        from ..data.holdout import owner_numbers

        if groups is None:
            return {"unit": "one row" if self.pictures_ is None else "one image"}
        if len(groups) != rows:
            raise ValueError(f"groups has {len(groups)} entries, but X has {rows} rows")
        if any(
            name is None or str(name) in ("nan", "NaT", "<NA>")
            for name in np.asarray(groups, dtype=object).tolist()
        ):
            raise ValueError("groups has a missing entry: say whose row it is, or leave it out")
        given: Any = self
        return {
            "unit": "one group with all its rows",
            "owners": torch.from_numpy(owner_numbers(np.asarray(groups).tolist())),
            "rows_per_unit": given.rows_per_unit,
        }

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
        seed = fitting.seed(given.random_state)
        dataset = self._binned(dataset)
        model, layer = fitting.network(dataset, given.hidden, seed)
        config = fitting.config(given, layer, seed).changed(class_weight=weights)
        method = build_method(config)
        if not method.private:
            raise ValueError(
                f"method {given.method!r} is not private; use scikit-learn's own MLPClassifier"
                " instead"
            )
        config = fitting.with_sigma(config, dataset, method, model)
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
            mark = "" if dataset.owners is None else _PER_GROUP
            what = f"{type(self).__name__}(epsilon={given.epsilon:g}{mark})"
            if any((_PER_GROUP in one.what) != bool(mark) for one in budget.spendings):
                warnings.warn(
                    "this budget has fits for single rows and fits for groups: its ε is for neither"
                    " then, because a row fit protects no group, and a group fit protects a single"
                    " row of a group only by twice its ε. Take a budget for each",
                    PrivacyLeakWarning,
                    stacklevel=3,
                )
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
        fitting.detach(steps)
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
