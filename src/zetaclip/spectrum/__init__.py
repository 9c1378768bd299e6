"""From weights to ζ, the tail exponent of their spectrum, and to what stands out of known noise.

Nothing here depends on privacy.
"""

from .eigenvalues import as_matrix, eigenvalues
from .fits import METHODS, TailFit
from .null import Null, random_null, random_spectrum
from .outliers import Outliers, noise_edge, outliers
from .probe import Probe, Reading
from .tail import fit_tail

__all__ = [
    "METHODS",
    "Null",
    "Outliers",
    "Probe",
    "Reading",
    "TailFit",
    "as_matrix",
    "eigenvalues",
    "fit_tail",
    "noise_edge",
    "outliers",
    "random_null",
    "random_spectrum",
]
