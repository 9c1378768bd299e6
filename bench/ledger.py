"""A million steps in the ledger: how long they take to write, to add up, and to turn into ε.

    python bench/ledger.py                    # 10^6 rows, then ε by PLD
    python bench/ledger.py --rows 100000 --accountants rdp pld
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

from common import one_thread, table, write_json

one_thread()

from zetaclip.accounting import ACCOUNTANTS, epsilon  # noqa: E402
from zetaclip.ledger import Header, Ledger, Row  # noqa: E402

RATE, SIGMA, DELTA = 256 / 60_000, 1.1, 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--accountants", nargs="*", choices=ACCOUNTANTS, default=["rdp", "pld"])
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    ledger = Ledger(Header(60_000, "declared", 256.0, "pld", "dp-sgd"))
    figures: dict[str, Any] = {}
    rows = []

    start = time.perf_counter()
    for step in range(options.rows):
        clip = 1.0 + (step % 7) / 7  # a moving C: the rows differ, the multiplier does not
        ledger.append(Row(step, step, "sum", clip, SIGMA, SIGMA * clip, RATE, "bench"))
    figures["append_s"] = time.perf_counter() - start
    rows.append([f"append {options.rows} rows", f"{figures['append_s']:.2f} s", ""])

    start = time.perf_counter()
    events = ledger.events()
    figures["add_up_s"] = time.perf_counter() - start
    rows.append(["add them up", f"{figures['add_up_s']:.2f} s", f"{len(events)} kind(s) of step"])

    for accountant in options.accountants:
        epsilon(events[:1], DELTA, accountant)  # imports the library
        start = time.perf_counter()
        found = epsilon(events, DELTA, accountant)
        figures[accountant] = {"seconds": time.perf_counter() - start, "epsilon": found}
        rows.append([f"ε by {accountant}", f"{figures[accountant]['seconds']:.2f} s", f"ε = {found:.3f} at δ = {DELTA:g}"])
    print(table(["what", "time", "result"], rows))
    write_json(options.json, {"rows": options.rows, "ledger": figures})


if __name__ == "__main__":
    main()
