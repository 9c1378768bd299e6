"""``train`` on several ranks.

Rank 0 does what a single process does. The others take the same updates and write nothing.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from ..errors import RankError
from .config import Config
from .fixed import applied, frozen
from .folder import RunFolder
from .recipe import build_method, build_model
from .records import load_data
from .signals import Interrupted, Signals
from .steps import SAVE, PrivateSteps

if TYPE_CHECKING:
    from ..engine._group import Ranks

_WHAT = "the start of the run"


class Leader:
    """Tells the other ranks once what to train, or that there is nothing to do.

    Args:
        ranks: The process group; None for a single process, which tells nobody.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self.ranks = ranks
        self._sent = False

    def start(self, config: Config, out: Any, going_on: bool, rekey: bool) -> None:
        """Tells the others to train.

        Args:
            config: The settings, all of them chosen.
            out: The run folder.
            going_on: Whether a checkpoint is loaded.
            rekey: Whether it is loaded with new random streams.
        """
        self._say({"config": asdict(config), "out": str(out), "going_on": going_on, "rekey": rekey})

    def finished(self, result: dict[str, Any]) -> None:
        """Tells the others that the run was finished before."""
        self._say({"result": result})

    def stop(self, error: BaseException) -> None:
        """Tells the others about an error before they have started; later they notice it."""
        with suppress(RankError):
            self._say({"error": str(error)})

    def _say(self, word: dict[str, Any]) -> None:
        if self.ranks is not None and not self._sent:
            self._sent = True
            self.ranks.send(word, _WHAT)


def follow(ranks: Ranks) -> dict[str, Any]:
    """Trains as rank 0 says.

    Returns:
        The result if the run was finished before, else an empty dict.

    Raises:
        RankError: Rank 0 has failed.
    """
    word = ranks.send(None, _WHAT)
    if "error" in word:
        raise RankError(f"rank 0: {word['error']}", told=True)
    if "result" in word:
        return word["result"]
    config, folder = Config.from_mapping(word["config"]), RunFolder(word["out"])
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads or before)
    try:
        _follow(config, folder, word["going_on"], word["rekey"])
    finally:
        torch.set_num_threads(before)
    return {}


def _follow(config: Config, folder: RunFolder, going_on: bool, rekey: bool) -> None:
    dataset = load_data(config)
    method = build_method(config)
    fixed = frozen(config, dataset)
    model = build_model(config, dataset, fixed)
    if fixed is not None:
        dataset = applied(fixed, dataset)
    steps = PrivateSteps(config, dataset, method, model)
    signals = Signals()
    steps.wish = lambda: signals.asked
    if going_on:
        steps.load(folder, rekey)
    stop = steps.affordable()
    if stop == 0:
        raise RankError("rank 0: max_epsilon does not allow a single step", told=True)
    steps.save(folder, {})
    with signals.noted(patient=True):
        while steps.done < stop:
            for _ in steps.updates(stop):
                agreed = steps.agreed()
                if agreed:
                    steps.save(folder, {})
                if agreed % SAVE:
                    raise Interrupted(agreed % SAVE)
        steps.save(folder, {})
    steps.engine.detach()
