"""``zetaclip audit``: attacks a configuration on purpose, and compares with the claimed ε."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from ..errors import CommandError, ConfigError
from ..files import replace_file
from ..training.config import Config
from ..training.layers import merge, read_file
from ..training.names import check_names
from .flags import in_flags
from .train import add_settings, asked

DESCRIPTION = (
    "Train with canaries that are in or out of the data by secret coins, let an attacker guess the"
    " coins, and print the ε that the guesses show beside the ε that the ledger claims. Takes the"
    " settings of `zetaclip train`. Exit code 1: more than the claimed ε was found."
)
EPILOG = """examples:
  zetaclip audit --data digits --epsilon 8 --steps 1 --batch-size 1437
  zetaclip audit --data digits --epsilon 8 --attacker final --canaries 500
  zetaclip audit --data digits --epsilon 8 --method dp-sgd --steps 1 --attacker pair --runs 1000

attackers:
  transcript  sees every released gradient; canaries are gradients, no records
  final       sees the trained model; canaries are training records with wrong labels
  pair        many short runs of a tiny model, with and without one record

A found ε is a lower bound. It shows mistakes; it never proves that ε is small. With 1,000 canaries
in one run a claim of ε = 1 or below can't be checked tightly: see docs/audit.md."""

ATTACKERS = ("transcript", "final", "pair")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: those of the audit, and every setting of a training."""
    group = parser.add_argument_group("the audit")
    group.add_argument(
        "--attacker",
        choices=ATTACKERS,
        default="transcript",
        help="what the attacker sees (default: transcript)",
    )
    group.add_argument(
        "--canaries", type=int, default=1000, metavar="N", help="how many (default: 1000)"
    )
    group.add_argument(
        "--runs",
        type=int,
        default=1000,
        metavar="N",
        help="attacker pair: runs with the record, and as many without (default: 1000)",
    )
    group.add_argument(
        "--confidence",
        type=float,
        default=0.99,
        metavar="X",
        help="how often the bound holds, at least (default: 0.99)",
    )
    group.add_argument(
        "--run",
        dest="folder",
        metavar="DIR",
        help="take the settings of this run, and leave the result in DIR/audit.json for its report",
    )
    group.add_argument("--json", action="store_true", help="print JSON")
    group.add_argument("--quiet", action="store_true", help="print the result only")
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the audit; returns 1 if it found more than was claimed.

    Raises:
        CommandError: The settings or the data are wrong.
    """
    import warnings

    from ..training.progress import Display

    try:
        config = Config.from_mapping(merge(_of_run(arguments.folder), asked(arguments)))
        check_names(config)
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print(
                f"warning: {in_flags(message)}", file=sys.stderr
            )
            display = Display(quiet=arguments.quiet or arguments.json)
            found = (
                _pair(config, arguments)
                if arguments.attacker == "pair"
                else _one_run(config, arguments, display)
            )
    except (ConfigError, ValueError) as error:
        raise CommandError(in_flags(error)) from error
    if arguments.folder is not None:
        with replace_file(Path(arguments.folder) / "audit.json") as file:
            file.write(json.dumps(found, indent=2, ensure_ascii=False).encode() + b"\n")
    if arguments.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        print(_text(found))
    return int(found["excess"])


def _of_run(folder: str | None) -> dict[str, Any]:
    """The settings of a run, with coins and noise of its own: a seed is not taken over."""
    if folder is None:
        return {}
    return {**read_file(Path(folder) / "config.json"), "seed": None}


def _one_run(config: Config, arguments: argparse.Namespace, display: Any) -> dict[str, Any]:
    from ..audit import audit

    return audit(
        config,
        canaries=arguments.canaries,
        attacker=arguments.attacker,
        confidence=arguments.confidence,
        display=display,
    ).to_dict()


def _pair(config: Config, arguments: argparse.Namespace) -> dict[str, Any]:
    from ..audit import audit_pair_of

    found = audit_pair_of(config, runs=arguments.runs, confidence=arguments.confidence)
    return {"attacker": "pair", **found}


def _text(found: dict[str, Any]) -> str:
    counted = (
        f"{found['correct']} of {found['guesses']} guesses right, {found['canaries']} canaries"
        if "canaries" in found
        else f"{found['runs']} runs"
    )
    verdict = (
        "MORE THAN CLAIMED: the claim is wrong, or the training was changed"
        if found["excess"]
        else "nothing contradicts the claim"
    )
    claimed = found["epsilon_claimed"]
    shown = f"{claimed:.3f}" if math.isfinite(claimed) else "infinite"
    return (
        f"ε claimed {shown}, δ = {found['delta']:g}\n"
        f"ε found   {found['epsilon_found']:.3f} or more, at {100 * found['confidence']:g} %"
        f" confidence (bound: {found['bound']})\n"
        f"{counted}\n"
        f"{_others(found)}"
        f"{verdict}"
    )


def _others(found: dict[str, Any]) -> str:
    """What the other bounds say; the one that counts was chosen before."""
    bounds = dict(found.get("bounds", {}))
    bounds.pop(found["bound"], None)
    if not bounds:
        return ""
    return "by other bounds: " + ", ".join(f"{v:.2f} ({k})" for k, v in bounds.items()) + "\n"
