"""CPU seconds of a command in a fresh interpreter, and what it imports."""

import functools
import json
import os
import subprocess
import sys
import time

from tests.cpu_budget import REFERENCE, measure

CODE = """
import sys
sys.argv = ["miles", *{argv!r}]
from miles_core.cli import main
try:
    main()
except SystemExit as leave:
    assert not leave.code, leave.code
import json, resource
used = resource.getrusage(resource.RUSAGE_SELF)
names = sorted({{name.partition(".")[0] for name in sys.modules}})
print(json.dumps([used.ru_utime + used.ru_stime, names]), file=sys.stderr)
"""


def best(argv, cwd, enough=float("inf"), **environment):
    """(least CPU seconds, top-level modules, output) of a command, the interpreter's own start included.

    Of three times, and of up to twelve while they are more than `enough`: what else runs on a machine only adds to it.
    """
    runs = []
    # Modules that were started once are compiled, as they are for a user, whatever this process was told.
    given = dict(os.environ, COVERAGE_PROCESS_START="", PYTHONDONTWRITEBYTECODE="", **environment)
    while len(runs) < 3 or (len(runs) < 12 and min(runs)[0] > enough):
        time.sleep(len(runs) // 3)
        done = subprocess.run([sys.executable, "-c", CODE.format(argv=[str(a) for a in argv])], cwd=cwd, text=True,
                              capture_output=True, check=True, env=given)
        seconds, names = json.loads(done.stderr.splitlines()[-1])
        runs.append((seconds, names, done.stdout))
    assert len({out for _, _, out in runs}) == 1, "the output differs from run to run"
    return min(runs)


@functools.cache
def slowness() -> float:
    """How many times as long as the machine of reference this one computes; 1 where it is as fast."""
    return max(1.0, measure() / REFERENCE)


def here(limit: float) -> float:
    """CPU seconds on this machine that are `limit` on the machine of reference."""
    return limit * slowness()
