"""Checks a run folder against itself: ε from its ledger, every C from its probes, file digests.

It finds what was changed by hand and what is inconsistent. It can't detect a run that was made up
as a whole.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AccountingError, LedgerError
from ..grid import spacing
from .config import Config, ConfigError
from .folder import RunFolder
from .result import (
    METRICS,
    SEALED,
    clip_figures,
    clip_lines_every,
    clip_path,
    digest,
    probe_summary,
    seal,
)

if TYPE_CHECKING:
    from ..ledger import Event, Ledger

# Accountants are deterministic, but the last digits may differ between versions of libraries.
_SLACK = 1e-6
# The most columns that a clip rule releases beside a sum.
_BESIDE = 1000


def verify(path: str | Path) -> list[str]:
    """What is wrong with a finished run.

    Args:
        path: The run folder.

    Returns:
        A sentence per problem; an empty list if everything agrees.

    **Guarantee.** If the list is empty, the ε in ``result.json`` is what the run's accountant gives
    for the rows of ``ledger.jsonl``. The same holds for the ε of the other accountants and of a
    group. Every step has its row, and each C that the spectral controller set follows from the
    eigenvalues in ``probes.jsonl``.

    **Edge cases.** A folder that is no finished run is reported as a problem, not raised.
    """
    folder = RunFolder(path)
    if not folder.path.is_dir():
        return [f"{path} is not a folder"]
    try:
        result = json.loads((folder / "result.json").read_text())
        config = Config.from_mapping(
            json.loads((folder / "config.json").read_text()), "config.json"
        )
    except FileNotFoundError as error:
        name = Path(error.filename).name
        return [
            f"{name} is missing:"
            f" {'the run is not finished' if name == 'result.json' else 'not a run folder'}"
        ]
    except (ValueError, ConfigError, AttributeError) as error:
        return [f"result.json or config.json can't be read: {error}"]
    if not isinstance(result, dict) or result.get("zetaclip_result") != 1:
        return ["result.json is not the result of this version of zetaclip"]
    problems = _digests(folder, result)
    if "seal" in result and result["seal"] != seal(result):  # older results have none
        problems.append("result.json is not what the run wrote: its seal differs")
    problems += _metric(folder, result)
    if (folder / "ledger.jsonl").exists() or result.get("epsilon") is not None:
        problems += _ledger(folder, result, config)
    if (folder / "probes.jsonl").exists():
        problems += _probes(folder, result, config)
    return problems + _clip(folder, result)


def _digests(folder: RunFolder, result: dict[str, Any]) -> list[str]:
    sealed = result.get("files", {})
    problems = []
    for name in SEALED:
        path = folder / name
        if name in sealed and not path.exists():
            problems.append(f"{name} is missing")
        elif name in sealed and digest(path) != sealed[name]:
            problems.append(f"{name} is not the file that the run wrote: its digest differs")
        elif name not in sealed and path.exists():
            problems.append(f"{name} was not written by the run")
    return problems


def _metric(folder: RunFolder, result: dict[str, Any]) -> list[str]:
    lines = folder.read_lines("metrics.jsonl")
    last = lines[-1] if lines else {}
    said, found = result.get("metric", {}).get("value"), last.get("metric")
    problems = (
        []
        if said == found
        else [f"result.json says {said} for the metric, metrics.jsonl says {found}"]
    )
    wanted = {name: last[name] for name in METRICS if name in last}
    # As text, because NaN does not equal NaN.
    if json.dumps(result.get("metrics"), sort_keys=True) != json.dumps(wanted, sort_keys=True):
        problems.append(
            f"result.json says {result.get('metrics')} for the metrics, metrics.jsonl says {wanted}"
        )
    if last.get("step") != result.get("steps"):
        problems.append(
            f"the last metrics are those of step {last.get('step')}, and the run ended at step"
            f" {result.get('steps')}"
        )
    return problems


def _close(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=_SLACK, abs_tol=1e-12)


def _ledger(folder: RunFolder, result: dict[str, Any], config: Config) -> list[str]:
    from ..ledger import Ledger

    try:
        ledger = Ledger.from_jsonl(folder / "ledger.jsonl")
    except FileNotFoundError:
        return ["ledger.jsonl is missing, so no ε can be recomputed"]
    except LedgerError as error:
        return [str(error)]
    problems = []
    head = ledger.header
    for name, here in (
        ("claim", head.claim),
        ("adjacency", head.adjacency),
        ("num_examples", head.num_examples),
    ):
        if result.get(name) != here:
            problems.append(f"{name}: result.json says {result.get(name)!r}, the ledger {here!r}")
    if bool(result.get("noise_seed_known")) != head.noise_seed_known:
        problems.append("result.json and the ledger disagree on whether the noise seed is known")
    found: float | None = None
    if head.claims_privacy:
        assert config.delta is not None
        try:
            found = _epsilon(tuple(ledger.events()), config.delta, config.accountant)
        except (AccountingError, LedgerError) as error:
            return [*problems, f"ε can't be recomputed: {error}"]
    said = result.get("epsilon")
    if not _close(said, found):
        problems.append(
            f"ε: result.json says {said}, the ledger gives {found} ({config.accountant}, δ ="
            f" {config.delta:g})"
        )
    if result.get("delta") != config.delta:
        problems.append(f"δ: result.json says {result.get('delta')}, config.json {config.delta}")
    summed = {row.step for row in ledger.rows() if "sum" in row.query}
    # With the paper's own form, an empty batch has a number but no row.
    skips = config.empty == "skip"
    last = len(summed) if skips else max((row.step for row in ledger.rows()), default=-1) + 1
    if result.get("steps") != last:
        problems.append(
            f"steps: result.json says {result.get('steps')}, the ledger ends with {last}"
        )
    if not skips and (missing := sorted(set(range(last)) - summed)):
        problems.append(
            f"the ledger has no sum for {len(missing)} of {last} steps; the first missing step is"
            f" {missing[0]}"
        )
    return problems + _exactness(result, ledger) + _stated(result, config, ledger)


def _exactness(result: dict[str, Any], ledger: Ledger) -> list[str]:
    """Checks that every noisy release is on a grid that is fine enough for the trained network."""
    noisy = [row for row in ledger.rows() if row.noise_multiplier > 0]
    without = sum(not row.exact for row in noisy)
    if without:
        return [
            f"{without} of {len(noisy)} releases are not on a grid: they were made by a version"
            " whose noise could be attacked through its last digits. Train again"
        ]
    size = result.get("parameters")
    if not isinstance(size, int):
        return [
            "result.json does not say how many parameters were trained, so the grid can't be"
            " checked"
        ]
    declared = _declared(str(result.get("method")))
    for row in noisy:
        own = row.query.partition(": ")[2]
        if own in declared and not _close(row.clip, declared[own]):
            return [
                f"step {row.step}: the query {own!r} is bounded by {declared[own]:g}, not by"
                f" {row.clip:g}"
            ]
        # A rule's own query ("sum: count") is a few numbers, not the network. Columns beside a sum
        # may share its grid.
        least = 1 if own else size
        coarsest = spacing(row.clip, row.noise_multiplier, least)
        if not spacing(row.clip, row.noise_multiplier, least + _BESIDE) <= row.grid <= coarsest:
            return [
                f"step {row.step}: a grid of {row.grid:g} is not that of {least} coordinates,"
                f" {coarsest:g}"
            ]
    return []


def _declared(method: str) -> dict[str, float]:
    """The bound of each own query of a named method."""
    from ..methods import get, names

    if method not in names():
        return {}
    extras = get(method)._extras().items()
    return {name: extra.sensitivity for name, extra in extras if extra.sensitivity is not None}


def _stated(result: dict[str, Any], config: Config, ledger: Ledger) -> list[str]:
    """Checks the numbers beside ε that a reader may quote, against configuration and ledger."""
    from ..accounting import ACCOUNTANTS

    head, events = ledger.header, ledger.events()
    assert config.batch_size is not None and config.delta is not None
    wanted: dict[str, Any] = {
        "method": config.method,
        "model": config.model,
        "accountant": config.accountant,
        "expected_batch_size": config.batch_size,
        "releases": len(ledger),
        "num_examples_source": head.num_examples_source,
    }
    if config.sigma is not None:
        wanted["sigma"] = config.sigma
    problems = [
        f"{name}: result.json says {result.get(name)!r}, the run's other files {value!r}"
        for name, value in wanted.items()
        if result.get(name) != value
    ]
    numbers: dict[str, tuple[Any, float | None]] = {
        "sample_rate": (
            result.get("sample_rate"),
            min(1.0, _drawn(config) * config.batch_size / head.num_examples),
        )
    }
    for rate in {event.sample_rate for event in events}:  # the one that ε is computed with
        numbers[f"sample_rate of the ledger's rows with {rate:g}"] = (
            result.get("sample_rate"),
            rate,
        )
    for name, said in (result.get("epsilon_by") or {}).items():
        if name not in ACCOUNTANTS:
            problems.append(f"ε by {name!r}: there is no accountant of this name")
        elif said is not None:
            try:
                numbers[f"ε by {name}"] = (said, _epsilon(tuple(events), config.delta, name))
            except AccountingError as error:
                problems.append(f"ε by {name} can't be recomputed: {error}")
    if group := result.get("group"):
        if group.get("delta") != config.delta:
            problems.append(
                f"δ of a {group.get('unit')}: result.json says {group.get('delta')}, config.json"
                f" {config.delta}"
            )
        if group.get("epsilon") is not None:
            found = _group_epsilon(tuple(events), config.delta, group.get("records"))
            numbers[f"ε of a {group.get('unit')}"] = (group["epsilon"], found)
    multipliers = [event.noise_multiplier for event in events][:32]
    said = result.get("multipliers") or []
    if len(said) != len(multipliers) or not all(map(_close, said, multipliers)):
        problems.append("the multipliers in result.json are not those of the ledger")
    return problems + [
        f"{name}: result.json says {said}, the run's other files give {found}"
        for name, (said, found) in numbers.items()
        if not _close(said, found)
    ]


def _drawn(config: Config) -> float:
    """How many times the batch size is drawn as candidates (dp-is)."""
    return float(config.method_options.get("cap", 1.0))


# Many runs of an experiment have the same steps, and each computation takes seconds.
@functools.lru_cache(maxsize=256)
def _epsilon(events: tuple[Event, ...], delta: float, accountant: str) -> float | None:
    from ..accounting import epsilon

    value = epsilon(events, delta, accountant)
    return value if math.isfinite(value) else None


@functools.lru_cache(maxsize=256)
def _group_epsilon(events: tuple[Event, ...], delta: float, records: int) -> float | None:
    from ..accounting._accounting import group_epsilon

    try:
        return group_epsilon(events, delta, records)
    except (AccountingError, ValueError):
        return None


def _probes(folder: RunFolder, result: dict[str, Any], config: Config) -> list[str]:
    """Fits every tail again from its eigenvalues, and recomputes C with a new controller."""
    import torch

    from ..spectrum import Reading, fit_tail
    from .recipe import build_spectral

    lines = folder.read_lines("probes.jsonl")
    if not lines:
        return []
    controller = build_spectral(config)
    state = controller.init()
    k = getattr(controller.probe, "k", None)
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            spectra = {
                n: torch.tensor(v["eigenvalues"], dtype=torch.float64)
                for n, v in line["layers"].items()
            }
            shapes = {
                n: (int(v["shape"][0]), int(v["shape"][1])) for n, v in line["layers"].items()
            }
            fits = {n: fit_tail(spectra[n], controller.fit, k, shapes[n]) for n in spectra}
            for name, fit in fits.items():
                said = line["layers"][name]["zeta"]
                if fit.ok and not _close(said, fit.zeta):
                    problems.append(
                        f"probe {number}: ζ of {name} is {fit.zeta:.6g} by its eigenvalues, not"
                        f" {said}"
                    )
            state = controller.update(Reading(line["step"], fits, shapes, spectra), state)
            if not _close(line["clip"], state.clip):
                problems.append(
                    f"probe {number}: C should be {state.clip:.6g} and is {line['clip']}"
                )
                state = dataclasses.replace(state, clip=line["clip"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            return [*problems, f"probes.jsonl, line {number}, can't be used: {error!r}"]
    try:
        if result.get("probes") != probe_summary(lines):
            problems.append("the summary of the probes in result.json differs from probes.jsonl")
    except (KeyError, TypeError) as error:
        problems.append(f"probes.jsonl can't be summarised: {error!r}")
    return problems + _used(folder, result, lines)


def _used(folder: RunFolder, result: dict[str, Any], lines: list[dict[str, Any]]) -> list[str]:
    """Checks that the ledger's noise was scaled by the C of the probes."""
    from ..ledger import Ledger

    try:
        rows = list(Ledger.from_jsonl(folder / "ledger.jsonl").rows())
    except (FileNotFoundError, LedgerError):
        return []  # already reported
    clips = clip_path(lines[0]["clip_before"], lines, int(result.get("steps", 0)))
    first = clips[0] if clips else 1.0
    unit = next((row.clip / first for row in rows if row.step == 0), 1.0)  # of the clip rule, per C
    for row in rows:
        if (
            "sum" in row.query
            and row.step < len(clips)
            and not _close(row.clip, unit * clips[row.step])
        ):
            return [
                f"step {row.step}: the ledger has clip {row.clip:.6g}, the probes C ="
                f" {clips[row.step]:.6g}"
            ]
    return []


