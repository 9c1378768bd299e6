"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """How a run ended: "reused", "done", "failed" or "blocked" (by another's failure)."""

    state: str
    message: str = ""
