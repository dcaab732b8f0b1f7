"""What glibc's malloc keeps of freed memory, in a process that decodes and trains in turn on a CPU.

It has a heap for each thread and keeps there what the thread frees: left alone, such a process holds the peaks of both
at once, and the holes between a step's activations grow from step to step. Elsewhere than on glibc nothing is done.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

WORTH = 48 * 2**20
"""Bytes of growth: below this the page faults of taking it again cost more than the memory is worth."""
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
"""Of malloc.h."""

try:
    _libc = ctypes.CDLL(None)
    _trim, _mallopt = _libc.malloc_trim, _libc.mallopt
    _trim.argtypes, _mallopt.argtypes = (ctypes.c_size_t,), (ctypes.c_int, ctypes.c_int)
except (OSError, AttributeError, TypeError):  # not glibc
    _trim = _mallopt = None

_before = 0


def share_one() -> None:
    """Threads that start from now on allocate from one heap, and so use what another one has freed."""
    if _mallopt is not None:
        _mallopt(M_ARENA_MAX, 1)


def map_tensors() -> None:
    """Map every block from 1 MB by itself, so that a freed tensor's memory leaves the process at once.

    Left alone glibc keeps blocks up to 32 MB on its heap, in as many places as their sizes leave gaps.
    """
    if _mallopt is not None:
        _mallopt(M_MMAP_THRESHOLD, 2**20)


def give_back() -> None:
    """Return free memory, in all threads' heaps, if the process has grown by what is WORTH it since the last time.

    Growth and not what malloc calls free: that counts pages which it has returned already.
    """
    global _before
    if _trim is not None and _resident() - _before > WORTH:
        _trim(0)
        _before = _resident()


def _resident() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
