"""Keeps freed memory in the process for the next step.

glibc returns large freed blocks to the system at once. The activations of every step are such
blocks, so each step asks for the same pages again and the system clears them first
(``bench/allocation.py`` measures the cost). A command may change this for its own process. A
library may not, so nothing happens on import.
"""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
# Blocks up to this size are kept. The limit is needed: glibc may keep up to seven unused blocks of
# each size, because it cuts the ends off aligned blocks, which then don't fit a second time.
_LARGEST_KEPT = 128 * 2**20
_LARGEST_OF_OLD = 32 * 2**20  # glibc before 2.35 accepts no more
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed blocks of up to 128 MiB in this process.

    Results don't change, and the peak of resident memory hardly does (``bench/allocation.py``).
    Does nothing without glibc, or if the environment has settings for it.

    Returns:
        Whether glibc accepted the setting.
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
