"""One display for all runs: a line that is redrawn on a terminal, a line per run elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from .files import read_json
from .outcome import Outcome
from .planned import PlannedRun
from .store import Store


class Progress:
    """Shows counts, the running runs, and the time left.

    Args:
        stream: Where to write; default: stderr.
        title: Put before each line.
    """

    def __init__(self, stream: TextIO | None = None, title: str = "") -> None:
        self.stream = sys.stderr if stream is None else stream
        self.title = title
        self.live = self.stream.isatty()
        self.total = 0
        self.first = 0  # finished before the start, so they don't count for the speed
        self.started = time.monotonic()
        self.shown = 0.0

    def begin(self, total: int, outcomes: Mapping[str, Outcome]) -> None:
        """Starts the clock.

        Args:
            total: The number of runs.
            outcomes: Those that are known already.
        """
        self.total, self.first, self.started = total, len(outcomes), time.monotonic()
        if outcomes:
            self.note(f"{self._counts(outcomes)}, {total - len(outcomes)} to run")

    def ended(self, run: PlannedRun, outcomes: Mapping[str, Outcome]) -> None:
        """Prints a line for a run that has ended."""
        outcome = outcomes[run.key]
        detail = f": {outcome.message}" if outcome.message else ""
        self.note(f"[{len(outcomes)}/{self.total}] {outcome.state} · {run.describe()}{detail}")

    def show(
        self, store: Store, running: Sequence[PlannedRun], outcomes: Mapping[str, Outcome]
    ) -> None:
        """Redraws the line on a terminal, at most twice a second.

        Args:
            store: Where the runs are.
            running: The running runs.
            outcomes: How the others ended.
        """
        now = time.monotonic()
        if not self.live or now - self.shown < 0.5:
            return
        self.shown = now
        shares = [(run, _share(store, run)) for run in running]
        parts = [f"{len(outcomes)}/{self.total}"]
        parts += [f"{run.labels['row']} s{run.labels['seed']} {share:.0%}" for run, share in shares]
        done = len(outcomes) - self.first + sum(share for _, share in shares)
        if done > 0.05:
            left = (self.total - self.first - done) * (now - self.started) / done
            parts.append(f"about {duration(left)} left")
        width = shutil.get_terminal_size().columns - 1
        self.stream.write("\r\x1b[K" + " · ".join(parts)[:width])
        self.stream.flush()

    def note(self, text: str) -> None:
        """Prints a line."""
        prefix = f"{self.title}: " if self.title else ""
        self.stream.write(("\r\x1b[K" if self.live else "") + prefix + text + "\n")
        self.stream.flush()

    def end(self) -> None:
        """Clears the line that is redrawn."""
        if self.live:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def _counts(self, outcomes: Mapping[str, Outcome]) -> str:
        states = [outcome.state for outcome in outcomes.values()]
        return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def duration(seconds: float) -> str:
    """Seconds as people say them: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def _share(store: Store, run: PlannedRun) -> float:
    try:
        status = read_json(store.folder(run.key) / "status.json")
        return min(1.0, float(status["step"]) / float(status["steps"]))
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return 0.0  # it has not written its first status yet
