"""Free text as numbers: words and pairs of words, hashed into a fixed number of columns.

No vocabulary is made, so nothing of the texts is needed to read new ones, and none is kept.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..errors import InputError

BUCKETS = 4096
_WORD = re.compile(r"\w\w+")  # as in scikit-learn's HashingVectorizer: at least two letters
_MOST_BYTES = 16 * 2**30
_MIXERS = tuple(np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True)
class Text:
    """Free text: lower-case words and pairs of neighbouring words, hashed, as a row of length 1.

    Each word or pair adds +1 or -1 to one of the columns; both are a fixed function of its letters
    (CRC-32 and the mixing steps of SplitMix64). A column then holds sign · √|sum|, so that a word
    that is repeated often does not outweigh the others, and the row is scaled to length 1.

    Attributes:
        name: The column.
        buckets: The number of columns. Words share a column by chance: with few columns, often.
        pairs: Whether pairs of neighbouring words count as well.

    Raises:
        InputError: ``buckets`` is not a number from 16 to 2^20.

    **Edge cases.** An empty text, or one without words, is a row of zeros.
    """

    kind: ClassVar[str] = "text"
    keys: ClassVar[tuple[str, ...]] = ("buckets", "pairs")
    needs: ClassVar[tuple[str, ...]] = ()
    name: str
    buckets: int = BUCKETS
    pairs: bool = True

    def __post_init__(self) -> None:
        whole = isinstance(self.buckets, int) and not isinstance(self.buckets, bool)
        if not whole or not 16 <= self.buckets <= 2**20:
            raise InputError(
                f"buckets of {self.name!r} must be a whole number from 16 to 2^20, not"
                f" {self.buckets!r}"
            )
        if not isinstance(self.pairs, bool):
            raise InputError(f"pairs of {self.name!r} must be true or false")

    def names(self) -> tuple[str, ...]:
        """See ``columns.Column``."""
        return tuple(f"{self.name}#{i}" for i in range(self.buckets))

    def encode(self, fields: Sequence[str], lines: Sequence[int] | None = None) -> np.ndarray:
        """See ``columns.Column``.

        Raises:
            InputError: The result would need more than 16 GiB.
        """
        size = 4 * len(fields) * self.buckets
        if size > _MOST_BYTES:
            raise InputError(
                f"{len(fields)} texts in {self.buckets} buckets need {size / 2**30:.0f} GiB, more"
                f" than the {_MOST_BYTES // 2**30} that are allowed; declare fewer buckets for"
                f" {self.name!r}"
            )
        known: dict[str, int] = {}
        found = np.zeros((len(fields), self.buckets), np.float32)
        for row, field in enumerate(fields):
            counts = self._counts(field, known)
            length = np.sqrt(np.abs(counts).sum())
            if length:
                found[row] = np.sign(counts) * np.sqrt(np.abs(counts)) / length
        return found

    def _counts(self, text: str, known: dict[str, int]) -> np.ndarray:
        codes = []
        for word in _WORD.findall(text.lower()):
            code = known.get(word)
            if code is None:
                code = known[word] = zlib.crc32(word.encode())
            codes.append(code)
        hashes = _mixed(np.array(codes, np.uint64))
        if self.pairs and len(hashes) > 1:
            with np.errstate(over="ignore"):
                both = _mixed(hashes[:-1] * _MIXERS[1] + hashes[1:])
            hashes = np.concatenate((hashes, both))
        signs = 1.0 - 2.0 * (hashes & np.uint64(1)).astype(np.float64)
        places = ((hashes >> np.uint64(1)) % np.uint64(self.buckets)).astype(np.int64)
        return np.bincount(places, signs, self.buckets)

    def entry(self) -> dict[str, Any]:
        """See ``columns.Column``."""
        more = {} if self.pairs else {"pairs": False}
        return {"type": self.kind, "buckets": self.buckets, **more}

    @classmethod
    def from_entry(cls, name: str, entry: Mapping[str, Any]) -> Text:
        """The column that ``entry`` describes."""
        return cls(name, entry.get("buckets", BUCKETS), entry.get("pairs", True))


def _mixed(state: np.ndarray) -> np.ndarray:
    """SplitMix64: numbers whose bits all depend on all bits of the given ones."""
    with np.errstate(over="ignore"):
        state = state + _MIXERS[0]
        state = (state ^ (state >> np.uint64(30))) * _MIXERS[1]
        state = (state ^ (state >> np.uint64(27))) * _MIXERS[2]
    mixed: np.ndarray = state ^ (state >> np.uint64(31))
    return mixed
