"""Weights -> ζ. Knows nothing of privacy."""

from .eigenvalues import as_matrix, eigenvalues
from .null import Null, random_null, random_spectrum
from .probe import Probe, Reading
from .tail import METHODS, TailFit, fit_tail

__all__ = [
    "METHODS",
    "Null",
    "Probe",
    "Reading",
    "TailFit",
    "as_matrix",
    "eigenvalues",
    "fit_tail",
    "random_null",
    "random_spectrum",
]
