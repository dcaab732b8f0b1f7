"""Where the GPU waits in a trace of --use-pytorch-profiler: its longest gaps, and what the CPU does in each."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

KERNELS = {"kernel", "gpu_memcpy", "gpu_memset"}


def waiting(path: Path, most: int = 12) -> list[str]:
    """Lines to print. Times in a trace are microseconds; the outermost range is the phase."""
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    phase = max((event for event in events if event.get("cat") == "user_annotation"), key=lambda event: event["dur"])
    start, end = phase["ts"], phase["ts"] + phase["dur"]
    kernels = [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in KERNELS]
    gaps = idle([(start, start), *kernels, (end, end)])
    busy = phase["dur"] - sum(length for length, _ in gaps)
    lines = [f"{path.name}: {phase['name']} {phase['dur'] / 1e3:.1f} ms, GPU busy {busy / 1e3:.1f} ms"]
    calls = [event for event in events if event.get("cat") in ("cpu_op", "cuda_runtime", "user_annotation")]
    for length, at in sorted(gaps, reverse=True)[:most]:
        within = [event for event in calls if event is not phase
                  and min(event["ts"] + event["dur"], at + length) - max(event["ts"], at) > length / 2]
        names = [event["name"][:60] for event in sorted(within, key=lambda event: -event["dur"])][:4]
        lines.append(f"  {length / 1e3:8.2f} ms without a kernel at {(at - start) / 1e3:9.1f} ms: "
                     f"{' > '.join(names) or 'Python, between calls of torch'}")
    return lines


def idle(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """(length, begin) of what no span covers, from the first one's begin to the last one's end."""
    gaps: list[tuple[float, float]] = []
    (_, last), *others = sorted(spans)
    for begin, until in others:
        gaps += [(begin - last, last)] if begin > last else []
        last = max(last, until)
    return gaps
