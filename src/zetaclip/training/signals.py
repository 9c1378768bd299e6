"""Ctrl-C and a polite kill: noted, and obeyed after the step that is under way."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(Exception):
    """The run was asked to stop, has saved, and can be resumed."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Signals:
    """``asked`` is the number of the first signal that came in, 0 before."""

    def __init__(self) -> None:
        self.asked = 0

    @contextmanager
    def noted(self, patient: bool = False) -> Iterator[None]:
        """A second signal ends at once, unless ``patient``: a launcher passes on what the terminal
        has sent to all already.
        """

        def note(number: int, frame: Any) -> None:
            if self.asked and not patient:
                raise KeyboardInterrupt
            self.asked = self.asked or number

        old: dict[int, Any] = {}
        try:
            for name in (signal.SIGINT, signal.SIGTERM):
                try:
                    old[int(name)] = signal.signal(name, note)
                except ValueError:  # not in the main thread: then nobody sends us signals either
                    break
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
