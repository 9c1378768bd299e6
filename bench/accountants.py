"""σ for a target ε by PRV and by PLD, and how long each takes.

    OMP_NUM_THREADS=1 python bench/accountants.py

A smaller σ at the same ε is a tighter bound. Imports of the libraries are not timed.
"""

from __future__ import annotations

import time
import warnings

from zetaclip.accounting import noise_multiplier_for

# (sampling rate, steps, δ, target ε)
SETTINGS = [
    (0.004, 2000, 1e-5, 3.0),
    (0.00427, 1880, 1e-5, 1.0),
    (0.08, 366, 1e-5, 3.0),
    (0.08, 366, 1e-5, 1.0),
    (0.08, 366, 1e-5, 8.0),
    (0.2, 150, 1e-5, 3.0),
    (0.001, 20_000, 1e-6, 3.0),
    (0.001, 20_000, 1e-6, 0.5),
    (0.5, 100, 1e-5, 3.0),
    (0.01, 100_000, 1e-5, 3.0),
    (0.14, 210, 1e-5, 3.0),
    (0.01, 50, 1e-5, 0.1),
    (1e-4, 50_000, 1e-7, 1.0),
    (0.3, 2000, 1e-5, 10.0),
    (0.16, 2000, 1e-6, 50.0),
]


def main() -> None:
    """Prints a line per setting."""
    warnings.simplefilter("ignore")  # PRV says that it will take long
    for name in ("prv", "pld"):
        noise_multiplier_for(1.0, 1e-5, 0.1, 10, name)
    print(
        f"{'q':>8} {'steps':>7} {'δ':>6} {'ε':>5} {'σ PRV':>9} {'σ PLD':>9} {'ratio':>7}  seconds"
    )
    for rate, steps, delta, target in SETTINGS:
        found, seconds = [], []
        for name in ("prv", "pld"):
            begun = time.perf_counter()
            found.append(noise_multiplier_for(target, delta, rate, steps, name))
            seconds.append(time.perf_counter() - begun)
        print(
            f"{rate:8g} {steps:7d} {delta:6g} {target:5g} {found[0]:9.4f} {found[1]:9.4f}"
            f" {found[1] / found[0]:7.4f}  {seconds[0]:.2f} {seconds[1]:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
