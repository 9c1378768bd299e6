"""The spectrum of a weight: squared singular values, largest first.

The eigenvalues of the smaller Gram matrix are the squared singular values at a fraction of the cost of an
SVD, but forming the Gram matrix squares the condition number. In float64 that costs nothing as long as the
smallest eigenvalue stays well above the rounding error of the largest one; where it does not, the singular
values are computed from the matrix itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Eigenvalues at or below this part of the largest one are rounding error or exact zeros: nothing fits them.
FLOOR = 1e-12

# Gram eigenvalues carry an absolute error of about 1e-15 of the largest. Above this ratio their relative
# error stays near 1e-6, below it we pay for the SVD.
_GRAM_LIMIT = 1e-9

# Rows per block when the Gram matrix is formed. Only blocks on and below the diagonal are computed, because
# the eigenvalue routine reads no others; smaller blocks would save more and multiply more slowly.
_BLOCK = 128


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
    scale = float(matrix.abs().max())
    if scale == 0.0:
        return torch.zeros(count, dtype=torch.float64)
    if not scale < float("inf"):  # also catches NaN, which ``max`` propagates
        return torch.full((count,), float("nan"), dtype=torch.float64)
    matrix = matrix.to("cpu", torch.float64)
    # Squares of extreme weights leave the range of float64; anything near 1 is left alone, to save a pass.
    if 1e-100 < scale < 1e100:
        scale = 1.0
    else:
        matrix = matrix / scale
    squares = _from_gram(matrix)
    kept = squares[squares > FLOOR * squares[0]]
    if kept[-1] < _GRAM_LIMIT * kept[0]:
        squares = torch.linalg.svdvals(matrix).square()
    return squares * scale**2


def _from_gram(matrix: Tensor) -> Tensor:
    """Eigenvalues of the smaller of M Mᵀ and Mᵀ M, descending, with rounding below zero cut off."""
    if matrix.shape[0] > matrix.shape[1]:
        matrix = matrix.T
    rows = matrix.shape[0]
    if rows <= 2 * _BLOCK:
        gram = matrix @ matrix.T
    else:
        gram = torch.zeros(rows, rows, dtype=matrix.dtype)
        for start in range(0, rows, _BLOCK):
            stop = min(start + _BLOCK, rows)
            torch.mm(matrix[start:], matrix[start:stop].T, out=gram[start:, start:stop])
    return torch.linalg.eigvalsh(gram, UPLO="L").flip(0).clamp_(min=0.0)
