"""Which records are held out, decided for each record by itself."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable

import numpy as np


def owner_numbers(names: Iterable[object]) -> np.ndarray:
    """A number for each name that depends on this name only, not on the other names.

    Spaces around a name are ignored, as in every column of a table.
    """
    digests = (
        hashlib.blake2b(str(name).strip().encode(), digest_size=8).digest() for name in names
    )
    return np.array([int.from_bytes(digest, "little") >> 1 for digest in digests], dtype=np.int64)


def held_out_owners(owners: np.ndarray, share: float, seed: int, purpose: str) -> np.ndarray:
    """Like ``held_out`` for whole units: all records of a unit are held out, or none.

    Args:
        owners: The number of each record's unit.
        share: Expected share of the units that is held out.
        seed: Public seed.
        purpose: Label that makes splits for different purposes independent.

    Returns:
        True for records that are held out.

    **Guarantee.** Adding or removing one unit moves no record of another.
    """
    key = hashlib.blake2b(f"{purpose} of units {seed}".encode(), digest_size=32).digest()
    units, place = np.unique(owners, return_inverse=True)
    draws = [hashlib.blake2b(unit.tobytes(), digest_size=8, key=key).digest() for unit in units]
    chosen = np.array([int.from_bytes(draw, "little") < share * 2.0**64 for draw in draws], bool)
    return chosen[place]


def held_out(x: np.ndarray, y: np.ndarray, share: float, seed: int, purpose: str) -> np.ndarray:
    """Chooses records by a public function of their content, ``seed`` and ``purpose``.

    Args:
        x: Features, one row per record.
        y: Targets.
        share: Expected share of the records that is held out; it is met only on average.
        seed: Public seed.
        purpose: Label that makes splits for different purposes independent.

    Returns:
        True for records that are held out.

    **Guarantee.** Adding or removing one record changes one of the two parts, by that record only.
    A permutation of all rows would move many other records as well, and an ε for one record would
    not hold.

    **Edge cases.** Equal records are numbered, so that a table of few distinct rows is split too.
    As they are equal, it does not matter which of them has which number.
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
