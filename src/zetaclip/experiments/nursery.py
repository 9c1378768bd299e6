"""Trainings as forks of one process that has imported everything already.

Importing torch and Opacus takes longer than a short training. One process does it once, waits, and forks whenever it is asked: each
training is still a process of its own, with its own log, and can be killed like any other. Linux only; elsewhere, and for
stand-ins, the runner starts every training from nothing.

The talk is one line of JSON each way: {"start": words, "log": path} -> pid, {"poll": pid} -> exit code or null. Each has a number, so
that an answer which Ctrl-C kept the runner from reading is not taken for that of the next question.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CommandError

_PR_SET_PDEATHSIG = 1


def available() -> bool:
    return sys.platform == "linux"


class Nursery:
    """The runner's side. It lives as long as this process, and no training outlives it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        # On a leash, like everything that the runner starts: see ``leash.py``.
        leash = [sys.executable, "-I", str(Path(__file__).with_name("leash.py")), str(os.getpid())]
        self._process = subprocess.Popen(
            [*leash, sys.executable, "-m", __name__],
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
            f"the process that starts the trainings has died (exit code {process.wait()}); run the same command again to go on"
        )

    def start(self, words: Sequence[str], log: str) -> Fork:
        """``zetaclip WORDS...`` in a process of its own; what it says is added to the log."""
        return Fork(self, self._ask({"start": list(words), "log": log}))

    def poll(self, pid: int) -> int | None:
        code: int | None = self._ask({"poll": pid})
        return code

    def close(self) -> None:
        """Ends it. Trainings that still run are killed with it; their folders can be resumed."""
        self._process.kill()
        self._process.communicate()


class Fork:
    """One training, with as much of ``subprocess.Popen`` as the runner needs."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._nursery.poll(self.pid)
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # until it has been polled as ended nobody else can get its number
            os.kill(self.pid, number)


def _serve() -> None:
    """The nursery's own loop: ends with its input."""
    _preload()
    for line in sys.stdin:
        question = json.loads(line)
        if "poll" in question:
            answer = _reap(int(question["poll"]))
        else:
            answer = os.fork()
            if answer == 0:
                _train(question["start"], question["log"])
        print(json.dumps({"number": question["number"], "answer": answer}), flush=True)


def _preload() -> None:
    """What every training loads, with the parts that are loaded at first use."""
    import safetensors.torch  # noqa: F401
    import torch

    from ..accounting import _accounting as accounting
    from ..cli import train  # noqa: F401
    from ..ledger import Event
    from ..training import start  # noqa: F401
    from ..training.result import commit

    commit()  # kept: a fork runs the code that was loaded here, whatever is checked out by then
    accounting.epsilon([Event(0.01, 1.0, 10)], 1e-5, "prv")
    torch.optim.SGD([torch.zeros(1)])  # loads torch's compiler


def _reap(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return None if found == 0 else os.waitstatus_to_exitcode(status)


def _train(words: Sequence[str], log: str) -> None:
    """In the fork: becomes the training, and never returns."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        random.seed()  # what was imported is shared with the other forks; what is drawn must not be
        with open(os.devnull, "rb") as nothing, open(log, "ab") as said:
            os.dup2(nothing.fileno(), 0)
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        from ..cli import main

        sys.argv = ["zetaclip", *words]
        code = main(words)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
