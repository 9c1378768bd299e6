"""How long the ledger and its accountants take for long runs.

    OMP_NUM_THREADS=1 python bench/ledger.py

Every figure is one run in this process. Imports of the accounting libraries are timed separately.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

from zetaclip.accounting import epsilon, noise_multiplier_for
from zetaclip.ledger import Event, Header, Ledger, Row

T = TypeVar("T")
MILLION = 10**6


def timed(what: str, work: Callable[[], T]) -> T:
    """Runs the work, prints its time, and returns its result."""
    start = time.perf_counter()
    result = work()
    shown = f"  -> {result:.4f}" if isinstance(result, float) else ""
    print(f"{what:<66} {time.perf_counter() - start:8.2f} s{shown}", flush=True)
    return result


def rows(count: int) -> Iterator[Row]:
    """Ledger rows of a long run."""
    return (Row(batch, batch, "gradient", 1.0, 1.1, 1.1, 0.001, "a") for batch in range(count))


def append_all(made: list[Row]) -> Ledger:
    """A ledger with these rows."""
    ledger = Ledger(Header(1_000_000, "declared", 1000.0, "pld", "DP-SGD"))
    for row in made:
        ledger.append(row)
    return ledger


def main() -> None:
    """Prints the times."""
    made = timed("make 10^6 rows", lambda: list(rows(MILLION)))
    ledger = timed("append them", lambda: append_all(made))
    events = timed("events() over them", ledger.events)
    timed("state_dict()", ledger.state_dict)
    # The first ε by each library includes its import.
    timed(
        "import scipy, and a small ε by RDP", lambda: epsilon([Event(0.01, 1.1, 10)], 1e-5, "rdp")
    )
    timed(
        "a small ε by PLD",
        lambda: epsilon([Event(0.01, 1.1, 10)], 1e-5, "pld"),
    )
    for q in (0.01, 0.001, 0.0001, 0.00001):
        timed(
            f"ε by PLD, 10^6 steps, q = {q}",
            lambda q=q: epsilon([Event(q, 1.1, MILLION)], 1e-5, "pld"),
        )
    timed("ε by RDP, 10^6 steps of that ledger", lambda: epsilon(events, 1e-5, "rdp"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for steps in (1880, 10**4, 10**5, MILLION):
            timed(
                f"ε by PRV, {steps} steps, q = 0.001",
                lambda n=steps: epsilon([Event(0.001, 1.1, n)], 1e-5),
            )
    for warning in caught:
        print(f"  warning: {warning.message}")
    for accountant in ("rdp", "prv", "pld"):
        timed(
            f"σ for ε = 3 by {accountant.upper()}, 1880 steps, q = 256/60000",
            lambda name=accountant: noise_multiplier_for(3.0, 1e-5, 256 / 60000, 1880, name),
        )


if __name__ == "__main__":
    main()
