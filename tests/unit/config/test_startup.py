"""What has to be quick is quick and imports nothing heavy: --help and --plan, in a fresh interpreter, by CPU time."""

import json
import os
import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "transformers", "megatron", "sglang")

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


def best(argv, cwd, tries=3):
    """(least CPU seconds, top-level modules, output) of a command, the interpreter's own start included."""
    runs = []
    for _ in range(tries):
        done = subprocess.run([sys.executable, "-c", CODE.format(argv=[str(a) for a in argv])], cwd=cwd, text=True,
                              capture_output=True, check=True, env=dict(os.environ, COVERAGE_PROCESS_START=""))
        seconds, names = json.loads(done.stderr.splitlines()[-1])
        runs.append((seconds, names, done.stdout))
    assert len({out for _, _, out in runs}) == 1, "the output differs from run to run"
    return min(runs)


@pytest.mark.parametrize(("argv", "limit"), [(["--help"], 0.15), (["run", "--help"], 0.4)])
def test_help(tmp_path, argv, limit):
    seconds, names, out = best(argv, tmp_path)
    print(f"miles {' '.join(argv)}: {seconds * 1000:.0f} ms CPU")
    assert "miles" in out.lower() and not set(HEAVY) & set(names)
    assert seconds <= limit


def test_plan_of_the_gpu_stack(run_file):
    """SGLang's and its router's arguments are checked without importing them."""
    path = run_file()
    flags = ["--engine", "sglang", "--colocate", "--sglang-mem-fraction-static", "0.7", "--router-policy", "random"]
    seconds, names, out = best(["run", path, "--plan", *flags], path.parent)
    print(f"miles run --plan with SGLang: {seconds * 1000:.0f} ms CPU")
    assert "weights travel by ipc" in out and not {*HEAVY, "numpy", "aiohttp", "smg"} & set(names)
    assert seconds <= 0.4


def test_plan(run_file):
    """Also without numpy; the same bytes each time."""
    path = run_file()
    seconds, names, out = best(["run", path, "--plan", "--max-lag", "1"], path.parent)
    print(f"miles run --plan: {seconds * 1000:.0f} ms CPU")
    assert "batch arithmetic" in out and not {*HEAVY, "numpy"} & set(names)
    assert seconds <= 0.4
