"""``zetaclip account``: ε from noise, or noise from ε, without training anything."""

from __future__ import annotations

import argparse
import math
from typing import Any

from ..errors import CommandError

DESCRIPTION = (
    "Compute the ε of T steps of DP-SGD with sampling rate q and noise multiplier σ. With "
    "--epsilon: compute the σ that is needed. Neighbours differ by adding or removing one record."
)
EPILOG = """examples:
  zetaclip account --sigma 1.1 --batch-size 256 --num-examples 60000 --epochs 8 --delta 1e-5
  zetaclip account --epsilon 3 --sample-rate 0.004 --steps 2000 --delta 1e-5 --json
  zetaclip account --epsilon 3 --sample-rate 0.004 --steps 2000 --delta 1e-5 --accountant all"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    noise = parser.add_mutually_exclusive_group(required=True)
    noise.add_argument("--sigma", type=float, metavar="S", help="noise multiplier; computes ε")
    noise.add_argument("--epsilon", type=float, metavar="E", help="target ε; computes σ")
    parser.add_argument(
        "--sample-rate", type=float, metavar="Q", help="probability q that a record is in a batch"
    )
    parser.add_argument(
        "--batch-size",
        type=float,
        metavar="L",
        help="expected batch size, with --num-examples: q = L/N",
    )
    parser.add_argument("--num-examples", type=int, metavar="N", help="number of records N")
    parser.add_argument("--steps", type=int, metavar="T", help="number of steps")
    parser.add_argument(
        "--epochs", type=float, metavar="E", help="epochs of ceil(1/q) steps, instead of --steps"
    )
    parser.add_argument(
        "--delta", type=float, metavar="D", help="δ (default: the smaller of 1e-5 and N^-1.1)"
    )
    parser.add_argument(
        "--accountant",
        choices=("pld", "prv", "rdp", "all"),
        default="pld",
        help=(
            "how ε is computed (default: pld, the tightest, as in training); all: compare them; "
            "prv is Opacus's, which takes some seconds to load"
        ),
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints ε, or σ; returns 1 if no accountant has an answer.

    Raises:
        CommandError: An option is out of range, or one is missing.
    """
    import json

    from ..accounting import ACCOUNTANTS, epsilon, noise_multiplier_for
    from ..errors import AccountingError
    from ..ledger import Event
    from ..words import counted

    rate, steps, delta = _terms(arguments)
    key = "epsilon" if arguments.sigma is not None else "sigma"
    values: dict[str, float | str] = {}
    for name in ACCOUNTANTS if arguments.accountant == "all" else (arguments.accountant,):
        try:
            if arguments.sigma is not None:
                if arguments.sigma < 0 or not math.isfinite(arguments.sigma):
                    raise CommandError(f"--sigma must be at least 0, not {arguments.sigma:g}")
                values[name] = epsilon([Event(rate, arguments.sigma, steps)], delta, name)
            else:
                values[name] = noise_multiplier_for(arguments.epsilon, delta, rate, steps, name)
        except (AccountingError, ValueError) as error:
            values[name] = str(error)
    terms: dict[str, Any] = {
        "sample_rate": rate,
        "steps": steps,
        "delta": delta,
        "adjacency": "add/remove one record",
    }
    terms |= (
        {"sigma": arguments.sigma}
        if arguments.sigma is not None
        else {"epsilon": arguments.epsilon}
    )
    if arguments.json:
        plain = {
            k: v if not isinstance(v, float) or math.isfinite(v) else None
            for k, v in values.items()
        }
        print(json.dumps({**terms, f"{key}_by": plain}, indent=2, ensure_ascii=False))
    else:
        given = (
            f"σ = {arguments.sigma:g}"
            if arguments.sigma is not None
            else f"ε = {arguments.epsilon:g}"
        )
        count = counted(steps, "step")
        print(f"{count} of q = {rate:.6g}, {given}, δ = {delta:g}, add/remove one record")
        sign = "ε" if key == "epsilon" else "σ"
        for name, value in values.items():
            print(
                f"  {name.upper()}  {sign} = {value:.4f}"
                if isinstance(value, float)
                else f"  {name.upper()}  {value}"
            )
    return int(all(isinstance(value, str) for value in values.values()))


def _terms(arguments: argparse.Namespace) -> tuple[float, int, float]:
    size, rate = arguments.num_examples, arguments.sample_rate
    if size is not None and size < 1:
        raise CommandError(f"--num-examples must be positive, not {size}")
    if rate is None:
        if arguments.batch_size is None or size is None:
            raise CommandError("give --sample-rate, or --batch-size and --num-examples")
        rate = arguments.batch_size / size
    elif arguments.batch_size is not None:
        raise CommandError("give --sample-rate or --batch-size, not both")
    if not 0 < rate <= 1:
        raise CommandError(f"the sampling rate must be in (0, 1], not {rate:g}")
    if (arguments.steps is None) == (arguments.epochs is None):
        raise CommandError("give either --steps or --epochs")
    steps = arguments.steps
    if steps is None:
        steps = math.ceil(arguments.epochs * math.ceil(1 / rate - 1e-9) - 1e-9)
    if steps < 1:
        raise CommandError(f"the number of steps must be positive, not {steps}")
    delta = arguments.delta
    if delta is None:
        delta = 1e-5 if size is None else min(1e-5, size**-1.1)
    if not 0 < delta < 1:
        raise CommandError(f"--delta must be between 0 and 1, not {delta:g}")
    return float(rate), int(steps), float(delta)
