"""Starts a command that ends when the process that started it ends, however that one dies.

Without it a training whose runner was killed would go on alone and meet its own successor in the
same run folder. Only Linux can do this; elsewhere the command is started as it is.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def bound(command: Sequence[str]) -> list[str]:
    """The command line that runs a command until this process ends.

    This file is run by its path and isolated, so that it does not import the package, and torch.
    """
    return [sys.executable, "-I", __file__, str(os.getpid()), *command]


def main(argv: list[str]) -> None:
    """Runs ``argv[2:]``, which ends when the process ``argv[1]`` ends."""
    parent, command = int(argv[1]), argv[2:]
    if sys.platform == "linux":
        if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            sys.exit("die_with_parent: prctl failed")
        if os.getppid() != parent:  # it died before the call above
            sys.exit("die_with_parent: the runner has gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv)
