"""CPU seconds and memory of the current process, and a clean JSON-lines channel on standard output."""

from __future__ import annotations

import json
import os
import re
import resource
import sys
from pathlib import Path


def cpu_seconds() -> float:
    """User and system CPU seconds of this process (all threads) and of its finished children, since it started."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def peak_rss_mib() -> float:
    """Peak resident memory so far.

    Linux keeps a high-water mark per address space, which starts afresh at exec; `ru_maxrss` instead inherits the
    mark of the process that forked this one, so it is only the fallback.
    """
    try:
        match = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        match = None
    kib = int(match.group(1)) if match else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(kib / 1024, 1)


class JsonLines:
    """Writes one JSON object per line to the original standard output; everything else printed goes to stderr."""

    def __init__(self) -> None:
        self._stream = os.fdopen(os.dup(1), "w", buffering=1)
        sys.stdout.flush()
        os.dup2(2, 1)

    def write(self, record: dict) -> None:
        """Emit one record and flush it."""
        self._stream.write(json.dumps(record) + "\n")
