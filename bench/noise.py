"""How far the noise is from an exact Gaussian on its grid, and what that can add to ε.

    python bench/noise.py

A release is a whole number of a public grid: the rounded sum plus rounded noise. If the noise were
an exact
Gaussian, that would be the Gaussian mechanism followed by rounding. It is not quite: a draw has 52
bits for its
radius (and an exponent that is drawn as well), 54 for its angle, and its arithmetic rounds. Here
that is turned
into a bound for the probability of every cell of the grid.

Couple each draw with a continuous one whose leading bits it has. Then they differ by at most

    2^-52 / r   (radius)   +   r (π/2) 2^-53   (angle)   +   (a + 1) 2^-53 |x|   (arithmetic, and
    scaling)

where r is the radius of the pair and a is measured against 50 digits. A cell [x, x + h) gains or
loses only what
crosses its two borders, so its probability is off by a factor of at most 1 ± ρ(x), ρ(x) = 2
E[difference | x] / h.
With ρ the largest out to 9σ, m = E[|x| ρ(x)] and v = E[ρ(x)²] for a normal x, the privacy loss of
one release with D
coordinates moves by at most m√D/σ + √(8 D v ln(1/δ₀)) + (4/3) ρ ln(1/δ₀), but for a chance of δ₀:
the first term is
its mean, the others are Bernstein's. Over T releases the middle term grows by √T, the others by T.
Sampling makes all
of it smaller, which is left out here.
"""

from __future__ import annotations

import math

from common import one_thread, table

one_thread()

import mpmath
import numpy as np
from scipy.special import k0e
from scipy.stats import norm

from zetaclip.grid import spacing, widened
from zetaclip.randomness import _numpy, normals

REACH = 9.0
MISSED = 1e-9


def arithmetic_error(groups: int = 300) -> float:
    """The largest relative error of a draw against 50 digits, in units of 2^-53.

    Pairs beyond 4 included.
    """
    key = bytes(range(32))
    values = normals(key, 64 * groups).reshape(groups, 2, 32)
    words = _numpy.stream(key, 0, groups, _numpy.NOISE).astype(object).reshape(groups, 4, 32)
    worst = 0.0
    with mpmath.workdps(50):
        for group in range(groups):
            for pair in range(32):
                low, high, angle_low, angle_high = (int(part) for part in words[group, :, pair])
                radius, angle = high << 32 | low, angle_high << 32 | angle_low
                if radius >> 52 == 0:
                    continue  # its exponent comes from elsewhere, its arithmetic is the same
                u = mpmath.mpf(radius % 2**52 + 2**52) * mpmath.mpf(2) ** (
                    (radius >> 52).bit_length() - 65
                )
                turn = (mpmath.mpf(angle >> 10 & 2**52 - 1) + 0.5) / 2**52 - mpmath.mpf(1) / 2
                r, a = mpmath.sqrt(-2 * mpmath.log(u)), turn * mpmath.pi / 2
                exact = sorted([abs(r * mpmath.cos(a)), abs(r * mpmath.sin(a))])
                for found, true in zip(sorted(abs(values[group, :, pair])), exact, strict=True):
                    worst = max(worst, float(abs(found - true) / true) * 2.0**53)
    return worst


def cell_error(x: np.ndarray, width: float, arithmetic: float) -> np.ndarray:
    """By how much the probability of a cell at x can be off, as a share of it."""
    nearness = k0e(x**2 / 4) / math.sqrt(2 * math.pi)  # E[1 / r | x]
    apart = (
        2.0**-52 * nearness
        + np.sqrt(x**2 + 1) * math.pi / 2 * 2.0**-53
        + (arithmetic + 1) * 2.0**-53 * x
    )
    return 2 * apart / width * np.exp(x * width)


def main() -> None:
    arithmetic = arithmetic_error()
    print(f"largest error of a draw: {arithmetic:.2f} units of 2^-53; the bound below takes 4\n")
    assert arithmetic <= 4
    rows = []
    for coordinates in (10**3, 10**5, 10**6, 11 * 10**6, 10**8):
        for sigma in (0.5, 1.0, 5.0, 50.0):
            width = spacing(1.0, sigma, coordinates) / (sigma * widened(1.0))
            x = np.concatenate([np.geomspace(width / 2, 1e-3, 400), np.linspace(1e-3, REACH, 4000)])
            errors = cell_error(x, width, 4.0)
            worst, square = float(errors.max()), float(np.trapezoid(2 * norm.pdf(x) * errors**2, x))
            square += 2 * norm.pdf(0) * width / 2 * float(errors[0]) ** 2  # the cell at zero
            spread = math.sqrt(
                8 * coordinates * square * math.log(1 / MISSED)
            ) + 4 / 3 * worst * math.log(1 / MISSED)
            shift = (
                float(np.trapezoid(2 * norm.pdf(x) * x * errors, x))
                * math.sqrt(coordinates)
                / sigma
            )
            rows.append(
                [
                    f"{coordinates:,}",
                    f"{sigma:g}",
                    f"2^{math.log2(width):.1f}",
                    f"{worst:.1e}",
                    f"{shift + spread:.1e}",
                ]
            )
    head = ["coordinates", "σ", "cell, in units of the noise", "cell's probability off by at most"]
    print(table([*head, f"added to ε of one release, but for {MISSED:g}"], rows))
    print("\nTails: a draw reaches 10.26; a Gaussian lies beyond that with a chance of 1e-24.")


if __name__ == "__main__":
    main()
