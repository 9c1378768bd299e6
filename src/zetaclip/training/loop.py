"""The loop of a run: trains, evaluates, writes as it goes, and can be interrupted anywhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ..errors import AccountingError, ConfigError
from . import card, description, weights
from .config import Config
from .evaluate import outputs_of
from .folder import FolderError, RunFolder, Status, finite
from .probes import clip_lines_every, describe_probe
from .progress import Display
from .result import compose
from .signals import Interrupted, Signals
from .steps import SAVE, PrivateSteps, Steps
from .weights import save_weights

if TYPE_CHECKING:
    from ..data import Dataset

# The least seconds between two checkpoints, and the largest share of the time to write them.
_SAVE_SECONDS = 5.0
_SAVE_SHARE = 0.05
# Computing ε takes a fraction of a second, which would be more than a very short epoch.
_ACCOUNTING_SHARE = 0.1


class Training:
    """The loop with its own counters and timers.

    Args:
        config: The settings, all of them chosen.
        dataset: The data.
        steps: What takes the updates.
        folder: The run folder.
        status: Writes status.json.
        display: Prints progress.
        series: Called with each line of the logs, or None.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        steps: Steps,
        folder: RunFolder,
        status: Status,
        display: Display,
        series: Callable[[str, dict[str, Any]], None] | None,
    ) -> None:
        self.config, self.dataset, self.steps, self.folder = config, dataset, steps, folder
        self.status, self.display, self.series = status, display, series
        self.seconds = dict.fromkeys(
            ("setup", "train", "eval", "probe", "accounting", "saving"), 0.0
        )
        self.resumed = 0
        self.last: dict[str, Any] = {}
        self.zeta: float | None = None
        self.epsilon: float | None = None
        self._saved_at = -math.inf
        self._save_cost = 0.0
        self._clock = (0.0, 0.0)  # start of the timed steps, and the probes' seconds at the start
        self._signals = Signals()
        steps.wish = self._wish
        if isinstance(steps, PrivateSteps):
            steps.engine.observe(self._observe)

    # -- the controller's readings

    def _observe(self, reading: Any, before: Any, after: Any) -> None:
        if hasattr(reading, "spectra"):
            assert isinstance(self.steps, PrivateSteps)
            line = describe_probe(reading, before, after, self.steps.engine.controller)
            self.zeta = after.zeta_hat
            self.folder.append("probes.jsonl", [line])
            if self.series is not None:
                self.series("probe", line)
        elif before.clip != after.clip:
            step = self.steps.done + 1
            if step % clip_lines_every(self.steps.total) == 0:
                line = {"step": step, "clip": after.clip}
                self.folder.append("clips.jsonl", [line])
                if self.series is not None:
                    self.series("clip", line)

    # -- saving

    def save(self) -> None:
        """Writes a checkpoint.

        Raises:
            FolderError: It can't be written; the last one is kept.
        """
        begun = time.perf_counter()
        trainer = {
            "seconds": dict(self.seconds),
            "resumed": self.resumed,
            "zeta": self.zeta,
            "epsilon": self.epsilon,
        }
        try:
            self.steps.save(self.folder, trainer)
        except OSError as error:
            if not self.folder.executed:  # nothing to resume yet
                raise
            raise FolderError(
                f"the checkpoint of step {self.steps.done} can't be written ({error.strerror}); the"
                " last good one is kept. Free some space and continue with:"
                f" {self.folder.resume_command}"
            ) from error
        self.folder.saved = True
        self._saved_at = time.perf_counter()
        self._save_cost = self._saved_at - begun
        self.seconds["saving"] += self._save_cost

    def _save_due(self) -> bool:
        return time.perf_counter() - self._saved_at > max(
            _SAVE_SECONDS, self._save_cost / _SAVE_SHARE
        )

    def _wish(self) -> int:
        return self._signals.asked + SAVE * self._save_due()

    def restore(self, rekey: bool) -> None:
        """Continues from the checkpoint; with ``rekey``, with new random streams.

        Raises:
            FolderError: The checkpoint can't be used; the message says what to do.
        """
        try:
            trainer = self.steps.load(self.folder, rekey)
        except Exception as error:
            private = isinstance(self.steps, PrivateSteps)
            if private and not isinstance(error, ValueError):  # CheckpointError, LedgerError
                raise
            raise FolderError(
                f"{self.folder.path} can't be resumed: {_in_flags(error, private)}"
            ) from error
        self.seconds.update(trainer["seconds"])
        self.resumed = trainer["resumed"] + 1
        for name in (
            weights.NAME,
            card.NAME,
            "ledger.jsonl",
        ):  # of the moment when the run was stopped
            (self.folder / name).unlink(missing_ok=True)
        self.zeta, self.epsilon = trainer["zeta"], trainer["epsilon"]
        self.folder.cut_back(self.steps.done)
        lines = self.folder.read_lines("metrics.jsonl")
        self.last = lines[-1] if lines else {}
        self.display.say(f"resuming after {self.steps.done} of {self.steps.total} updates")

    # -- the loop

    def train(self) -> dict[str, Any]:
        """Trains to the end and writes the result.

        Returns:
            The content of result.json.

        Raises:
            ConfigError: ``max_epsilon`` does not allow a single step.
            Interrupted: The run was asked to stop and has saved.
        """
        steps = self.steps
        stop = steps.affordable()
        if stop == 0:
            raise ConfigError(
                f"max_epsilon = {self.config.max_epsilon:g} does not allow a single step with this"
                " noise; raise max_epsilon or sigma"
            )
        self.save()
        together = isinstance(steps, PrivateSteps) and steps.engine.ranks is not None
        with (
            self._signals.noted(patient=together),
            self.display.bar(steps.done, steps.total) as bar,
        ):
            if self._cut_before_its_line(stop):
                self._end_of_epoch(stop)
            while steps.done < stop:
                self._start_clock()
                for done in steps.updates(stop):
                    bar.step(done, self._postfix)
                    agreed = steps.agreed()
                    if self.status.due():
                        self.status.write(**self.standing())
                    if agreed:
                        self._book()
                        self.save()
                        self._start_clock()
                    if agreed % SAVE:
                        raise Interrupted(agreed % SAVE)
                self._book()
                self._end_of_epoch(stop)
            self.save()
        return self._finish(stop)

    def _cut_before_its_line(self, stop: int) -> bool:
        """Whether the run stopped after the last update of an epoch, before its line of metrics."""
        done = self.steps.done
        at_end = done > 0 and (done % self.steps.per_epoch == 0 or done >= stop)
        return at_end and self.last.get("step") != done

    def _start_clock(self) -> None:
        self._clock = (time.perf_counter(), self.steps.probe_seconds)

    def _book(self) -> None:
        """Adds the time since the clock was started to training and probing."""
        begun, probed = self._clock
        probe = self.steps.probe_seconds - probed
        self.seconds["probe"] += probe
        self.seconds["train"] += time.perf_counter() - begun - probe

    def _end_of_epoch(self, stop: int) -> None:
        steps, config = self.steps, self.config
        epoch, over = divmod(steps.done, steps.per_epoch)
        epoch += bool(over)
        final = steps.done >= stop
        line: dict[str, Any] = {
            "epoch": epoch,
            "step": steps.done,
            "epsilon": self._epsilon_so_far(final),
            "metric": None,
        }
        due = final or epoch % (config.eval_every or 1) == 0
        if not due and (config.method == "auto" or config.features != "none"):
            return  # such epochs are short, often one update
        if due and not config.no_eval and self.dataset.test is not None:
            line |= self._evaluate()
        clip = {} if steps.clip is None else {"clip": steps.clip}
        line |= {
            **clip,
            "zeta": self.zeta,
            "lr": steps.last_rate,
            "seconds": {k: round(v, 4) for k, v in self.seconds.items()},
        }
        self.last = line
        self.folder.append("metrics.jsonl", [line])
        if steps.diagnostics is not None:
            self.folder.append(
                "diagnostics.jsonl", [{"step": steps.done, **steps.diagnostics.flush()}]
            )
        if self.series is not None:
            self.series("metrics", line)
        self.status.write(**self.standing())
        self.display.epoch(line, steps.task.metric, math.ceil(stop / steps.per_epoch))

    def _evaluate(self) -> dict[str, Any]:
        begun = time.perf_counter()
        assert self.dataset.test is not None
        with nullcontext() if self.steps.average is None else self.steps.average.applied():
            outputs = outputs_of(self.steps.model, self.dataset.test, self.steps.device)
        found = self.steps.task.measure(outputs, self.dataset.test.y)
        self.seconds["eval"] += time.perf_counter() - begun
        return {"metric": found[self.steps.task.metric], **found}

    def _epsilon_so_far(self, final: bool) -> float | None:
        """ε of what was released; None if an epoch is so short that computing ε would dominate."""
        spent = self.seconds["accounting"]
        if not final and spent > _ACCOUNTING_SHARE * self.seconds["train"]:
            return None
        begun = time.perf_counter()
        try:
            self.epsilon = self.steps.epsilon()
        except AccountingError:  # the training is not lost; the result lists every accountant
            self.epsilon = None
        if self.epsilon is not None and (spent or final):  # the first time is mostly imports
            self.seconds["accounting"] += time.perf_counter() - begun
        return self.epsilon

    def _finish(self, stop: int) -> dict[str, Any]:
        steps = self.steps
        with nullcontext() if steps.average is None else steps.average.applied():
            self._save_weights()
            reliability, details = None, None
            if not self.config.no_eval and self.dataset.test is not None:
                outputs = outputs_of(steps.model, self.dataset.test, steps.device)
                reliability = steps.task.reliability(outputs, self.dataset.test.y)
                classes = () if description.hides(self.dataset) else self.dataset.classes
                details = steps.task.details(outputs, self.dataset.test.y, classes)
        if isinstance(steps, PrivateSteps):
            steps.engine.detach()
            steps.engine.ledger.to_jsonl(self.folder / "ledger.jsonl")
        result = compose(
            self.config,
            self.dataset,
            steps,
            self.folder,
            self.last,
            self.seconds,
            reliability,
            details,
            self.resumed,
            stop,
        )
        self.folder.write_json("result.json", result)
        self._write_card(result)
        return result

    def _save_weights(self) -> None:
        facts: dict[str, Any] = {"steps": self.steps.done, "planned_steps": self.steps.total}
        if self.epsilon is not None:
            facts |= {"epsilon": self.epsilon, "delta": self.config.delta}
        save_weights(self.steps.model, self.folder / weights.NAME, facts)

    def _write_card(self, result: dict[str, Any]) -> None:
        public = description.public(self.config, self.dataset)
        self.folder.write_text(card.NAME, card.compose_card(public, finite(result)))

    def leave(self) -> str:
        """Writes weights, ledger and card of a run that was stopped.

        Returns:
            What was left and what it has cost, in words; empty if there was no update.
        """
        steps = self.steps
        if not steps.done:
            return ""
        try:
            self.epsilon = steps.epsilon()
        except AccountingError:  # the card lists what the other accountants say
            self.epsilon = None
        with nullcontext() if steps.average is None else steps.average.applied():
            self._save_weights()
        if isinstance(steps, PrivateSteps):
            steps.engine.ledger.to_jsonl(self.folder / "ledger.jsonl")
        standing = compose(
            self.config,
            self.dataset,
            steps,
            self.folder,
            {},
            self.seconds,
            None,
            None,
            self.resumed,
            steps.total,
        )
        self._write_card({**standing, "finished": None})
        cost = (
            f"at ε = {self.epsilon:.3g}, δ = {self.config.delta:.3g}"
            if self.epsilon is not None
            else "and no ε is claimed for them"
        )
        return f"{weights.NAME} has the weights after {steps.done} of {steps.total} updates, {cost}"

    # -- progress

    def standing(self) -> dict[str, Any]:
        """How far the run is, for status.json."""
        steps = self.steps
        return {
            "step": steps.done,
            "steps": steps.total,
            "epoch": steps.done // steps.per_epoch,
            "epochs": steps.total / steps.per_epoch,
            "epsilon": self.epsilon,
            "clip": steps.clip,
        }

    def _postfix(self) -> dict[str, Any]:
        metric = self.last.get("metric")
        found: dict[str, Any] = {}
        if metric is not None:
            found[self.steps.task.metric] = f"{metric:.4g}"
        if self.epsilon is not None:
            found["ε"] = f"{self.epsilon:.3g}"
        if self.steps.clip is not None:
            found["C"] = f"{self.steps.clip:.3g}"
        if self.zeta is not None:
            found["ζ̂"] = f"{self.zeta:.3g}"
        return found


_REKEY = "`--resume --rekey` continues with new random streams; executed steps still count"


def _in_flags(error: Exception, private: bool) -> str:
    """Why a checkpoint can't be loaded, and what to do about it at the command line."""
    from ..engine._checkpoint import CheckpointError, Remedy

    reason, remedy = str(error), Remedy.OTHER_RUN
    if isinstance(error, CheckpointError):
        reason, remedy = error.reason, error.remedy
    elif not private:
        # The checkpoint without privacy has no checks of its own, and torch fails in many ways.
        reason = f"run.pt can't be read as a checkpoint ({type(error).__name__})"
        remedy = Remedy.NOTHING
    if remedy is Remedy.FRESH_STREAMS:
        return f"{reason}. {_REKEY}"
    weights = "are lost" if remedy is Remedy.NOTHING else "can't be used here"
    counted = (
        " Executed steps are released and still count; the journal in checkpoint/ lists them. "
        if private
        else " "
    )
    return (
        f"{reason}. Its weights {weights}, and --rekey does not help.{counted}Start a new run in"
        " another folder"
    )
