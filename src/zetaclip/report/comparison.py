"""Tables that compare runs: their results, and the settings in which they differ."""

from __future__ import annotations

from collections.abc import Sequence

from .format import (
    NAMES,
    cell,
    duration,
    epsilon_text,
    final_clip,
    metric_cell,
    plain,
    state_mark,
    zone_share,
)
from .lines import last, number
from .read import Run
from .table import Cell, table
from .trust import Trust

# Columns that are left out if all rows have the same value.
_SHARED = ("data", "method", "model", "metric", "δ", "seed")


def comparison(runs: Sequence[Run], trusts: dict[str, Trust]) -> str:
    """The results of the runs, with a row per run."""
    head = [
        "run",
        "state",
        "data",
        "method",
        "model",
        "metric",
        "value",
        "ECE",
        "ε",
        "δ",
        "σ",
        "last C",
        "last ζ̂",
        "in zone",
        "steps",
        "time",
        "seed",
        "check",
    ]
    rows = []
    for run in runs:
        measured = (run.result or {}).get("metrics")
        ece = number(measured.get("ece")) if isinstance(measured, dict) else None
        zeta = last(number(probe.get("smoothed")) for probe in run.probes)
        share, sigma, delta = zone_share(run), number(run.get("sigma")), number(run.get("delta"))
        total = run.seconds.get("total", sum(run.seconds.values()) or None)
        steps = number(run.get("steps")) if run.result else number(run.status.get("step"))
        seed = run.get("seed")
        rows.append(
            [
                Cell(run.name),
                Cell("", html=state_mark(run)),
                Cell(str(run.get("data", "–"))),
                Cell(str(run.get("method", "–"))),
                Cell(str(run.get("model", "–"))),
                Cell(NAMES.get(run.metric_name, run.metric_name) or "–"),
                Cell(metric_cell(run.metric_name, run.metric), run.metric),
                Cell("–" if ece is None else f"{100 * ece:.1f} %", ece),
                Cell(epsilon_text(run.epsilon) if run.epsilon is not None else "–", run.epsilon),
                Cell(plain(delta), delta),
                Cell(plain(sigma), sigma),
                Cell(plain(final_clip(run), 3), final_clip(run)),
                Cell(plain(zeta, 3), zeta),
                Cell("–" if share is None else f"{100 * share:.0f} %", share),
                Cell("–" if steps is None else f"{steps:.0f}", steps),
                Cell(duration(total), total),
                Cell(cell(seed), number(seed)),
                Cell(trusts[run.name].verdict),
            ]
        )
    # Drops columns that no run has, and those whose value is the same in every row.
    kept = [
        column
        for column, name in enumerate(head)
        if column < 2
        or (
            any(row[column].text != "–" for row in rows)
            and (name not in _SHARED or len({row[column].text for row in rows}) > 1)
        )
    ]
    if "metric" not in [head[column] for column in kept]:
        head[head.index("value")] = rows[0][head.index("metric")].text
    return table(
        [head[column] for column in kept],
        [[row[column] for column in kept] for row in rows],
        "The runs. Click a heading to sort.",
        sortable=True,
    )


def differences(runs: Sequence[Run]) -> str:
    """The settings that differ between the runs, with a row per run."""
    keys = list(dict.fromkeys(key for run in runs for key in run.config if key != "zetaclip_run"))
    values = {key: [cell(run.config.get(key)) for run in runs] for key in keys}
    differing = [key for key in keys if len(set(values[key])) > 1]
    if not differing:
        return "<p>Nothing: all runs have the same configuration.</p>"
    rows = [
        [
            Cell(run.name),
            *(Cell(values[key][place], number(run.config.get(key))) for key in differing),
        ]
        for place, run in enumerate(runs)
    ]
    return table(
        ["run", *differing], rows, "Settings that are not the same in all runs.", sortable=True
    )
