"""What a reviewer needs of a run: its ledger in brief, and whether it can be recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import LedgerError
from ..words import counted
from .format import plain
from .read import Run


@dataclass(frozen=True)
class Trust:
    """The outcome of a check.

    Args:
        verdict: passed, failed, not checked, or no ledger.
        reasons: Why.
        facts: The ledger in brief, as (name, value).
        warnings: What a reader must know besides.
    """

    verdict: str
    reasons: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()


def examine(run: Run, verify: bool = True) -> Trust:
    """Reads the ledger; for a finished run it also recomputes ε and every C.

    Args:
        run: The run.
        verify: Whether to recompute.

    **Edge cases.** A ledger that can't be read is a failure with its reason. A run in progress has
    no final ledger yet, so nothing is checked. A run without privacy has no ledger.
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
    from ..training.verify import verify as recompute  # imports torch

    problems = tuple(recompute(run.path))
    return Trust("failed" if problems else "passed", problems, facts, warnings)


def _brief(path: Any) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    from ..ledger import Ledger

    ledger = Ledger.from_jsonl(path)
    head, events = ledger.header, ledger.events()
    facts = [
        ("method", head.method),
        ("claim", head.claim),
        ("neighbours", head.adjacency),
        ("steps", f"{counted(ledger.steps, 'step')}, {counted(len(ledger), 'release')}"),
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
        more = len(events) - 6
        facts.append(("noise", f"and {more} more kind{'s' * (more > 1)} of step"))
    facts += [("note", note) for note in head.notes]
    warnings = (
        (
            "The noise seed is known: it stands in config.json. Anyone who has it can remove the"
            " noise, so don't rely on ε.",
        )
        if head.noise_seed_known
        else ()
    )
    return tuple(facts), warnings
