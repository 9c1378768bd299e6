"""Words of messages and pages: counted nouns, what a misspelt name may have meant, wide lines."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# A word, with the code in it, and with marks of lists and headings that follow it.
_UNBROKEN = re.compile(r"(?:`[^`]*`|[^\s`]|`| (?=(?:[-+*#>|]|\d+[.)])(?: |$)))+")


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


def wrapped(page: str, width: int = 100) -> str:
    """A page of Markdown whose prose is broken into lines of at most so many characters.

    Args:
        page: Tables, headings, pictures and code in it stay as they are.
        width: The most characters of a line. A longer word has a line of its own.
    """
    lines: list[str] = []
    code = False
    for line in page.split("\n"):
        code ^= line.lstrip().startswith("```")
        if code or len(line) <= width or line.lstrip().startswith(("|", "#", "![", "<", "```")):
            lines.append(line)
            continue
        found = re.match(r"\s*(?:[-*+] |\d+\. )?", line)
        start = current = found.group() if found else ""
        # Code is not broken, and a word that would begin a list or a heading begins no line.
        for word in _UNBROKEN.findall(line[len(start) :]):
            if current != start and len(current) + 1 + len(word) > width:
                lines.append(current)
                current = " " * len(start) + word
            else:
                current += word if current == start else f" {word}"
        lines.append(current)
    return "\n".join(lines)
