"""Stacked experts in SGLang's own layers of every rank: what its own loader puts there, expert by expert."""

import json
import os
import subprocess
from pathlib import Path

import pytest

PYTHON = Path(os.environ.get("MILES_SGLANG_PYTHON") or Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python")


@pytest.fixture(scope="module")
def found():
    script = Path(__file__).with_name("stacks.py")
    done = subprocess.run([PYTHON, script], capture_output=True, text=True, timeout=180,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_rank_takes_its_experts_and_its_part_of_them(found):
    """Up to four ranks of expert parallelism by three of tensor parallelism; stacks come whole and in parts."""
    assert found["ranks"] == 42 and found["wrong"] == []


def test_layers_with_another_layout_take_experts_one_by_one_and_say_why(found):
    said = ["Fp8MoEMethod", "another order", "w2_weight has a loader of its own", "another order", "--enable-eplb"]
    assert len(found["hindrances"]) == len(said)
    for one, words in zip(found["hindrances"], said, strict=True):
        assert one.startswith("mlp.experts: ") and words in one
