"""Private training with scikit-learn's interface: ``PrivateClassifier``, ``PrivateRegressor``."""

from .integrations.sklearn import PrivateClassifier, PrivateRegressor

__all__ = ["PrivateClassifier", "PrivateRegressor"]
