"""The clipping of a run: none, a number, or the controller that the settings describe."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .config import Config

if TYPE_CHECKING:
    from ..methods import Method


def build_clipping(config: Config, method: Method) -> Any:
    """The argument ``clipping`` of ``make_private``: None, a number, or a controller.

    Raises:
        ConfigError: The settings of clipping are wrong.
    """
    kind = config.clipping
    spectral = kind == "spectral" or (kind is None and method.name == "ww-dp-sgd")
    if config.spectral and not spectral:
        raise ConfigError(
            f"settings of the spectral controller were given, but method {method.name!r} does not"
            " use it"
        )
    try:
        if spectral:
            return build_spectral(config)
        if isinstance(kind, dict):
            return _from_run(kind)
        return kind
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error


def build_spectral(config: Config) -> Any:
    """The spectral controller with its options."""
    from .. import Spectral

    options = dict(config.spectral)
    literal = options.pop("paper", config.recipe == "paper")
    if isinstance(options.get("bounds"), list):
        options["bounds"] = tuple(options["bounds"])
    if options.get("bounds") in ("none", ()):
        options["bounds"] = None
    if config.clip is not None:
        options.setdefault("initial", config.clip)
    aggregate = options.pop("aggregate", None)
    if aggregate is not None:
        from ..spectrum import Probe

        options["probe"] = Probe(options.pop("probe", None), aggregate)
    return Spectral.paper(**options) if literal else Spectral(**options)


def _from_run(table: dict[str, Any]) -> Any:
    """C from another run's probes: ``{kind = "replay", run = FOLDER}``.

    Kinds: "replay", its C step by step; "mean-of", a constant; "schedule", a straight line in log C
    from its first to its last C; "decay", one that falls to a quarter. All have its mean.
    """
    from .. import Replay

    kinds = ("replay", "schedule", "mean-of", "decay")
    if table.get("kind") not in kinds or "run" not in table or len(table) != 2:
        raise ConfigError(
            f"a clipping table has a kind ({', '.join(kinds)}) and a run (a folder), not {table}"
        )
    folder = Path(table["run"])
    try:
        lines = [json.loads(line) for line in (folder / "probes.jsonl").read_text().splitlines()]
        result = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is not a finished run with probes: {error}") from None
    if not lines:
        raise ConfigError(f"{folder} has no probes to take C from")
    changes = [
        (0, float(lines[0]["clip_before"])),
        *((int(line["step"]), float(line["clip"])) for line in lines),
    ]
    if table["kind"] == "replay":
        return Replay(changes)
    steps = int(result["steps"])
    mean = mean_clip(changes, steps)
    if table["kind"] == "mean-of":
        return mean
    first, last = math.log(changes[0][1]), math.log(changes[-1][1])
    if table["kind"] == "decay":
        first, last = 0.0, math.log(0.25)
    line = [math.exp(first + (last - first) * step / max(1, steps - 1)) for step in range(steps)]
    # A straight line in log C, scaled so that its mean is the run's.
    factor = mean / (sum(line) / steps)
    return Replay([factor * clip for clip in line])


def mean_clip(changes: list[tuple[int, float]], steps: int) -> float:
    """The mean of C over the updates 0 .. steps - 1, where C changes at the given updates."""
    ends = [start for start, _ in changes[1:]] + [steps]
    total = sum(
        clip * max(0, min(end, steps) - start)
        for (start, clip), end in zip(changes, ends, strict=True)
    )
    return total / steps
