"""Words of messages: counted nouns, and what a misspelt name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def counted(count: int, noun: str) -> str:
    """A number with its noun: "1 run", "3 runs"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def near(word: str, known: Iterable[str]) -> str:
    """What may have been meant: "did you mean 'gain'?", or all that there is."""
    there = list(known)
    found = difflib.get_close_matches(word, there, 3, 0.5)
    if found:
        return f"did you mean {' or '.join(map(repr, found))}?"
    return f"there are: {', '.join(there)}"
