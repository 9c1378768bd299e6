"""Starts trainings as forks of one process that has already loaded all that they need.

It is the server of ``experiments/fork_server.py``, which describes its messages: ``python -m
zetaclip.cli.warm`` reads questions from its input and answers on its output.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def _serve() -> None:
    """Answers questions until its input ends."""
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
    from ..ledger import Event
    from ..training import start  # noqa: F401
    from ..training.provenance import commit
    from . import train  # noqa: F401

    commit()  # kept: a fork runs the code that was loaded here, whatever is checked out by then
    for accountant in accounting.ACCOUNTANTS:
        accounting.epsilon([Event(0.01, 1.0, 10)], 1e-5, accountant)
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
        from . import main

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
