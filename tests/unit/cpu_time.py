"""CPU seconds of a command in a fresh interpreter, and what it imports."""

import json
import os
import subprocess
import sys
import time

from tests.cpu_budget import REFERENCE_START, start

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


def best(argv, cwd, limit, **environment):
    """(least CPU seconds, top-level modules, output) of a command, the interpreter's own start included.

    The seconds are those of the machine of reference: where the start that tests/cpu_budget.py knows, in turns with the
    command, takes longer than it does there, they are as many times fewer. Of three times, and of up to twelve while
    they are more than `limit`: what else runs on a machine only adds to them.
    """
    runs, starts = [], []
    # Modules that were started once are compiled, as they are for a user, whatever this process was told.
    given = dict(os.environ, COVERAGE_PROCESS_START="", PYTHONDONTWRITEBYTECODE="", **environment)
    while len(runs) < 3 or (len(runs) < 12 and reference_seconds(runs, starts) > limit):
        time.sleep(len(runs) // 3)
        starts.append(start())
        done = subprocess.run([sys.executable, "-c", CODE.format(argv=[str(a) for a in argv])], cwd=cwd, text=True,
                              capture_output=True, check=True, env=given)
        seconds, names = json.loads(done.stderr.splitlines()[-1])
        runs.append((seconds, names, done.stdout))
    assert len({out for _, _, out in runs}) == 1, "the output differs from run to run"
    return reference_seconds(runs, starts), *min(runs)[1:]


def reference_seconds(runs, starts):
    return min(runs)[0] / max(1.0, min(starts) / REFERENCE_START)
