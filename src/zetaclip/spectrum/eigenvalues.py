"""The spectrum of a weight: squared singular values, largest first.

The eigenvalues of the smaller Gram matrix are the squared singular values, at less than half of the
cost of an SVD. In float64 their error is about 1e-15 of the largest one. So those below 1e-9 of it
have fewer than six digits, and those near ``FLOOR``, where fits drop them, about three. A fit of
the upper tail does not see the difference (`tests/spectrum/test_eigenvalues.py` compares with an
SVD).
"""

from __future__ import annotations

import functools

import torch
from scipy.linalg.blas import dsyrk
from scipy.linalg.lapack import dsterf, dsytrd
from threadpoolctl import ThreadpoolController
from torch import Tensor

# Eigenvalues at or below this fraction of the largest are rounding errors or zeros: fits drop them.
FLOOR = 1e-12

# Gram matrices with smaller sides are faster on one thread.
_THREADED = 512

# Columns that LAPACK's reduction processes at a time.
_LWORK = 64


def as_matrix(weight: Tensor) -> Tensor:
    """``weight`` as a matrix: dense weights as is, a kernel as (C_out, C_in * k * k).

    Raises:
        ValueError: The tensor has fewer than two dimensions.
    """
    if weight.ndim < 2:
        raise ValueError(
            "a spectrum needs a matrix or a convolution kernel, "
            f"not a tensor of shape {tuple(weight.shape)}"
        )
    return weight.detach().flatten(1)


def eigenvalues(weight: Tensor) -> Tensor:
    """Squared singular values of ``weight`` in descending order, as float64 on the CPU.

    Their error is about 1e-15 of the largest.

    Raises:
        ValueError: The tensor has fewer than two dimensions.

    **Edge cases.** A tensor without elements gives an empty result. If one value is not finite,
    every eigenvalue is NaN, and a fit of them is not ``ok``.
    """
    matrix = as_matrix(weight)
    if matrix.numel() == 0:
        return torch.empty(0, dtype=torch.float64)
    count = min(matrix.shape)
    scale = max(abs(float(end)) for end in matrix.aminmax())
    if scale == 0.0:
        return torch.zeros(count, dtype=torch.float64)
    if not scale < float("inf"):  # also true for NaN: aminmax then returns NaN
        return torch.full((count,), float("nan"), dtype=torch.float64)
    matrix = matrix.to("cpu", torch.float64)
    # Squares of extreme weights overflow or underflow float64. Others are not scaled: saves a pass.
    if 1e-100 < scale < 1e100:
        scale = 1.0
    else:
        matrix = matrix / scale
    squares = _from_gram(matrix)
    if squares is None:
        squares = torch.linalg.svdvals(matrix).square()
    return squares * scale**2


def _from_gram(matrix: Tensor) -> Tensor | None:
    """Eigenvalues of the smaller of M Mᵀ and Mᵀ M, descending, at least 0; None if LAPACK fails.

    This calls scipy's LAPACK: one triangle of the product, a reduction to tridiagonal form, and its
    eigenvalues. ``torch.linalg.eigvalsh`` takes up to 1.8 times as long (``bench/spectrum.py``
    measures both).
    """
    transposed = matrix.contiguous().numpy().T  # Fortran order: nothing is copied
    # The number of threads is fixed by public values: the last digits depend on it, and an exact
    # replay needs the same digits. Threads of small products only wait for each other, and for
    # torch's threads, which spin for a while after their own work.
    threads = torch.get_num_threads() if min(matrix.shape) >= _THREADED else 1
    with _blas().limit(limits=threads):
        gram = dsyrk(1.0, transposed, trans=matrix.shape[0] <= matrix.shape[1], lower=1)
        if gram.shape[0] == 1:
            return torch.from_numpy(gram[0])
        _, diagonal, beside, _, bad = dsytrd(
            gram, lower=1, lwork=_LWORK * gram.shape[0], overwrite_a=1
        )
    values, missing = dsterf(diagonal, beside)
    if bad or missing:
        return None
    return torch.from_numpy(values[::-1].copy()).clamp_(min=0.0)


@functools.cache
def _blas() -> ThreadpoolController:
    """The thread pools of scipy's BLAS, which are separate from torch's."""
    return ThreadpoolController().select(user_api="blas")
