"""Words of messages: counted nouns, and what a misspelt name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def counted(count: int, noun: str) -> str:
    """A number with its noun: "1 run", "3 runs"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def grouped(phrases: Iterable[str]) -> str:
    """Phrases in one line: "type of a", "type of b" and "task" are "type of a, b; task"."""
    groups: dict[str, list[str]] = {}
    for phrase in phrases:
        head, of, name = phrase.partition(" of ")
        groups.setdefault(head + of, []).append(name)
    return "; ".join(head + ", ".join(names) for head, names in groups.items())


def near(word: str, known: Iterable[str]) -> str:
    """What may have been meant: "did you mean 'gain'?", or all that there is."""
    there = list(known)
    found = difflib.get_close_matches(word, there, 3, 0.5)
    if found:
        return f"did you mean {' or '.join(map(repr, found))}?"
    return f"there are: {', '.join(there)}"
