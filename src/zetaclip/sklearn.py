"""``PrivateClassifier`` and ``PrivateRegressor``: private training for scikit-learn."""

from .integrations.sklearn import PrivateClassifier, PrivateRegressor

__all__ = ["PrivateClassifier", "PrivateRegressor"]
