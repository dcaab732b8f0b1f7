"""Freed memory goes back to the system between decoding and training.

glibc keeps what a thread frees for that thread: without this, a process that decodes and trains in turn holds the peak
of both at once, and the holes between a step's activations grow from step to step.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

WORTH = 48 * 2**20
"""Bytes of growth: below this the page faults of taking it again cost more than the memory is worth."""

try:
    _trim = ctypes.CDLL(None).malloc_trim
    _trim.argtypes = (ctypes.c_size_t,)
except (OSError, AttributeError, TypeError):  # not glibc
    _trim = None

_before = 0


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
