"""Train and test tensors of the sets the project knows, and of files and folders of your own."""

from .dataset import Dataset, Split
from .registry import load, names
from .skew import dirichlet_skew, feasible_size

__all__ = ["Dataset", "Split", "dirichlet_skew", "feasible_size", "load", "names"]
