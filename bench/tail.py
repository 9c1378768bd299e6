"""What torch's float32 normals would do to δ, and what zetaclip's do.

    python bench/tail.py

torch makes float32 normals by the Box-Muller transform from uniforms of 24 bits: radius = sqrt(-2 ln u) with u a multiple
of 2^-24, so no value lies beyond sqrt(48 ln 2) = 5.768. Let a data set have one more record than its neighbour, whose
clipped gradient lies on one coordinate, C long. In a step that draws it, that coordinate is C + σC z instead of σC z.
Wherever C + σC z > σC z_max the neighbour can't have given that output, whatever ε is: the probability of such an
output is a part of δ. It is q P(z > z_max - 1/σ) per step, and 1 - (1 - that)^T in T steps.

The setting is N = 60000, L = 256, 8 epochs of 235 steps. P(z > ...) is summed over the generator's own radii, with
the angle taken as continuous. zetaclip draws values beyond 5 again in float64 (``randomness.gaussian``), which moves
z_max; the script also checks that the chance to be drawn again is that of a true normal.
"""

from __future__ import annotations

import math

from common import one_thread, table

one_thread()

import numpy as np  # noqa: E402
from scipy.stats import norm  # noqa: E402

from zetaclip.randomness import TAIL  # noqa: E402

RATE, STEPS, DELTA = 256 / 60_000, 1880, 1e-5
BITS = 24


def float32_tail(threshold: float) -> float:
    """P(z > threshold) for torch's float32 normals."""
    most = math.floor(2**BITS * math.exp(-(threshold**2) / 2))
    radii = np.sqrt(-2 * np.log(np.arange(1, most + 1) / 2**BITS))
    return float(np.sum(np.arccos(np.minimum(1.0, threshold / radii)) / math.pi) / 2**BITS)


def added(probability: float) -> float:
    """1 - (1 - q p)^T."""
    return -math.expm1(STEPS * math.log1p(-RATE * probability))


def main() -> None:
    end = math.sqrt(2 * BITS * math.log(2))
    # The least value of (1 - rand) * Q(TAIL) in float64, whose uniforms have 53 bits.
    own_end = float(norm.isf(2.0**-53 * norm.sf(TAIL)))
    rows = []
    for sigma in (0.5, 1.1):
        before = added(float32_tail(end - 1 / sigma))
        after = added(float(norm.sf(own_end - 1 / sigma)))
        rows.append([f"{sigma:g}", f"{before:.1e}", f"{before / DELTA:.2g}", f"{after:.0e}"])
    head = ["σ", f"δ from the end at {end:.3f}", f"as a multiple of {DELTA:g}", f"with the end at {own_end:.2f}"]
    print(table(head, rows))
    ratio = float32_tail(TAIL) / float(norm.sf(TAIL))
    print(f"\nP(|z| > {TAIL}): {2 * float32_tail(TAIL):.3e} in torch's float32, {ratio:.4f} of a true normal's.")


if __name__ == "__main__":
    main()
