"""Train and test tensors of known public sets, and of your own files and folders."""

from .dataset import Dataset, Split
from .registry import load, names
from .skew import dirichlet_skew, feasible_size

__all__ = ["Dataset", "Split", "dirichlet_skew", "feasible_size", "load", "names"]
