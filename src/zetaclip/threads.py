"""Compiled work in the threads that torch keeps for its own.

Torch's threads wait busily for a while after each operation. Other threads beside them would have
to share the cores with that waiting, which costs most of what a second core gains. So the compiled
parts share their work among torch's own threads (``_team.h``), through the function of its OpenMP
library that starts them. Where torch has no such library, one thread does the work.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

ALONE = (0, 1)
"""For work that is too little to be shared."""
_owner: int | None = None  # the process that has started torch's threads


def team() -> tuple[int, int]:
    """What a compiled part needs to share its work: the address of a function, and a number.

    To start the threads takes a few microseconds, or fifty if they sleep: little work is better
    done at once, by ``ALONE``.
    """
    global _owner
    threads, start = torch.get_num_threads(), _openmp()
    if threads == 1 or not start:
        return ALONE
    _owner = _owner or os.getpid()
    # A fork has none of its parent's threads, and the library does not know.
    return (start, threads) if _owner == os.getpid() else ALONE


@functools.cache
def _openmp() -> int:
    """Where the function of torch's OpenMP library is that runs another in all its threads, or 0.

    LLVM's library has it under this name, too.
    """
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0
