"""The spectrum of a weight: squared singular values, largest first.

The eigenvalues of the smaller Gram matrix are the squared singular values at a fraction of the cost of an
SVD, but forming the Gram matrix squares the condition number. In float64 that costs nothing as long as the
smallest eigenvalue stays well above the rounding error of the largest one; where it does not, the singular
values are computed from the matrix itself.
"""

from __future__ import annotations

import functools

import torch
from scipy.linalg.blas import dsyrk
from scipy.linalg.lapack import dsterf, dsytrd
from threadpoolctl import ThreadpoolController
from torch import Tensor

# Eigenvalues at or below this part of the largest one are rounding error or exact zeros: nothing fits them.
FLOOR = 1e-12

# Gram eigenvalues carry an absolute error of about 1e-15 of the largest. Above this ratio their relative
# error stays near 1e-6, below it we pay for the SVD.
_GRAM_LIMIT = 1e-9

# Side of the smallest Gram matrix that is worth more than one thread.
_THREADED = 512

# Columns that the reduction works on at a time, as LAPACK asks for.
_LWORK = 64


def as_matrix(weight: Tensor) -> Tensor:
    """``weight`` as a matrix: dense as is, a convolution kernel as (C_out, C_in * k * k)."""
    if weight.ndim < 2:
        raise ValueError(
            f"a spectrum needs a matrix or a convolution kernel, not a tensor of shape {tuple(weight.shape)}"
        )
    return weight.detach().flatten(1)


def eigenvalues(weight: Tensor) -> Tensor:
    """Squared singular values of ``weight`` in descending order, as float64 on the CPU.

    Edge cases: a tensor with no elements gives an empty result; one value that is not finite makes every
    eigenvalue NaN, so that a fit can say so; tensors with fewer than two dimensions raise ``ValueError``.
    """
    matrix = as_matrix(weight)
    if matrix.numel() == 0:
        return torch.empty(0, dtype=torch.float64)
    count = min(matrix.shape)
    scale = max(abs(float(end)) for end in matrix.aminmax())
    if scale == 0.0:
        return torch.zeros(count, dtype=torch.float64)
    if not scale < float("inf"):  # also catches NaN, which both ends then are
        return torch.full((count,), float("nan"), dtype=torch.float64)
    matrix = matrix.to("cpu", torch.float64)
    # Squares of extreme weights leave the range of float64; anything near 1 is left alone, to save a pass.
    if 1e-100 < scale < 1e100:
        scale = 1.0
    else:
        matrix = matrix / scale
    squares = _from_gram(matrix)
    if squares is None or _loses_digits(squares):
        squares = torch.linalg.svdvals(matrix).square()
    return squares * scale**2


def _loses_digits(squares: Tensor) -> bool:
    kept = squares[squares > FLOOR * squares[0]]
    return bool(kept[-1] < _GRAM_LIMIT * kept[0])


def _from_gram(matrix: Tensor) -> Tensor | None:
    """Eigenvalues of the smaller of M Mᵀ and Mᵀ M, descending, with rounding below zero cut off; None if LAPACK finds none.

    By scipy's LAPACK, step by step: half a product, a reduction to three diagonals, and their eigenvalues. ``torch.linalg.eigvalsh``
    takes up to 1.8 times as long (``bench/spectrum.py`` shows both).
    """
    transposed = matrix.contiguous().numpy().T  # as Fortran lays out: nothing is copied
    # On a public number of threads: the last digits depend on it, and an exact replay on theirs. Below some size threads only wait for each
    # other, and for torch's, which spin for a while after their own work.
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
    """The threads of scipy's linear algebra, which are not torch's."""
    return ThreadpoolController().select(user_api="blas")
