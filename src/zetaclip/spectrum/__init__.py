"""From weights to ζ, the tail exponent of their spectrum. Nothing here depends on privacy."""

from .eigenvalues import as_matrix, eigenvalues
from .fits import METHODS, TailFit
from .null import Null, random_null, random_spectrum
from .probe import Probe, Reading
from .tail import fit_tail

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
