"""``PrivateClassifier`` and ``PrivateRegressor``: private training behind scikit-learn's interface."""

from .integrations.sklearn import PrivateClassifier, PrivateRegressor

__all__ = ["PrivateClassifier", "PrivateRegressor"]
