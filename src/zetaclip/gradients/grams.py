"""Norms of gradients of sequences from Gram matrices, where that costs less than the gradients.

The gradient Σ_t g_t x_tᵀ has the squared norm Σ_{s,t} <x_s, x_t> <g_s, g_t>. Gram matrices are
taken in float64, and a norm that has lost too many digits by cancellation is NaN.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# A float that passes through memory (written, read for the norm, read for the sum) costs about as
# much as this many multiply-adds of a matrix product; `bench/kernels.py` measures it. This affects
# only speed.
MEMORY_COST = 40
# Floats that Gram matrices are computed from at once: they stay in the cache.
GRAM_FLOATS = 1 << 20
# A float64 multiply-add costs about as much as this many in float32, by torch's kernels and beside
# the compiled ones. This affects only speed.
DOUBLE_COST, DOUBLE_BESIDE_COMPILED = 2.5, 6
# Gram matrices are not used for longer sequences: the float32 gradient of such a record may have
# lost too many digits beside the terms that it is the sum of.
LONGEST_GRAM = 160
# A norm from Gram matrices below this share of Σ_t |x_t||g_t|, its value without cancellation, is
# not trusted. A float64 dot product of K terms is off by at most K 2^-53 of that value: for
# K = 65,536, by 1e-5 of the squared norm.
TRUSTED = 1e-3


@functools.cache
def floor(width: int, dtype: torch.dtype) -> float:
    """How much of a norm over ``width`` values can be lost because tiny squares underflow to zero.

    It is added wherever norms are multiplied. Otherwise a lost 1e-20 times a gradient of 1e20 would
    make a record of norm 1 count as zero. For ordinary norms it is far below the rounding error.
    """
    return (width * torch.finfo(dtype).tiny) ** 0.5


def gram_is_cheaper(
    positions: int, inputs: int, outputs: int, compiled: bool, read: int | None = None
) -> bool:
    """Whether norms by float64 Gram matrices (T x T) cost less than computing the gradients.

    Args:
        positions: T.
        inputs: Width of the layer's input.
        outputs: Width of the layer's output.
        compiled: Whether compiled code would compute the gradients.
        read: Numbers per position that the Gram matrix of the inputs is computed from, if that is
            less than their width.

    Returns:
        An estimate from shapes only, so that a replay makes the same choice.
    """
    gram = positions * positions * ((read or inputs) + outputs)
    made = positions * inputs * outputs
    if compiled:
        return positions <= LONGEST_GRAM and DOUBLE_BESIDE_COMPILED * gram <= made
    return positions <= LONGEST_GRAM and DOUBLE_COST * gram <= made + MEMORY_COST * inputs * outputs


def gram_share(positions: int, made: bool) -> float:
    """The share of its value without cancellation that a norm by Gram matrices must have.

    Args:
        positions: T.
        made: Whether the sum gets gradients that were made in float32. Each is then the sum of T
            float32 terms, which is off by T 2^-24 of the value without cancellation.
    """
    return max(TRUSTED, positions * 2.0**-13) if made else TRUSTED


def gram_norms(x: Tensor, g: Tensor, share: float) -> Tensor:
    """Norms of Σ_t g_t x_tᵀ, for x (B, T, I) and g (B, T, O), from two float64 Gram matrices.

    Args:
        x: Inputs, (B, T, I).
        g: Output gradients, (B, T, O).
        share: The smallest share of its largest possible value at which a norm is trusted.

    **Guarantee.** With the ``share`` of ``gram_share`` a norm is at most 2^-11 below the length of
    what the sum gets. Gram matrices in float32 could give half of it: where the gradients of two
    positions cancel, the terms that remain may be too small to change a float32 sum.
    **Edge cases.** If the norm is too small compared with its largest possible value, it is NaN.
    """
    some = max(1, GRAM_FLOATS // max(1, x.shape[1] * (x.shape[2] + g.shape[2])))
    parts = zip(x.split(some), g.split(some), strict=True)
    widths = x.shape[2], g.shape[2]
    return torch.cat([norms_of_grams(gram(a), gram(b), *widths, share) for a, b in parts])


def gram(rows: Tensor) -> Tensor:
    """The float64 Gram matrices of (B, T, width)."""
    wide = rows.double()
    return torch.bmm(wide, wide.transpose(1, 2))


def norms_of_grams(
    gram_x: Tensor, gram_g: Tensor, inputs: int, outputs: int, share: float
) -> Tensor:
    """Norms of Σ_t g_t x_tᵀ from the Gram matrices; NaN if they are below ``share``.

    Args:
        gram_x: Gram matrices of the inputs.
        gram_g: Gram matrices of the output gradients.
        inputs: I.
        outputs: O.
        share: As in ``gram_norms``.
    """
    squares = torch.linalg.vecdot(gram_x.flatten(1), gram_g.flatten(1)).clamp_min_(0)
    lengths_x = gram_x.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt_()
    lengths_g = gram_g.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt_()
    return trusted(squares.sqrt_(), lengths_x, lengths_g, inputs, outputs, share)


def trusted(
    norms: Tensor, lengths_x: Tensor, lengths_g: Tensor, inputs: int, outputs: int, share: float
) -> Tensor:
    """Checks norms of Σ_t g_t x_tᵀ for lost precision, and adds what underflow can hide.

    Args:
        norms: The norms, (B,); overwritten by the result.
        lengths_x: Norms of x_t, (B, T).
        lengths_g: Norms of g_t, (B, T).
        inputs: Width of x.
        outputs: Width of g.
        share: A norm below this share of Σ_t |x_t||g_t| is unreliable.

    Returns:
        The norms; NaN if unreliable.
    """
    largest = torch.linalg.vecdot(lengths_x, lengths_g)
    lost_x, lost_g = floor(inputs, lengths_x.dtype), floor(outputs, lengths_g.dtype)
    hidden = torch.linalg.vecdot(lengths_x + lost_x, lengths_g + lost_g).sub_(largest)
    # The comparison is also false for inf and NaN, after an overflow.
    return norms.masked_fill_(~(norms >= share * largest), torch.nan).add_(hidden)
