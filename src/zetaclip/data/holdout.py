"""Which records are held out, decided for each one by itself."""

from __future__ import annotations

import hashlib
from collections import defaultdict

import numpy as np


def held_out(x: np.ndarray, y: np.ndarray, share: float, seed: int, purpose: str) -> np.ndarray:
    """True for about a ``share`` of the records, by a public function of a record's content, ``seed`` and ``purpose``.

    Guarantee: one record more or less changes one of the two parts, by that record. A permutation of all the rows would
    move many others to the other side as well, and an ε for one record would not hold.
    Edge cases: equal records are told apart by their number, so that a table of few distinct rows is split too; as
    they are equal, it does not matter which of them is which. The share is met only on average.
    """
    if not share:
        return np.zeros(len(y), bool)
    key = hashlib.blake2b(f"{purpose} {seed}".encode(), digest_size=32).digest()
    earlier: defaultdict[bytes, int] = defaultdict(int)
    chosen = np.empty(len(y), bool)
    for row in range(len(y)):
        content = hashlib.blake2b(
            x[row].tobytes() + y[row].tobytes(), digest_size=16, key=key
        ).digest()
        number = earlier[content].to_bytes(8, "little")
        earlier[content] += 1
        draw = hashlib.blake2b(content + number, digest_size=8, key=key).digest()
        chosen[row] = int.from_bytes(draw, "little") < share * 2.0**64
    return chosen
