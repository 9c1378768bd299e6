"""Ctrl-C and SIGTERM: noted when they arrive, acted on after the current step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(Exception):
    """The run was asked to stop, has saved, and can be resumed.

    Args:
        number: The signal's number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.left = ""  # which weights the run has left, and what they cost


class Signals:
    """Notes signals. ``asked`` is the number of the first one, 0 before."""

    def __init__(self) -> None:
        self.asked = 0

    @contextmanager
    def noted(self, patient: bool = False) -> Iterator[None]:
        """Notes signals inside the block.

        A second signal ends the process at once, unless ``patient``: a launcher sends each rank a
        signal that the terminal has already sent.
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
                except ValueError:  # only the main thread may set handlers
                    break
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
