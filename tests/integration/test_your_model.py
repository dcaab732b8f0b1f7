"""docs/your-model.md is followed from its data to a model that transformers loads, for one rollout.

    pytest -m slow tests/integration/test_your_model.py      fetches 100 MB
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.record.events import read
from tests.pages import blocks

ROOT = Path(__file__).parents[2]


MILES = Path(sys.executable).with_name("miles")


def do(folder: Path, *words: object) -> None:
    done = subprocess.run(list(map(str, words)), cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.integration
def test_the_page_leads_to_a_trained_model_and_to_another_scorer(tmp_path):
    for block in blocks(ROOT / "docs/your-model.md"):
        if block.mark == "file":
            (tmp_path / block.what).write_text(block.text)
    do(tmp_path, sys.executable, ROOT / "examples/smollm2/make_model.py", "models/smollm2-135m-instruct")
    do(tmp_path, sys.executable, "questions.py")
    once = ("--no-live", "--num-rollout", "1", "--skip-eval-before-train")
    do(tmp_path, MILES, "run", "own.toml", *once)
    [rollout] = [event for event in read(tmp_path / "runs/own/events.jsonl") if event["event"] == "metrics"]
    assert 0 < rollout["metrics"]["rollout/raw_reward"] < 1
    assert (tmp_path / "runs/own/hf-1/model.safetensors").is_file()
    text = (tmp_path / "own.toml").read_text()
    for old, new in (('["math"]', '["number"]'), ("\n[math]\nboxed_only = false\n", "")):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "own.toml").write_text('plugins = ["grpo", "./number.py"]\n' + text)
    do(tmp_path, MILES, "run", "own.toml", *once, "--debug-rollout-only", "--run-dir", "runs/number")
