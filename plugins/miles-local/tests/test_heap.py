"""Memory that one thread frees is used by the next."""

import subprocess
import sys

import pytest
from miles_local import heap

pytestmark = pytest.mark.skipif(heap._mallopt is None, reason="another C library than glibc")

IN_TURN = """
import ctypes, sys, threading
from miles_local import heap
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
if sys.argv[1] == "shared":
    heap.share_one()
before, end = heap._resident(), threading.Event()

def turn(done):
    blocks = [ctypes.memset(libc.malloc(65536), 1, 65536) for _ in range(512)]
    libc.malloc(65536)  # stays, so that nothing below it can be cut off
    for block in blocks:
        libc.free(block)
    done.set()
    end.wait(60)

for _ in range(4):
    done = threading.Event()
    threading.Thread(target=turn, args=(done,), daemon=True).start()
    done.wait(60)
print((heap._resident() - before) // 2**20)
end.set()
"""


def grown(how: str) -> int:
    """MiB by which a process grows in which four threads, one after the other, take 32 MiB and give them back."""
    return int(subprocess.run([sys.executable, "-c", IN_TURN, how], capture_output=True, text=True, check=True,
                              timeout=60).stdout)


def test_threads_that_take_turns_need_the_memory_of_one():
    assert grown("shared") < 48
    assert grown("apart") > 96, "glibc shares by itself: heap.share_one does nothing any more"
