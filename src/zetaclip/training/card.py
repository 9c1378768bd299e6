"""MODEL_CARD.md: what a model is, what it cost in privacy, and what that does not cover.

The form is that of Hugging Face's model cards: a YAML header, then Markdown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .. import __version__
from .progress import METRICS

NAME = "MODEL_CARD.md"
_PIPELINES = {
    ("table", "classification"): "tabular-classification",
    ("table", "binary"): "tabular-classification",
    ("table", "regression"): "tabular-regression",
    ("images", "classification"): "image-classification",
    ("images", "binary"): "image-classification",
}
_TASKS = {
    "classification": "classification",
    "binary": "classification with two classes",
    "regression": "regression",
}
# At most this many columns, classes or notes are listed; model.json has them all.
_MOST = 40


def compose_card(description: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """The text of a run's card.

    Args:
        description: The content of model.json. Without ``input`` and ``target`` if these are
            private.
        result: The content of result.json, or what an unfinished run has of it.

    Returns:
        A YAML header and Markdown.

    **Guarantee.** The text depends on public files of the run only.
    """
    parts = [
        _header(description, result),
        f"# {result['data']}: {_TASKS[description['task']]}",
        _state(result),
        "## Privacy\n\n" + _privacy(result),
        "### Covered\n\n" + _covered(result),
        "### Not covered\n\n" + _bullets(_not_covered(description, result)),
        "## Data, as declared\n\n" + _data(description, result),
        "## Metrics\n\n" + _metrics(result),
        "## Training\n\n" + _training(description, result),
        "## How to use it\n\n" + _use(description),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _header(description: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    pipeline = _PIPELINES.get((_kind(description), description["task"]))
    if pipeline == "tabular-classification" and _is_text(description):
        pipeline = "text-classification"
    lines = ["library_name: zetaclip"]
    if pipeline:
        lines.append(f"pipeline_tag: {pipeline}")
    tags = ["differential-privacy", "pytorch", "safetensors", result["method"]]
    lines += ["tags:", *(f"- {_yaml(tag)}" for tag in tags)]
    measured = {name: value for name, value in _measured(result).items() if value is not None}
    if measured and pipeline:
        main = result["metric"]["name"]
        lines += [
            "metrics:",
            f"- {main}",
            "model-index:",
            f"- name: {_yaml(str(result['data']))}",
            "  results:",
            "  - task:",
            f"      type: {pipeline}",
            "    dataset:",
            f"      name: {_yaml(str(result['data']))}",
            f"      type: {_yaml(str(result['data']))}",
            "    metrics:",
        ]
        for name, value in measured.items():
            lines += [
                f"    - type: {name}",
                f"      value: {value!r}",
                f"      name: {_yaml(METRICS.get(name, name))}",
            ]
    return "---\n" + "\n".join(lines) + "\n---"


def _state(result: Mapping[str, Any]) -> str:
    if result.get("finished"):
        return ""
    return (
        f"**The training was interrupted** after {result['steps']} of {result['planned_steps']}"
        " updates. These are the weights of that moment, and the ε below is what they have cost."
        " A resumed run replaces this card."
    )


def _privacy(result: Mapping[str, Any]) -> str:
    if result["epsilon"] is None:
        reason = str(result["claim"]).removeprefix("none: ")
        return f"**No ε is claimed** for this model: {reason}."
    rows = [
        ("ε", f"{result['epsilon']:.4g}"),
        ("δ", f"{result['delta']:.3g}"),
        ("adjacency", result["adjacency"]),
        ("unit", result["unit"]),
        ("accountant", f"{str(result['accountant']).upper()}{_others(result)}"),
        ("noise multiplier σ", f"{result['sigma']:.5g}"),
        ("sampling rate q", f"{result['sample_rate']:.5g} (Poisson)"),
        ("updates", str(result["steps"])),
        ("N", f"{result['num_examples']} ({result.get('num_examples_source', 'declared')})"),
    ]
    text = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
    group = result.get("group")
    if group:
        bound = "no bound" if group["epsilon"] is None else f"ε = {group['epsilon']:.4g}"
        text += (
            f"\n\nFor a whole {group['unit']} (at most {group['records']} records): {bound},"
            f" δ = {group['delta']:.3g}."
        )
    if result.get("noise_seed_known"):
        text += (
            "\n\n**The seed of the noise is known.** Anyone who has it can remove the noise; then"
            " nothing is protected."
        )
    return text


def _others(result: Mapping[str, Any]) -> str:
    by = result.get("epsilon_by") or {}
    others = [
        f"{value:.4g} by {name.upper()}"
        for name, value in by.items()
        if name != result["accountant"] and value is not None
    ]
    return f" ({', '.join(others)})" if others else ""


def _covered(result: Mapping[str, Any]) -> str:
    if result["epsilon"] is None:
        return "Nothing."
    return (
        "The weights, every clipping norm and every probe of the training: all of them together"
        f" change by at most the stated (ε, δ) if {result['unit']} is added to the training data"
        " or removed from it. `ledger.jsonl` lists every release, and `zetaclip verify` computes ε"
        " from it again."
    )


def _not_covered(description: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    found = [
        "what is public by declaration: names of columns and classes, bounds, N, and the settings"
        " of the training, if they were not chosen by looking at the data",
        "predictions: they cost no further ε, but they tell something about the new records that"
        " they are made for",
    ]
    if "input" not in description:
        found.append(
            "bounds, values or classes were inferred from the private data, and the shapes of the"
            " weights show how many there are. Their values are in private/input.json: never"
            " publish that folder"
        )
    if _measured(result):
        found.append(
            "the metrics: they are of held-out records. If those are private, so are the metrics"
        )
    return found


def _data(description: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    lines = [f"- name: {result['data']}", f"- one record is {result['unit']}"]
    source, target = description.get("input"), description.get("target")
    if target is None:
        lines.append("- columns and classes were inferred from private data and are not listed")
        return "\n".join(lines)
    if target["name"]:
        lines.append(f"- target: `{target['name']}`")
    if target["classes"]:
        lines.append(f"- classes: {_listed(target['classes'])}")
    if target["range"]:
        unit = f" {target['unit']}" if target["unit"] else ""
        lines.append(
            f"- range of the target: {target['range'][0]:g} to {target['range'][1]:g}{unit}"
        )
    if source and source["kind"] == "images":
        channels, height, width = source["shape"]
        colour = "grey" if channels == 1 else "colour"
        lines.append(f"- pictures: {height}x{width} pixels, {colour}, scaling {source['scaling']}")
    elif source:
        used = {n: e for n, e in source["columns"].items() if e["type"] != "ignore"}
        lines += ["", "| column | type | declared |", "|---|---|---|"]
        lines += [f"| {_cell(n)} | {e['type']} | {_cell(_entry(e))} |" for n, e in used.items()][
            :_MOST
        ]
        if len(used) > _MOST:
            lines.append(f"| … | | {len(used) - _MOST} more in `model.json` |")
    return "\n".join(lines)


def _entry(entry: Mapping[str, Any]) -> str:
    said = []
    for name, value in entry.items():
        if name == "type":
            continue
        if name == "bounds":
            said.append(f"{value[0]} to {value[1]}")
        elif isinstance(value, list):
            said.append(_listed([str(item) for item in value]))
        else:
            said.append(f"{name}: {value}")
    return "; ".join(said)


def _metrics(result: Mapping[str, Any]) -> str:
    measured = _measured(result)
    if not measured:
        return "Nothing was measured."
    rows = [
        f"| {METRICS.get(name, name)} | {'n/a' if value is None else f'{value:.4g}'} |"
        for name, value in measured.items()
    ]
    return "\n".join(["On held-out records:", "", "| metric | value |", "|---|---|", *rows])


def _training(description: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    features = description.get("features") or result.get("features")
    lines = [
        f"- network: `{result['model']}`, {result['parameters']} trained parameters",
        f"- features: fixed in advance, not trained (`{features['kind']}`)" if features else "",
        f"- method: `{result['method']}`; expected batch size {result['expected_batch_size']}",
        f"- software: {', '.join(f'{k} {v}' for k, v in result['versions'].items())}",
        *(f"- {note}" for note in result["notes"][:_MOST]),
    ]
    return "\n".join(line for line in lines if line)


def _use(description: Mapping[str, Any]) -> str:
    new = "pictures/" if _kind(description) == "images" else "new.csv"
    return (
        f"With zetaclip {__version__} installed:\n\n"
        "```python\n"
        "import zetaclip\n\n"
        'run = zetaclip.load_run("path/of/this/folder")\n'
        f'run.predict("{new}")\n'
        "run.model  # a torch.nn.Module\n"
        "```\n\n"
        f"or `zetaclip predict path/of/this/folder {new} --out predictions.csv`."
    )


def _measured(result: Mapping[str, Any]) -> dict[str, float | None]:
    """The metrics that are numbers, the main one first."""
    found = {
        name: value
        for name, value in (result.get("metrics") or {}).items()
        if value is None or isinstance(value, (int, float))
    }
    return dict(sorted(found.items(), key=lambda item: item[0] != result["metric"]["name"]))


def _kind(description: Mapping[str, Any]) -> str:
    """The kind of input; one that is kept private is a table's."""
    if "input" not in description:
        return "table"
    return description["input"]["kind"] if description["input"] else ""


def _is_text(description: Mapping[str, Any]) -> bool:
    """Whether the model reads text and nothing else."""
    entries = (description.get("input") or {}).get("columns", {}).values()
    kinds = {entry["type"] for entry in entries} - {"ignore"}
    return kinds == {"text"}


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _listed(values: list[str]) -> str:
    more = f", … ({len(values)} in all)" if len(values) > _MOST else ""
    return ", ".join(f"`{value}`" for value in values[:_MOST]) + more


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _yaml(text: str) -> str:
    """A string that YAML reads as it is: JSON's strings are YAML's."""
    return json.dumps(text, ensure_ascii=False)
