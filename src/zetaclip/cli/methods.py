"""``zetaclip methods``: lists the private methods, what they release and their noise."""

from __future__ import annotations

import argparse
import math
from typing import Any

from ..errors import CommandError

DESCRIPTION = (
    "List every method: what it reads, its queries, its noise and its source. With a budget"
    " (--epsilon, or --sigma as DP-SGD would use it), also compute the noise multiplier of each"
    " query. With a NAME, show that method's options."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="only this method, with its options"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    budget = parser.add_argument_group("budget")
    either = budget.add_mutually_exclusive_group()
    either.add_argument("--epsilon", type=float, help="the target ε of every method")
    either.add_argument("--sigma", type=float, help="the noise multiplier that DP-SGD would use")
    budget.add_argument("--delta", type=float, default=1e-5, help="default: 1e-5")
    budget.add_argument(
        "--num-examples", type=int, default=60000, metavar="N", help="default: 60000"
    )
    budget.add_argument("--batch-size", type=int, default=256, metavar="L", help="default: 256")
    budget.add_argument("--epochs", type=float, default=8, help="default: 8")
    budget.add_argument(
        "--accountant", choices=("pld", "prv", "rdp"), default="pld", help="default: pld"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the methods.

    Raises:
        CommandError: There is no such method, or the budget is wrong.
    """
    import json

    from ..methods import _table as methods

    try:
        chosen = [
            methods.get(name) for name in ([arguments.name] if arguments.name else methods.names())
        ]
        budget = _budget(arguments)
        records = [_record(method, budget) for method in chosen]
    except ValueError as error:
        raise CommandError(error) from error
    if arguments.json:
        print(json.dumps(records, indent=2))
    elif arguments.name:
        print(_details(records[0]))
    else:
        print(_table(records, budget is not None))
    return 0


def _budget(arguments: argparse.Namespace) -> Any:
    if arguments.epsilon is None and arguments.sigma is None:
        return None
    from ..accounting import noise_multiplier_for
    from ..methods import NoiseBudget

    if arguments.num_examples < 1 or not 1 <= arguments.batch_size <= arguments.num_examples:
        raise ValueError("--batch-size must be between 1 and --num-examples")
    if not 0 < arguments.epochs < math.inf:
        raise ValueError("--epochs must be positive")
    rate = arguments.batch_size / arguments.num_examples
    epoch = -(-arguments.num_examples // arguments.batch_size)
    steps = math.ceil(arguments.epochs * epoch - 1e-9)
    sigma = arguments.sigma
    if sigma is None:
        sigma = noise_multiplier_for(
            arguments.epsilon, arguments.delta, rate, steps, arguments.accountant
        )
    elif not 0 <= sigma < math.inf:
        raise ValueError(f"--sigma must be at least 0, not {sigma}")
    return NoiseBudget(
        sigma,
        rate,
        steps,
        arguments.delta,
        arguments.accountant,
        float(arguments.batch_size),
        epoch,
    )


def _record(method: Any, budget: Any) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": method.name,
        "private": method.private,
        "summary": method.summary,
        "reads": method.reads,
        "queries": method.queries,
        "noise": method.noise,
        "source": method.source,
        "update": method.family,
        "any_update": method.any_update,
        "lr": method.lr,
        "paper_lr": method.paper_lr,
        "weight_average": method.weight_average,
        "needs_epochs_and_delta": method.needs_steps,
        "options": {
            name: {"default": _plain(value), "meaning": text}
            for name, (value, text) in method.options.items()
        },
    }
    if budget is not None and method.private:
        record["multipliers"] = {
            query: first if first == last else [first, last]
            for query, (first, last) in method.multipliers(budget).items()
        }
    return record


def _plain(value: Any) -> Any:
    """The value with infinities as text, because JSON has none."""
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _shown(record: dict[str, Any]) -> str:
    cells = []
    for query, value in record.get("multipliers", {}).items():
        text = f"{value[0]:.4f} to {value[1]:.4f}" if isinstance(value, list) else f"{value:.4f}"
        cells.append(f"{query} {text}")
    return ", ".join(cells) or "-"


def _table(records: list[dict[str, Any]], with_budget: bool) -> str:
    head = ["method", "reads", "queries", "multipliers" if with_budget else "noise", "source"]
    rows = [head]
    for record in records:
        noise = _shown(record) if with_budget else record["noise"]
        rows.append([record["name"], record["reads"], record["queries"], noise, record["source"]])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )


def _details(record: dict[str, Any]) -> str:
    lines = [f"{record['name']}: {record['summary']}"]
    for key in ("reads", "queries", "noise", "source"):
        lines.append(f"  {key:<9}{record[key]}")
    if "multipliers" in record:
        lines.append(f"  {'drawn':<9}{_shown(record)}")
    others = "any torch optimizer, by default " if record["any_update"] else ""
    lines.append(f"  {'update':<9}{others}{record['update']}, lr {record['lr']:g} (decoupled step)")
    lines.append("options:")
    width = max((len(name) for name in record["options"]), default=0)
    for name, option in record["options"].items():
        lines.append(f"  {name.ljust(width)}  {option['meaning']} (default {option['default']})")
    return "\n".join(lines)
