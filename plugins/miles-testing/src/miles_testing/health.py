"""Import each installed plugin in a process of its own: does it load, what does it cost, what does it drag in?"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from miles_core.plugins.scan import Installed

SECONDS = 120.0
"""How long one plugin may take."""

_PROBE = """
import json, resource, sys, time
from miles_core.plugins.load import load
from miles_core.plugins.scan import installed
from miles_core.plugins.select import manifest_of
one = next(one for one in installed() if (one.distribution, one.name) == tuple(sys.argv[1:3]))
before, begin = set(sys.modules), time.process_time()
load(manifest_of(one))
torch = sys.modules.get("torch")
print(json.dumps({
    "seconds": time.process_time() - begin, "modules": len(set(sys.modules) - before),
    "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    "heavy": sorted({"torch", "numpy", "megatron", "transformers", "ray", "sglang"} & set(sys.modules)),
    "cuda": bool(torch and torch.cuda.is_initialized())}))
"""


@dataclass(frozen=True, slots=True)
class Health:
    """What importing a plugin did.

    Args:
        seconds: of the CPU. mib: the process's largest resident set.
        heavy: large packages that came along; a plugin's module should import them when it needs them.
        cuda: whether a CUDA context was made.
        error: why it cannot be loaded; None where it can.
    """

    plugin: Installed
    seconds: float = 0.0
    mib: float = 0.0
    heavy: tuple[str, ...] = ()
    cuda: bool = False
    error: str | None = None


def examine(plugins: Iterable[Installed], workers: int = 2) -> Iterator[Health]:
    """Each plugin's health, in order."""
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(_examine, plugins)


def _examine(one: Installed) -> Health:
    command = [sys.executable, "-c", _PROBE, one.distribution, one.name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Health(one, error=f"its import did not end within {SECONDS:g} s")
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return Health(one, error=lines[-1] if lines else f"the process ended with {done.returncode}")
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return Health(one, error="its import wrote over the answer, or ended the process")
    return Health(one, answer["seconds"], answer["mib"], tuple(answer["heavy"]), answer["cuda"])
