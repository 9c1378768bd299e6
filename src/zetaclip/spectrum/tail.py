"""One exponent ζ for the upper tail of a spectrum, compared with what random matrices give."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from .fits import Array, TailFit, fit_exponent
from .null import random_null


def fit_tail(
    eigs: Tensor | Array | Sequence[float],
    method: str = "rank",
    k: int | None = None,
    shape: tuple[int, int] | None = None,
) -> TailFit:
    """Fits the upper tail of ``eigs`` (any order, any scale).

    Args:
        eigs: Eigenvalues, i.e. squared singular values.
        method: "rank", "hill" or "ks" (explained in ``fits.py``).
        k: Tail size of "rank" and "hill". If not given, half of the eigenvalues, rounded up, and at
            least 4.
        shape: Shape of the matrix. If given, a ζ inside the range of random matrices of that shape
            is marked as weak.

    Returns:
        The fit. Its ζ may be used only if ``ok`` is true.

    Raises:
        ValueError: The method is unknown or ``k`` is below 1.

    **Edge cases.** Values at or below 1e-12 of the largest are dropped. A NaN or infinity anywhere,
    or fewer than 4 distinct values in the tail, gives ``ok=False``. A ``k`` above the number of
    eigenvalues is reduced to it.

    Examples:
        >>> fit_tail(eigenvalues(torch.randn(64, 128)), shape=(64, 128)).ok
        True
    """
    fit = fit_exponent(eigs, method, k)
    if shape is None or fit.weak or not fit.ok:
        return fit
    null = random_null(shape, method, k)
    if not null.low <= fit.zeta <= null.high:
        return fit
    reason = f"random matrices read {null.low:.2f} to {null.high:.2f}"
    return dataclasses.replace(fit, weak=True, reason=reason)
