"""Checks a run folder against itself: ε from its ledger, every C from its probes, file digests.

It finds what was changed by hand and what is inconsistent. It can't detect a run that was made up
as a whole.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AccountingError, ConfigError, LedgerError
from ..grid import spacing
from .config import Config
from .folder import RunFolder
from .provenance import SEALED, digest, seal
from .result import METRICS
from .verify_clip import check_clip, check_probes, close

if TYPE_CHECKING:
    from ..ledger import Event, Ledger

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
        problems += check_probes(folder, result, config)
    return problems + check_clip(folder, result)


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
    if not close(said, found):
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
        if own in declared and not close(row.clip, declared[own]):
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
    if len(said) != len(multipliers) or not all(map(close, said, multipliers)):
        problems.append("the multipliers in result.json are not those of the ledger")
    return problems + [
        f"{name}: result.json says {said}, the run's other files give {found}"
        for name, (said, found) in numbers.items()
        if not close(said, found)
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
