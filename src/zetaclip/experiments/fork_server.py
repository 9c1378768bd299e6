"""Trainings as forks of one process that has imported everything already.

Importing torch and Opacus takes longer than a short training. One process imports them once, waits,
and forks whenever it is asked. Each training is still a process of its own, with its own log, and
can be killed like any other. This is for Linux: elsewhere, and for stand-ins, the runner starts
every training from nothing.

This is the runner's side; ``cli/warm.py`` is the process that forks. The standard library's
forkserver does not serve: a process has one of them, with one environment, and no public way to
stop it. Here every runner has its own, with the number of threads that torch reads when it is
loaded.

Questions and answers are one line of JSON each: {"start": words, "log": path} -> pid, and {"poll":
pid} -> exit code or null. Each has a number: if Ctrl-C keeps the runner from reading an answer, it
is not taken for the next one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CommandError
from .die_with_parent import bound

# Not imported: a command may import experiments, and not the other way round.
_SERVER = "zetaclip.cli.warm"


def available() -> bool:
    """Whether this system can do it."""
    return sys.platform == "linux"


class ForkServer:
    """The runner's side. It lives as long as this process, and no training outlives it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            bound([sys.executable, "-m", _SERVER]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C reaches the runner alone
            text=True,
        )
        self._asked = 0

    def _ask(self, question: dict[str, Any]) -> Any:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        self._asked += 1
        try:
            process.stdin.write(json.dumps({"number": self._asked, **question}) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                answer = json.loads(line)
                if answer["number"] == self._asked:
                    return answer["answer"]
        except BrokenPipeError:
            pass
        raise CommandError(
            f"the process that starts the trainings has died (exit code {process.wait()}); run "
            "the same command again to go on"
        )

    def start(self, words: Sequence[str], log: str) -> Fork:
        """``zetaclip WORDS...`` in a process of its own; what it says is added to the log."""
        return Fork(self, self._ask({"start": list(words), "log": log}))

    def poll(self, pid: int) -> int | None:
        """The exit code of a fork; None while it runs."""
        code: int | None = self._ask({"poll": pid})
        return code

    def close(self) -> None:
        """Ends it. Trainings that still run are killed with it; their folders can be resumed."""
        self._process.kill()
        self._process.communicate()


class Fork:
    """One training, with as much of ``subprocess.Popen`` as the runner needs."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self._code is None:
            self._code = self._server.poll(self.pid)
        return self._code

    def send_signal(self, number: int) -> None:
        """Sends a signal, if it still runs."""
        if self.poll() is None:  # until it has been polled as ended nobody else can get its number
            os.kill(self.pid, number)
