"""What the attacks on the noise share: noise as it was once made, and what is seen in it. Nothing
here looks inside zetaclip."""

import numpy as np


def old_noise(count, half, bits, seed, dtype=np.float32):
    """Normals by Box-Muller from uniforms of few bits: values i and i + ``half`` of a block share a
    radius.

    float32 normals came so from 24 bits in blocks of 128 (compiled) or 16 (torch), torch's float64
    ones from 53 in blocks of 16.
    """
    rng = np.random.default_rng(seed)
    blocks = -(-count // (2 * half))
    steps = rng.integers(0, 2**bits, (2, blocks, half)).astype(np.float64)
    radius, angle = (
        np.sqrt(-2 * np.log1p(-steps[0] * 2.0**-bits)),
        2 * np.pi * steps[1] * 2.0**-bits,
    )
    values = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return values.reshape(-1)[:count].astype(dtype)


def misfits(first, second, scale, bits, limit):
    """How far exp(-r²/2) is from a multiple of 2^-bits, in such steps, for pairs with a small
    radius r: 1/4 in the mean if it is none.

    Only small radii tell: the grid of u is coarse there against the precision of r.
    """
    squares = (first.astype(np.float64) ** 2 + second.astype(np.float64) ** 2) / scale**2
    steps = -np.expm1(-squares[squares < limit] / 2) * 2.0**bits
    return np.abs(steps - np.round(steps))


def grid_score(values, scale, bits, limit, lags=(1, 2, 4, 8, 16, 32, 64)):
    """How surely the radii of pairs lie on a grid, in standard deviations, at the lag where it is
    surest."""
    scores = []
    for lag in lags:
        found = misfits(values[:-lag], values[lag:], scale, bits, limit)
        if len(found) > 30:  # uniform on [0, 1/2] if there is no grid
            scores.append((0.25 - found.mean()) * np.sqrt(48 * len(found)))
    return max(scores)
