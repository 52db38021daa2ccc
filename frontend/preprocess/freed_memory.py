"""Freed memory that a process keeps to use again.

Decoding and processing an image makes several copies of its pixels. As glibc comes, large
ones are returned to the kernel as soon as they are freed, and the next image gets pages
that the kernel has to clear first, one by one: of the processor time of a 12 megapixel
image more than a third.
"""

from __future__ import annotations

import ctypes

MIB = 1 << 20

LARGEST_KEPT = 32 * MIB
"""Bytes: larger pieces are always returned. More than this glibc does not take."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD


def keep_freed_memory(nbytes: int) -> bool:
    """Return no more memory to the kernel than what is free beyond ``nbytes``.

    That many bytes may stay with each of malloc's arenas, of which threads have their own;
    pieces of more than ``LARGEST_KEPT`` do not. Returns whether this process's malloc has
    taken it; others than glibc's have no such settings, and stay as they are.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    largest = min(nbytes, LARGEST_KEPT)
    return bool(mallopt(_MMAP_THRESHOLD, largest)) and bool(mallopt(_TRIM_THRESHOLD, nbytes))
