"""What a reviewer asks of a run: its ledger in brief, and whether everything can be recomputed from
it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

from ..errors import LedgerError
from .read import Run
from .words import plain


@dataclass(frozen=True)
class Trust:
    """``verdict`` is passed, failed, not checked, or no ledger; ``facts`` are the ledger in brief."""

    verdict: str
    reasons: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = field(default=())


def examine(run: Run, verify: bool = True) -> Trust:
    """Reads the ledger, and recomputes ε and every C of a finished run if asked to.

    Edge cases: a ledger that can't be read is a failure with its reason. A run that still goes on
    has written no final ledger, so nothing is checked. A run without privacy has none.
    """
    path = run.path / "ledger.jsonl"
    if not path.exists():
        if run.state == "finished" and run.epsilon is not None:
            return Trust("failed", ("an ε is stated, but there is no ledger.jsonl",))
        return Trust(
            "no ledger",
            (
                ("the run is not finished",)
                if run.state != "finished"
                else ("the method is not private",)
            ),
        )
    try:
        facts, warnings = _brief(path)
    except (LedgerError, OSError, ValueError) as error:
        return Trust("failed", (f"the ledger can't be read: {error}",))
    if not verify:
        return Trust("not checked", ("the check was switched off",), facts, warnings)
    if run.state != "finished":
        return Trust("not checked", ("the run is not finished",), facts, warnings)
    try:
        check: Any = importlib.import_module("zetaclip.verify")
    except ModuleNotFoundError:
        return Trust(
            "not checked", ("this installation has no command zetaclip verify",), facts, warnings
        )
    problems = tuple(str(problem) for problem in check.verify(run.path))
    return Trust("failed" if problems else "passed", problems, facts, warnings)


def _brief(path: Any) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    from ..ledger import Ledger

    ledger = Ledger.from_jsonl(path)
    head, events = ledger.header, ledger.events()
    facts = [
        ("method", head.method),
        ("claim", head.claim),
        ("neighbours", head.adjacency),
        ("steps", f"{ledger.steps} steps, {len(ledger)} releases"),
        (
            "records",
            (
                f"N = {head.num_examples} ({head.num_examples_source}), L ="
                f" {plain(head.expected_batch_size)} expected per batch"
            ),
        ),
    ]
    for event in events[:6]:
        rate, noise = plain(event.sample_rate, 6), plain(event.noise_multiplier, 6)
        facts.append(("noise", f"{event.count} × sampling rate {rate}, noise multiplier {noise}"))
    if len(events) > 6:
        facts.append(("noise", f"and {len(events) - 6} more kinds of step"))
    facts += [("note", note) for note in head.notes]
    warnings = (
        ("The noise seed is known: whoever has it can remove the noise.",)
        if head.noise_seed_known
        else ()
    )
    return tuple(facts), warnings
