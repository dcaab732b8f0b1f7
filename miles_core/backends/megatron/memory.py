"""Freed memory goes back to the system between decoding and training.

glibc keeps what a thread frees for that thread: without this, a process that decodes and trains in turn holds the peak
of both at once, and the holes between a step's activations grow from step to step.
"""

from __future__ import annotations

import ctypes

WORTH = 64 * 2**20
"""Bytes: below this the page faults of taking it again cost more than the memory is worth."""


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


try:
    _libc = ctypes.CDLL(None)
    _libc.mallinfo2.restype = _MallInfo
    _libc.malloc_trim.argtypes = (ctypes.c_size_t,)
except (OSError, AttributeError, TypeError):  # not glibc, or one before 2.33
    _libc = None


def give_back() -> None:
    """Return free memory, in all threads' heaps, if it is WORTH it."""
    if _libc is not None and _libc.mallinfo2().fordblks > WORTH:
        _libc.malloc_trim(0)