def _clip(folder: RunFolder, result: dict[str, Any]) -> list[str]:
    """Checks what result.json says about C against the lines that record its changes.

    A long run does not keep all changes; then nothing is checked.
    """
    said = result.get("clip")
    if said is None:
        return []
    probes, lines = folder.read_lines("probes.jsonl"), folder.read_lines("clips.jsonl")
    if lines and clip_lines_every(int(result.get("planned_steps") or 0)) > 1:
        return []
    try:
        first = probes[0]["clip_before"] if probes else said["initial"]
        changes = probes or lines
        wanted = {
            "initial": first,
            "final": changes[-1]["clip"] if changes else first,
            **clip_figures(clip_path(first, changes, int(result["steps"])), probes),
        }
        differing = [name for name, value in wanted.items() if not _close(said[name], value)]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        return [f"what result.json says about C can't be checked: {error!r}"]
    return [
        f"C: result.json says {said[name]} ({name}), the lines that change it give {wanted[name]}"
        for name in differing
    ] + _clipped(folder, clip_path(first, changes, int(result["steps"])))


def _clipped(folder: RunFolder, clips: list[float]) -> list[str]:
    """Checks that every sum was clipped at the C of its update.

    A rule that divides by C has one bound for all sums.
    """
    from ..ledger import Ledger

    try:
        every = Ledger.from_jsonl(folder / "ledger.jsonl").rows()
        rows = [row for row in every if ": " not in row.query]
    except (FileNotFoundError, LedgerError):
        return []  # reported already
    if not rows or not clips:
        return []
    if not _close(rows[0].clip, clips[0]):
        return [
            f"C: the run began at {clips[0]:.6g}, and its first sum was clipped at"
            f" {rows[0].clip:.6g}"
        ]
    if all(row.clip == rows[0].clip for row in rows):
        return []
    for row in rows:
        if row.step < len(clips) and not _close(row.clip, clips[row.step]):
            return [
                f"step {row.step}: C was {clips[row.step]:.6g}, and the sum was clipped at"
                f" {row.clip:.6g}"
            ]
    return []
