"""Memory that a training frees is kept for the next step.

glibc gives large freed blocks back to the system at once. The activations of every step are such
blocks: each step then asks for the same pages again, and the system clears them first
(``bench/allocation.py`` says what that costs). A command owns its process and can turn this off; a
library does not, so nothing here happens on import.
"""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
# Blocks up to here are kept. glibc may hold up to seven of a size beyond those in use (it sets the
# odd ends of aligned blocks aside, and such a block fits no second time until it has seven of
# them), so there has to be an end.
_LARGEST_KEPT = 128 * 2**20
_LARGEST_OF_OLD = 32 * 2**20  # glibc before 2.35 takes no more
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory in this process; whether it was told.

    Blocks of up to 128 MiB, that is; larger ones come from the system as before. Results don't
    change, and the peak of resident memory hardly does (``bench/allocation.py``). Does nothing
    where there is no glibc, or where the user has settings of their own in the environment.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _OWN_SETTINGS):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):  # musl: mallopt is missing, or without effect
        return False
    sizes = (_LARGEST_KEPT, _LARGEST_OF_OLD)
    return any(libc.mallopt(_M_MMAP_THRESHOLD, size) for size in sizes) and bool(
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    )
