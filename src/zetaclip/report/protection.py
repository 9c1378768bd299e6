"""The part of a report for people outside the field: who is protected, how much, and what not."""

from __future__ import annotations

import json
import math
from html import escape
from itertools import pairwise
from typing import Any

from .figure import Axis, Chart, Series
from .format import epsilon_text, plain
from .lines import number
from .page import Section
from .read import Run
from .table import Cell, table
from .trust import Trust

# What an attacker believes before, in per cent.
_BEFORE = (1, 10, 50, 90)

_RELEASED = (
    "Everything in the run's folder but <code>private/</code> may be published: the weights, the"
    " ledger, the curves on this page."
)
_RELEASED_WITH_SEED = (
    "The weights, by people who will never see the seed. It stands in <code>config.json</code>,"
    " <code>result.json</code> and on this page: don't publish these."
)
_SEED = (
    "<p class=note><b>Nobody is protected from people who have the seed of the noise.</b> It was"
    " set for this run. What follows holds against everybody else. To protect people, train without"
    " <code>--seed</code>.</p>"
)
_SECRET = (
    "The training data, <code>private/</code> while it is there, and a seed if one was set: who has"
    " one of these can remove the noise."
)


def protection(run: Run, trust: Trust) -> Section | None:
    """Who is protected and how much, in words; None for a run that claims no ε.

    Args:
        run: The run.
        trust: What a check of its ledger found.
    """
    epsilon, delta = run.epsilon, number(run.get("delta"))
    if epsilon is None or delta is None or not math.isfinite(epsilon):
        return None
    unit = str(run.get("unit") or "one record")
    seeded = bool(run.get("noise_seed_known"))
    parts = [
        *([_SEED] if seeded else []),
        f"<p><b>Who is protected:</b> {escape(unit)}. Whether it was in the training data changes"
        " what was released only a little.</p>",
        f"<p><b>How much:</b> ε = {epsilon_text(epsilon)}, δ = {plain(delta)}. Suppose an attacker"
        " knows all other data and sees everything that was released. However sure they were before"
        f" that {escape(unit)} was used, afterwards they are at most this sure:</p>",
        _odds(epsilon),
        f"<p>This bound may fail with a probability of about 1 in {1 / delta:,.0f} (δ). It limits"
        " what can be learned about who was in the data. It does not limit what can be learned"
        " about everybody, from a model that is good.</p>",
        f"<p><b>What may be seen:</b> {_RELEASED_WITH_SEED if seeded else _RELEASED}</p>",
        f"<p><b>What must stay secret:</b> {_SECRET}</p>",
        f"<p><b>What was checked:</b> {_checked(trust)} {_audited(_audit(run))}</p>",
        f"<p><b>What is not covered:</b> {_uncovered(run)}</p>",
    ]
    chart = _scores(_audit(run))
    charts = () if chart is None else (chart,)
    text = f"<div class=plainly>{''.join(parts)}</div>"
    return Section("protection", "Who is protected, and how much", text, charts)


def _odds(epsilon: float) -> str:
    """A small table: sure before, and at most after. Odds grow by the factor e^ε at most."""
    rows = []
    for before in _BEFORE:
        odds = math.exp(min(epsilon, 700.0)) * before / (100 - before)
        after = 100 * odds / (1 + odds)
        # Rounded up, like ε.
        shown = f"{math.ceil(10 * after) / 10:g} %" if after < 99.9 else "nearly 100 %"
        rows.append([Cell(f"{before} %"), Cell(shown)])
    return table(["sure before", "afterwards, at most"], rows, "How sure an attacker can become")


def _checked(trust: Trust) -> str:
    if trust.verdict == "passed":
        return "ε and every clipping norm were recomputed from the ledger, and agree."
    if trust.verdict == "failed":
        return "<b>The ledger does not agree with the stated ε</b>; see below."
    return f"The ledger was not checked: {escape('; '.join(trust.reasons))}."


def _audit(run: Run) -> dict[str, Any] | None:
    """What ``zetaclip audit --run`` left in the folder; None if there is nothing readable."""
    try:
        found = json.loads((run.path / "audit.json").read_text())
    except (OSError, ValueError):
        return None
    keys = ("epsilon_claimed", "epsilon_found", "confidence")
    known = isinstance(found, dict) and all(number(found.get(key)) is not None for key in keys)
    return found if known else None


def _audited(found: dict[str, Any] | None) -> str:
    if found is None:
        return "It was not audited by an attack (<code>zetaclip audit --run</code>)."
    said = (
        f"An attack on these settings showed ε of at least {found['epsilon_found']:.2f}, at"
        f" {100 * found['confidence']:g} % confidence, where {found['epsilon_claimed']:.2f} is"
        " claimed"
    )
    if found.get("excess"):
        return f"<b>{said}: the claim is wrong.</b>"
    return f"{said}: nothing contradicts the claim."


def _uncovered(run: Run) -> str:
    notes = run.get("notes")
    said = [str(note) for note in notes if "not cover" in str(note)] if notes else []
    return escape("; ".join(["figures measured on held-out records", *said])) + (
        ". Other runs on the same data add to this ε."
    )


def _scores(found: dict[str, Any] | None) -> Chart | None:
    scores = (found or {}).get("scores")
    if not isinstance(scores, dict):
        return None
    edges = [number(value) for value in scores.get("edges", [])]
    if len(edges) < 2 or any(edge is None for edge in edges):
        return None
    middle = tuple((a + b) / 2 for a, b in pairwise(edges))  # type: ignore[operator]
    names = (("included", "in the data"), ("excluded", "not in the data"))
    series = tuple(
        Series(name, middle, tuple(number(count) for count in scores.get(key, [])), slot, "steps")
        for slot, (key, name) in enumerate(names)
    )
    return Chart(
        "audit",
        "What the attacker saw",
        Axis("score of a canary"),
        Axis("canaries", from_zero=True),
        series,
        summary="The more the two curves differ, the more an attacker can tell.",
    )
