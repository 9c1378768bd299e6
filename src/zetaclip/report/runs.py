"""The page of one run, and of several side by side."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from html import escape
from typing import Any

from ..words import counted
from .charts import charts_for
from .comparison import comparison, differences
from .format import (
    NAMES,
    STATES,
    cell,
    duration,
    epsilon_text,
    final_clip,
    joined,
    metric_cell,
    plain,
    progress,
    state_mark,
    summary,
    zone_share,
)
from .lines import number
from .page import Page, Section
from .protection import protection
from .quality import IDS, NOTE, confusions, quality_charts
from .read import Run
from .table import facts
from .trust import Trust, examine

TRAINING = ("epsilon", "metric-", "clip", "rate", "zeta")


def page_for(runs: Sequence[Run], verify: bool = True, live: bool = False) -> Page:
    """The page of one run, or of several for comparison.

    Args:
        runs: The runs.
        verify: Whether to recompute ε and every C from the ledger of each finished run.
        live: Whether the page is served while the runs go on. It then reads no ledger, because that
            would take time from the training.
    """
    trusts = {
        run.name: Trust("not checked", ("the page is live",)) if live else examine(run, verify)
        for run in runs
    }
    sections = _one(runs[0], trusts[runs[0].name]) if len(runs) == 1 else _several(runs, trusts)
    title = f"{runs[0].name}: zetaclip run" if len(runs) == 1 else f"{len(runs)} zetaclip runs"
    return Page(title, tuple(sections), footer_text())


def footer_text() -> str:
    """The last line of every page."""
    from .. import __version__

    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return (
        f"Made by zetaclip {escape(__version__)}, {made}. ε is rounded up. This page loads nothing"
        " and sends nothing."
    )


def _chart_sections(runs: Sequence[Run]) -> list[Section]:
    charts = [*charts_for(runs), *(c for c in quality_charts(runs) if not c.empty)]
    training = tuple(chart for chart in charts if chart.id.startswith(TRAINING))
    spectra = tuple(chart for chart in charts if chart.id.startswith("spectrum-"))
    quality = tuple(chart for chart in charts if chart.id in (*IDS, "reliability"))
    rest = tuple(chart for chart in charts if chart.id == "time")
    classes = confusions(runs[0]) if len(runs) == 1 else ""
    made = []
    if training:
        made.append(Section("training", "Training", charts=training))
    if spectra:
        text = (
            "<p>Each point is an eigenvalue of the probed matrix; the line is the fitted tail. If"
            " random weights of the same shape have the same exponent, the exponent says little"
            " about what was learned.</p>"
        )
        made.append(Section("spectra", "Spectrum of the probed weights", text, spectra))
    if quality or classes:
        made.append(Section("quality", "On held-out records", NOTE + classes, quality))
    if rest:
        made.append(Section("time", "Time", charts=rest))
    return made


def _one(run: Run, trust: Trust) -> list[Section]:
    head = (
        f"<h1>{escape(run.name)} {state_mark(run)}</h1><p"
        f" class=sentence>{escape(joined(summary(run)))}</p>{_lead(run)}"
        f"{_tiles(run)}{_warnings(run, trust)}"
    )
    plainly, notes = protection(run, trust), _notes(run)
    return [
        Section("summary", html=head),
        *([] if plainly is None else [plainly]),
        *([Section("notes", "Notes", notes)] if notes else []),
        *_chart_sections([run]),
        Section("ledger", "Ledger and check", _ledger(run, trust)),
        Section("config", "Configuration", f"<div class=columns>{facts(_config_rows(run))}</div>"),
        Section("repeat", "How to repeat it", _repeat(run)),
    ]


def _several(runs: Sequence[Run], trusts: dict[str, Trust]) -> list[Section]:
    counts = {state: sum(run.state == state for run in runs) for state in STATES}
    told = ", ".join(f"{count} {STATES[state]}" for state, count in counts.items() if count)
    tasks = list(dict.fromkeys(run.metric_name for run in runs if run.metric_name))
    sentence = f"{counted(len(runs), 'run')}: {told}"
    notes = ""
    if len(tasks) > 1:
        names = ", ".join(NAMES.get(task, task) for task in tasks)
        notes = (
            f"<p class='note plain'>These runs have different metrics ({escape(names)}): compare"
            " only rows with the same metric.</p>"
        )
    head = f"<h1>{escape(_common(runs))}</h1><p class=sentence>{escape(sentence)}</p>{notes}"
    head += "".join(
        _warnings(run, dataclasses.replace(trusts[run.name], warnings=()), named=True)
        for run in runs
    )
    head += _shared_warnings(runs, trusts)
    listed = "".join(
        f"<details><summary>{escape(run.name)}: {escape(summary(run))}</summary>"
        f"{_lead(run)}{_ledger(run, trusts[run.name])}"
        f"<h3>Configuration</h3><div class=columns>{facts(_config_rows(run))}</div>"
        f"<h3>How to repeat it</h3>{_repeat(run, place)}</details>"
        for place, run in enumerate(runs)
    )
    return [
        Section("summary", html=head + comparison(runs, trusts)),
        *_chart_sections(runs),
        Section("differences", "What differs in the configuration", differences(runs)),
        Section("runs", "Every run", f"<div class=runs>{listed}</div>"),
    ]


def _common(runs: Sequence[Run]) -> str:
    said = [
        str(values[0])
        for key in ("data", "model", "method")
        if len(values := list(dict.fromkeys(str(run.get(key, "")) for run in runs))) == 1
        and values[0]
    ]
    return " · ".join(["zetaclip runs", *said])


def _lead(run: Run) -> str:
    said = [
        f"{name} {run.get(key)}"
        for key, name in (("data", "data"), ("model", "model"), ("method", "method"))
        if run.get(key)
    ]
    unit = run.get("unit")
    if unit:
        said.append(f"one record is {unit}")
    finished = run.get("finished")
    if finished:
        said.append(f"finished {str(finished)[:16].replace('T', ' ')}")
    return f"<p class=muted>{escape(' · '.join(said))}</p>" if said else ""


def _tiles(run: Run) -> str:
    seconds = run.seconds
    total = seconds.get("total", sum(seconds.values()) or None)
    clip: Any = (run.result or {}).get("clip")
    clip = clip if isinstance(clip, dict) else {}
    measured = (run.result or {}).get("metrics")
    ece = number(measured.get("ece")) if isinstance(measured, dict) else None
    share = zone_share(run)
    tiles = []
    if run.metric is not None:
        tiles.append(
            (
                metric_cell(run.metric_name, run.metric),
                f"{NAMES.get(run.metric_name, 'metric')} on held-out data",
            )
        )
    if run.epsilon is not None:
        by = run.get("accountant")
        tiles.append(
            (
                f"ε = {epsilon_text(run.epsilon)}",
                f"at δ = {plain(number(run.get('delta')))}" + (f", by {by}" if by else ""),
            )
        )
    sigma = number(run.get("sigma"))
    if sigma is not None:
        tiles.append((f"σ = {plain(sigma)}", "noise multiplier"))
    if final_clip(run) is not None:
        start = number(clip.get("initial"))
        moved = start is not None and start != final_clip(run)
        tiles.append(
            (
                (
                    f"{plain(start, 3)} → {plain(final_clip(run), 3)}"
                    if moved
                    else f"C = {plain(final_clip(run), 3)}"
                ),
                "clipping norm",
            )
        )
    if share is not None:
        tiles.append((f"{100 * share:.0f} %", "of the probes inside the zone"))
    if ece is not None:
        tiles.append((f"{100 * ece:.1f} %", "expected calibration error"))
    if total:
        tiles.append((duration(total), _steps(run) + _probing(run, total)))
    items = "".join(
        f"<li><b>{escape(big)}</b><span>{escape(small)}</span></li>" for big, small in tiles
    )
    return f"<ul class=tiles>{items}</ul>" if tiles else ""


def _steps(run: Run) -> str:
    steps = number(run.get("steps")) if run.result else number(run.status.get("step"))
    return f"for {counted(round(steps), 'step')}" if steps else "so far"


def _probing(run: Run, total: float) -> str:
    spent = run.seconds.get("probe")
    return f", {100 * spent / total:.1f} % of it probing" if spent and total else ""


def _warnings(run: Run, trust: Trust, named: bool = False) -> str:
    """What a reader must not miss, at the top of the page."""
    said = []
    if run.state in ("stopped", "failed"):
        message, resume = run.status.get("message"), run.status.get("resume")
        text = f"The run {'failed' if run.state == 'failed' else 'stopped'} {progress(run)}."
        text += f" {message.rstrip('.')}." if isinstance(message, str) and message else ""
        line = f"<p class=note>{_who(run, named)}{escape(text)}"
        said.append(
            line
            + (f" Resume it with <code>{escape(str(resume))}</code>" if resume else "")
            + "</p>"
        )
    for problem in run.problems:
        said.append(f"<p class=note>{_who(run, named)}{escape(problem)}.</p>")
    if trust.verdict == "failed":
        said.append(
            f"<p class=note>{_who(run, named)}The check of the ledger failed:"
            f" {escape('; '.join(trust.reasons))}.</p>"
        )
    said += [f"<p class=note>{_who(run, named)}{escape(warning)}</p>" for warning in trust.warnings]
    return "".join(said)


def _shared_warnings(runs: Sequence[Run], trusts: dict[str, Trust]) -> str:
    """What a reader must know of several runs, each sentence once."""
    said: dict[str, list[str]] = {}
    for run in runs:
        for warning in trusts[run.name].warnings:
            said.setdefault(warning, []).append(run.name)
    return "".join(
        f"<p class=note><b>{escape(_names(names, len(runs)))}</b>: {escape(warning)}</p>"
        for warning, names in said.items()
    )


def _names(names: Sequence[str], total: int) -> str:
    if len(names) == total:
        return "All runs"
    return ", ".join(names) if len(names) <= 4 else f"{len(names)} of {total} runs"


def _notes(run: Run) -> str:
    """What the run says about itself: below the part that must fit on one screen."""
    notes = run.get("notes")
    return "".join(
        f"<p class='note plain'>{escape(str(note))}</p>"
        for note in (notes if isinstance(notes, list) else [])
        if note
    )


def _who(run: Run, named: bool) -> str:
    return f"<b>{escape(run.name)}</b>: " if named else ""


def _ledger(run: Run, trust: Trust) -> str:
    verdicts = {
        "passed": (
            "<p><span class=good>Verified.</span> ε and every clipping norm were recomputed from"
            " the ledger and agree.</p>"
        ),
        "failed": "<p><span class=bad>Not verified.</span></p>",
        "not checked": "<p>Not checked: {}.</p>",
        "no ledger": "<p>No ledger: {}.</p>",
    }
    text = verdicts[trust.verdict].format(escape("; ".join(trust.reasons)))
    if trust.verdict == "failed":
        text += "<ul>" + "".join(f"<li>{escape(reason)}</li>" for reason in trust.reasons) + "</ul>"
    rows = list(trust.facts)
    by = (run.result or {}).get("epsilon_by")
    if isinstance(by, dict) and by:
        rows.append(
            (
                "ε by accountant",
                ", ".join(f"{name} {epsilon_text(number(value))}" for name, value in by.items()),
            )
        )
    if trust.facts:
        text += f"<p>To check it again: <code>zetaclip verify {escape(run.name)}</code></p>"
    return text + (facts(rows) if rows else "")


def _config_rows(run: Run) -> list[tuple[str, str]]:
    return [
        (str(key), cell(value))
        for key, value in run.config.items()
        if key != "zetaclip_run" and value not in (None, {}, [], "")
    ]


def _repeat(run: Run, place: int = 0) -> str:
    versions = (run.result or {}).get("versions")
    told = (
        [f"{name} {version}" for name, version in versions.items()]
        if isinstance(versions, dict)
        else []
    )
    commit = (run.result or {}).get("commit")
    made = (
        "<p class=muted>Made with"
        f" {escape(', '.join(told))}{escape(f', commit {commit}') if commit else ''}.</p>"
        if told or commit
        else ""
    )
    config = json.dumps(run.config, indent=1, ensure_ascii=False)
    return (
        "<p>Save the configuration below as <code>config.json</code>, then:</p>"
        "<pre>zetaclip train --config config.json --out again\n"
        f"zetaclip verify again\nzetaclip report again</pre>{made}"
        "<p class=muted>Sampling and noise are drawn again, so the numbers will be close but not"
        " equal (unless a seed was given).</p>"
        "<details><summary>config.json</summary>"
        f"<button type=button class=copy data-copy=config-{place}>Copy</button>"
        f"<pre id=config-{place}>{escape(config)}</pre></details>"
    )
