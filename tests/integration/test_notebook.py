"""examples/notebook.ipynb from first cell to last, as a notebook runs them: one namespace, `await` at top level."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples/notebook.ipynb"
KERNEL = '''
import ast, asyncio, inspect, json, sys

async def main():
    namespace = {"__name__": "__main__"}
    for number, cell in enumerate(json.load(open(sys.argv[1]))["cells"]):
        if cell["cell_type"] == "code":
            code = compile("".join(cell["source"]), f"cell {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            outcome = eval(code, namespace)
            if inspect.isawaitable(outcome):
                await outcome
    print(json.dumps({"status": namespace["status"], "counts": namespace["counts"],
                      "lines": [len(axis.lines) for axis in namespace["axes"]],
                      "advantages": [one["advantage"] for one in namespace["group"]]}))

asyncio.run(main())
'''


@pytest.mark.slow
def test_the_notebook_trains_draws_and_shows_what_was_learned(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run([sys.executable, "-c", KERNEL, NOTEBOOK], cwd=tmp_path, capture_output=True, text=True,
                          timeout=900, env={"MPLBACKEND": "agg", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1",
                                            "MPLCONFIGDIR": str(tmp_path)})  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["status"] == 0 and facts["lines"] == [2, 1, 1]
    assert facts["counts"]["learned"] > 3 * facts["counts"]["forgotten"]
    assert len(facts["advantages"]) == 8 and min(facts["advantages"]) < 0 < max(facts["advantages"])


def test_the_notebook_is_stored_without_outputs():
    """They would change with every run."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None
               for cell in cells if cell["cell_type"] == "code")
