"""Compiled work in the threads that torch keeps for its own.

Torch's threads wait busily for a while after each operation. Other threads beside them would have
to share the cores with that waiting, which costs most of what a second core gains. So the work goes
to torch's own threads, through the function of its OpenMP library that starts them. Where torch has
no such library, a pool of threads takes the work.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Start = ctypes.CFUNCTYPE(None, _Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_owner: int | None = None  # the process that has started torch's threads


def deal(count: int, step: int, call: Callable[[int, int], None]) -> None:
    """Calls ``call(first, stop)`` for all of range(count), in as many threads as torch uses.

    To start them takes about as long as a million multiply-adds: less work is better done at once.

    Args:
        count: Number of items.
        step: Every share but the last is a multiple of this.
        call: Must give the same result whatever the shares are, and release the GIL.

    Raises:
        BaseException: What a call has raised, after all of them have ended.
    """
    threads = torch.get_num_threads()
    share = -(-count // (threads * step)) * step
    if share >= count:
        call(0, count)
        return
    shares = iter(range(0, count, share))
    errors: list[BaseException] = []

    def body(_: object = None) -> None:
        for first in shares:
            try:
                call(first, min(first + share, count))
            except BaseException as error:  # it can't pass through the library
                errors.append(error)

    _run(body, threads)
    if errors:
        raise errors[0]


def _run(body: Callable[[], None], threads: int) -> None:
    """Runs the same function in several threads, of which the caller is one."""
    global _owner
    _owner = _owner or os.getpid()
    start = _openmp()
    if start is None:
        pool = _pool(os.getpid(), threads)
        others = [pool.submit(body) for _ in range(1, threads)]
        body()
        for other in others:
            other.result()
    elif _owner == os.getpid():
        start(_Body(body), None, threads, 0)
    else:
        body()  # a fork has none of its parent's threads, and the library does not know


@functools.cache
def _openmp() -> Callable[..., None] | None:
    """The function of torch's OpenMP library that runs another in all its threads, or None."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
            return _Start(("GOMP_parallel", library))
        except (OSError, AttributeError):
            continue
    return None


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads beside the one that calls; a fork has none of those of its parent."""
    return ThreadPoolExecutor(threads - 1, f"zetaclip threads of {process}")
