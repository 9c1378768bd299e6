"""A search over settings that shares one budget: refused at the start, or with room for its refit.

scikit-learn's searches clone their estimator, and tell it nothing else. So a clone looks who asked
for it. A search clones in its own process, whatever ``n_jobs`` is.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sklearn.base import is_classifier
from sklearn.model_selection import (
    GridSearchCV,
    ParameterGrid,
    ParameterSampler,
    RandomizedSearchCV,
    check_cv,
)

from ..accounting import Budget
from ..errors import BudgetExceeded
from ..ledger import Event

_DEEPEST = 30  # frames between a search and the clone of an estimator inside pipelines


@dataclass(frozen=True)
class Search:
    """What a clone knows of the search that made it.

    Attributes:
        name: Names the search in the budget.
        fits: Fits of all candidates on all folds.
        refit: Whether the best candidate is fitted again on all rows.
        rows: How many rows the search has; a fit on all of them is the refit.
    """

    name: str
    fits: int
    refit: bool
    rows: int


def search_above() -> Search | None:
    """The search whose ``fit`` is cloning an estimator now; None if there is none."""
    frame: Any = sys._getframe(1)
    for _ in range(_DEEPEST):
        if frame is None:
            return None
        owner = frame.f_locals.get("self")
        if isinstance(owner, (GridSearchCV, RandomizedSearchCV)) and "X" in frame.f_locals:
            return _described(owner, frame.f_locals["X"], frame.f_locals.get("y"))
        frame = frame.f_back
    return None


def _described(search: Any, X: Any, y: Any) -> Search | None:
    try:
        if isinstance(search, GridSearchCV):
            candidates = len(ParameterGrid(search.param_grid))
        else:
            candidates = len(ParameterSampler(search.param_distributions, search.n_iter))
        folds = check_cv(search.cv, y, classifier=is_classifier(search.estimator)).get_n_splits(
            X, y
        )
        rows = X.shape[0] if hasattr(X, "shape") else len(X)
    except (TypeError, ValueError):  # the search itself will say what is wrong
        return None
    return Search(secrets.token_hex(4), candidates * folds, bool(search.refit), int(rows))


def spend(
    budget: Budget, events: Sequence[Event], what: str, search: Search | None, rows: int
) -> str:
    """Charges a fit to the budget.

    Args:
        budget: The budget.
        events: What the fit will release.
        what: Description of the fit.
        search: The search that the fit belongs to, if it belongs to one.
        rows: Rows of the fit.

    Returns:
        The budget's receipt.

    Raises:
        BudgetExceeded: The budget has too little left: for this fit; for the whole search, at its
            first fit; or for the refit of the costliest candidate so far. Nothing was charged.
    """
    if search is None or rows == search.rows:
        return budget.spend(events, what)
    label = f"{what}, search {search.name}"
    earlier = [one.events for one in budget.spendings if one.what.endswith(search.name)]
    if not earlier:
        count = search.fits + search.refit
        if not budget.allows(*[events] * count):
            raise BudgetExceeded(
                f"a search of {search.fits} fits{' and a refit' if search.refit else ''}, each like"
                f" {what}, needs more than is left of the budget ε = {budget.epsilon:g} at δ ="
                f" {budget.delta:g}, of which {budget.spent:.3g} is spent. Nothing was released;"
                " take fewer candidates or folds, or a smaller epsilon"
            )
    if search.refit:
        for kept in {*earlier, tuple(events)}:
            if not budget.allows(events, kept):
                raise BudgetExceeded(
                    f"{what} would leave too little of the budget ε = {budget.epsilon:g} for the"
                    " refit at the end of the search. Nothing was released by this fit"
                )
    return budget.spend(events, label)
