"""The summary that a run writes: result.json, and a few lines for a reader."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ..accounting import ACCOUNTANTS, group_epsilon
from ..errors import AccountingError
from ..spectrum.outliers import outliers
from ..words import counted, grouped
from .config import Config
from .description import shown_features
from .folder import RunFolder
from .probes import clip_figures, probe_summary
from .progress import shown
from .provenance import SEALED, commit, digest, seal, versions

if TYPE_CHECKING:
    from ..data import Dataset
    from .steps import PlainSteps, PrivateSteps

METRICS = ("accuracy", "auc", "rmse", "rmse_of_range", "ece", "loss")


def compose(
    config: Config,
    dataset: Dataset,
    steps: PrivateSteps | PlainSteps,
    folder: RunFolder,
    last: dict[str, Any],
    seconds: dict[str, float],
    reliability: list[dict[str, Any]] | None,
    details: dict[str, Any] | None,
    resumed: int,
    stop: int,
) -> dict[str, Any]:
    """The content of result.json.

    Args:
        config: The settings, all of them chosen.
        dataset: The data.
        steps: What took the updates.
        folder: The run folder.
        last: The last line of metrics.jsonl.
        seconds: Time by part.
        reliability: Accuracy by confidence, in bins.
        details: Confusions, curves or residuals on held-out records.
        resumed: How often the run was resumed.
        stop: How many updates ``max_epsilon`` allowed.
    """
    from .steps import PrivateSteps

    private = isinstance(steps, PrivateSteps)
    metrics = {name: last[name] for name in METRICS if name in last}
    probes = folder.read_lines("probes.jsonl")
    total = sum(seconds.values())
    result: dict[str, Any] = {
        "zetaclip_result": 1,
        "metric": {"name": steps.task.metric, "value": last.get("metric")},
        "metrics": metrics,
        "epsilon": None,
        "delta": config.delta,
        "accountant": config.accountant if private else None,
        "epsilon_by": None,
        "adjacency": "add/remove one record",
        "unit": dataset.unit,
        "claim": "none: the method is not private",
        "sigma": steps.sigma,
        "multipliers": None,
        "steps": steps.done,
        "planned_steps": steps.total,
        "sample_rate": steps.sample_rate,
        "num_examples": steps.size,
        "expected_batch_size": config.batch_size,
        "method": config.method,
        "model": config.model,
        "parameters": sum(p.numel() for p in steps.model.parameters() if p.requires_grad),
        "features": shown_features(dataset),
        "data": dataset.name,
        "task": dataset.task,
        "clip": None,
        "probes": None,
        "seconds": {"total": total, **seconds},
        "probe_share": seconds["probe"] / max(1e-9, seconds["train"] + seconds["probe"]),
        "reliability": reliability,
        "evaluation": details,
        "resumed": resumed,
        "ranks": ranks_of(steps),
        "versions": versions(),
        "commit": commit(),
        "noise_seed_known": False,
        "notes": [*dataset.notes],
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if config.seed is not None:
        result |= {"seed": config.seed, "noise_seed_known": private}
    if dataset.target_unit:
        result["metric"]["unit"] = dataset.target_unit
    if private:
        result |= _privacy(config, dataset, steps)  # type: ignore[arg-type]
    result["clip"] = _clip_summary(steps, probes)
    if probes:
        result["probes"] = probe_summary(probes)
    result["notes"] += _notes(config, dataset, steps, stop)
    useless = no_better_than_constant(dataset, steps.task.metric, last.get("metric"))
    if useless is not None:
        result["notes"].append(useless)
    found = signal_found(steps)
    if found:
        result["signal"] = found
        result["notes"].append(_signal_in_words(found))
    result["files"] = {name: digest(folder / name) for name in SEALED if (folder / name).exists()}
    result["seal"] = seal(result)
    return result


def signal_found(steps: PrivateSteps | PlainSteps) -> dict[str, dict[str, Any]]:
    """Directions of each layer that stand out of the noise of the run; needs the method auto.

    It reads released weights and the known size of the noise, so it costs no privacy.
    """
    from ..methods import Auto
    from .steps import PrivateSteps

    update = steps.optimizer.inner if isinstance(steps, PrivateSteps) else None
    if not isinstance(update, Auto):
        return {}
    found = {}
    for name, parameter in steps.model.named_parameters():
        if parameter.ndim > 1 and update.state.get(parameter):
            moved, noise = update.moved(parameter)
            if bool(moved.isfinite().all()):
                seen = outliers(moved, noise)
                found[name.removesuffix(".weight")] = {
                    "directions": seen.count,
                    "of": seen.of,
                    "edge": seen.edge,
                    "energy": seen.energy,
                    "strengths": list(seen.signal[:16]),
                }
    return found


def _signal_in_words(found: dict[str, dict[str, Any]]) -> str:
    """One line about all layers."""
    seen = [
        f"{name}: {one['directions']} of {one['of']} directions"
        for name, one in found.items()
        if one["directions"]
    ]
    if seen:
        return f"signal found beyond the noise in {'; '.join(seen)}"
    return "no direction of a layer stands out of the noise; what was learned is spread thinly"


def no_better_than_constant(dataset: Dataset, metric: str, value: float | None) -> str | None:
    """What to say of a model that a constant answer would equal on the held-out records.

    Args:
        dataset: The data.
        metric: The name of the metric.
        value: Its value on held-out records; None if it was not evaluated.

    Returns:
        A sentence; None for a model that is better.
    """
    if value is None or dataset.test is None:
        return None
    y = dataset.test.y
    if metric == "rmse":
        worse = value >= float(y.double().std(unbiased=False))
    elif metric == "accuracy":
        worse = value <= float(y.long().bincount().max()) / len(y)
    else:
        worse = metric == "auc" and value <= 0.5
    if not worse:
        return None
    return (
        "on the held-out records this model is no better than one that gives every record the same"
        " answer. What helps: more records, a larger ε, fewer inputs"
    )


def ranks_of(steps: PrivateSteps | PlainSteps) -> int:
    """How many ranks train."""
    from .steps import PrivateSteps

    ranks = steps.engine.ranks if isinstance(steps, PrivateSteps) else None
    return 1 if ranks is None else ranks.count


def _privacy(config: Config, dataset: Dataset, steps: PrivateSteps) -> dict[str, Any]:
    engine = steps.engine
    by: dict[str, float | None] = {}
    for name in ACCOUNTANTS:
        try:
            by[name] = steps.epsilon(name)
        except AccountingError:
            by[name] = None
    header = engine.ledger.header
    found: dict[str, Any] = {
        "epsilon": by[config.accountant],
        "epsilon_by": by,
        "adjacency": header.adjacency,
        "claim": header.claim,
        "multipliers": [event.noise_multiplier for event in engine.ledger.events()][:32],
        "releases": len(engine.ledger),
        "num_examples_source": header.num_examples_source,
    }
    if dataset.records_per_group > 1 and by[config.accountant] is not None:
        assert config.delta is not None
        k = dataset.records_per_group
        try:
            bound: float | None = group_epsilon(engine.ledger.events(), config.delta, k)
        except AccountingError:
            bound = None
        found["group"] = {
            "unit": dataset.group,
            "records": k,
            "epsilon": bound,
            "delta": config.delta,
        }
    return found


def _clip_summary(steps: PrivateSteps | PlainSteps, probes: list[dict[str, Any]]) -> Any:
    """C over all updates: the norm that each update used."""
    from .steps import PrivateSteps

    if not isinstance(steps, PrivateSteps):
        return None
    return {"initial": steps.clips[0], "final": steps.clip, **clip_figures(steps.clips, probes)}


def _notes(
    config: Config, dataset: Dataset, steps: PrivateSteps | PlainSteps, stop: int
) -> list[str]:
    notes = list(dict.fromkeys(steps.notes))
    if dataset.private_statistics:
        looked = grouped(dataset.private_statistics)
        notes.append(f"preprocessing looked at private data, which ε does not cover: {looked}")
    if not dataset.public and not config.no_eval and dataset.test is not None:
        notes.append(
            "the metrics are of held-out private records, which ε does not cover; --no-eval turns"
            " them off"
        )
    if config.no_eval:
        notes.append("nothing was evaluated (--no-eval)")
    if config.non_private_diagnostics:
        share = ", of rank 0's share" if ranks_of(steps) > 1 else ""
        notes.append(
            f"diagnostics.jsonl holds batch losses, batch sizes and clip fractions{share}, which ε"
            " does not cover"
        )
    if config.seed is not None and steps.method.private:
        notes.append("the seed is known: anyone who has it can remove the noise")
    if stop < steps.total:
        notes.append(
            f"stopped after {stop} of {steps.total} updates: one more would exceed max_epsilon ="
            f" {config.max_epsilon:g}"
        )
    if config.weight_average is not None:
        notes.append(
            f"metrics and weights are of the moving average with decay {config.weight_average:g}"
        )
    return notes


def summary(result: dict[str, Any]) -> str:
    """The result in a few lines for a reader."""
    lines = []
    reached = shown(result["metric"]["name"], result["metric"]["value"])
    if result["epsilon"] is not None:
        lines.append(
            f"{reached} at ε = {result['epsilon']:.3g}, δ = {result['delta']:.3g} "
            f"({result['accountant'].upper()}; {result['adjacency']}: {result['unit']})"
        )
    else:
        lines.append(f"{reached}; no ε is claimed ({result['claim'].removeprefix('none: ')})")
    if result.get("group"):
        group = result["group"]
        bound = (
            "no bound could be computed"
            if group["epsilon"] is None
            else f"ε = {group['epsilon']:.3g}"
        )
        lines.append(
            f"per {group['unit']} (at most {counted(group['records'], 'record')}): {bound},"
            f" δ = {group['delta']:.3g}"
        )
    if result["clip"]:
        clip = result["clip"]
        text = (
            f"C: final {clip['final']:.3g}, first {clip['initial']:.3g}, median"
            f" {clip['median']:.3g}"
        )
        if result["probes"]:
            probes = result["probes"]
            weak = probes["weak_fits"]
            text += (
                f"; {counted(probes['count'], 'probe')} of"
                f" {', '.join(probes['layers'])}, {100 * probes['in_zone_share']:.0f} % in the"
                f" zone, {counted(weak, 'weak fit')}"
            )
        lines.append(text)
    seconds = result["seconds"]
    rate = (
        ""
        if result["sample_rate"] is None
        else f" of q = {result['sample_rate']:.4g}, σ = {result['sigma']:.4g}"
    )
    lines.append(
        f"{result['method']} on {result['data']}: {counted(result['steps'], 'step')}{rate};"
        f" {seconds['total']:.1f} s (train {seconds['train']:.1f}, eval {seconds['eval']:.1f},"
        f" probe {seconds['probe']:.2f})"
    )
    lines += [f"note: {note}" for note in result["notes"]]
    return "\n".join(lines)
