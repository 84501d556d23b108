"""The C library's memory allocator, told to keep what is freed.

On a CPU every intermediate tensor is memory of the C library. glibc by default asks the system for each large block
and gives it back at once, and the system clears each page anew: for tensors of tens of megabytes that takes longer
than the arithmetic on them. Kept blocks are used again as they are.
"""

from __future__ import annotations

import ctypes
from functools import cache

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Parameters of ``mallopt`` (``malloc.h``)."""
_NEVER_TRIM = 2**31 - 1
_GROWTH = 64 * 2**20
"""Bytes by which the heap grows at least."""


@cache
def keep_freed_memory() -> bool:
    """Keep freed blocks for the next tensor instead of giving them back to the system, for the whole process.

    The process then holds its peak of memory until it ends.

    Returns:
        Whether the C library understood; musl and macOS have no such setting, and nothing changes there.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER_TRIM), (_TOP_PAD, _GROWTH))
    understood = [mallopt(parameter, value) == 1 for parameter, value in settings]
    return all(understood)
