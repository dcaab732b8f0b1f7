"""Adapters in a real SGLang server on the CPU; skipped where there is no environment for it (`make sglang-cpu`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from miles_testing.forked import miles

from miles_core.record.events import read

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("MILES_SGLANG_PYTHON") or ROOT / ".venv-sglang" / "bin" / "python")
SERVED = ("--engine", "sglang", "--server-command", str(PYTHON), str(ROOT / "tests" / "sglang" / "sglang_cpu.py"),
          "--sglang-max-total-tokens", "4096", "--sglang-lora-backend", "torch_native")
SMALL = ("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--skip-eval-before-train")

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.xdist_group("sglang"),
              pytest.mark.skipif(not PYTHON.is_file(), reason="no SGLang for the CPU: run `make sglang-cpu`")]


def run(folder, *flags):
    words = ["run", "examples/demo.toml", "--no-live", "--run-dir", folder / "run", "--lora-rank", "8", "--lr", "3e-3",
             *SERVED, *SMALL, *flags]
    outcome = miles(words, ROOT, timeout=500)
    assert outcome.code == 0, outcome.err
    return list(read(folder / "run" / "events.jsonl"))


def test_a_server_samples_with_the_adapter_of_the_moment(tmp_path):
    """The base travels once, then adapters alone; log-probs of both sides agree at every version."""
    events = run(tmp_path, "--weight-sync", "adapter", "--num-rollout", "4")
    steps = [event["metrics"] for event in events if event["event"] == "metrics"]
    syncs = [event for event in events if event["event"] == "weight_sync"]
    assert [sync["version"] for sync in syncs] == [1, 2, 3, 4, 5]
    first, *later = (sync["bytes"] for sync in syncs)
    assert len(set(later)) == 1 and later[0] == syncs[0]["adapter_bytes"] < first / 5
    assert len(steps) == 4 and all(step["train/grad_norm"] > 0 for step in steps)
    assert max(step["train/train_rollout_logprob_abs_diff_max"] for step in steps) < 1e-4
    log = (tmp_path / "run/logs/engine-0.log").read_text()
    assert log.count("POST /load_lora_adapter_from_tensors HTTP/1.1\" 200") == 5
    assert log.count("POST /unload_lora_adapter HTTP/1.1\" 200") == 4


def test_a_server_that_was_started_again_gets_the_base_and_the_adapter(tmp_path):
    """It dies in the second rollout, by a plugin of the run."""
    plugin = tmp_path / "killer.py"
    plugin.write_text(KILLER)
    events = run(tmp_path, "--weight-sync", "adapter", "--num-rollout", "4", "--plugin", str(plugin))
    assert [event["event"] for event in events].count("engine_restarted") == 1
    steps = [event["metrics"] for event in events if event["event"] == "metrics"]
    assert len(steps) == 4 and max(step["train/train_rollout_logprob_abs_diff_max"] for step in steps) < 1e-4
    recovered = [event for event in events if event["event"] == "engine_recovered"]
    syncs = [event for event in events if event["event"] == "weight_sync"]
    assert any(event["bytes"] == syncs[0]["bytes"] for event in [*recovered, *syncs[1:]]), "the base came again"


KILLER = '''"""Kills the server's processes after the second rollout."""
import os, re
from pathlib import Path
from miles_core import hookimpl


class Killer:
    """Once."""

    name = "killer"

    @hookimpl
    def metrics(self, rollout_id, values, run_dir):
        if rollout_id == 1 and "train/loss" in values:
            for entry in Path("/proc").iterdir():
                if entry.name.isdecimal():
                    try:
                        words = (entry / "cmdline").read_bytes()
                    except OSError:
                        continue
                    if b"sglang_cpu.py" in words and _ours(entry):
                        os.kill(int(entry.name), 9)


def _ours(entry):
    """Whether it descends from this process."""
    number = entry.name
    while number not in ("0", "1"):
        try:
            number = re.search(r"PPid:\\s+(\\d+)", Path("/proc", number, "status").read_text())[1]
        except (OSError, TypeError):
            return False
        if number == str(os.getpid()):
            return True
    return False
'''
