"""docs/python-api.md is done as it says, from the plan to the record."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import blocks

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.integration
def test_the_page_runs_from_its_plan_to_its_record(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    script = tmp_path / "api.py"
    text = "".join(block.text for block in blocks(ROOT / "docs/python-api.md") if block.language == "python")
    body = "".join(f"    {line}" for line in text.splitlines(keepends=True))
    script.write_text(f'if __name__ == "__main__":\n{body}')
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[0] == "8 --num-rollout" and "grpo" in lines[1], done.stdout
    assert lines[-3:] == ["option-out-of-range", "0 2 True", "2 32 4"], done.stdout
