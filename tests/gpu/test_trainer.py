"""Trainers on a GPU and on two: the demo's run file, unchanged but for its dtype, with the local engine.

    PYTHONPATH=SITE python -m pytest tests/gpu/test_trainer.py -s
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from miles_core.record.events import read

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.integration,
              pytest.mark.full]

RUNS = {
    "float32": ([], 1e-4),
    "bfloat16": (["--bf16", "--engine-dtype", "float32"], 1e-2),
    "offloaded optimizer": (["--bf16", "--engine-dtype", "float32", "--optimizer-cpu-offload",
                             "--optimizer-offload-fraction", "1.0", "--use-precision-aware-optimizer"], 1e-2),
    "two ranks": (["--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"], 1e-4),
    "fsdp": (["--trainer", "fsdp", "--async-save", "--save-interval", "2"], 1e-4),
    "fsdp, two ranks": (["--trainer", "fsdp", "--actor-num-gpus-per-node", "2", "--async-save", "--save-interval", "2"],
                        1e-4),
    "fsdp, two ranks of tensors": (["--trainer", "fsdp", "--actor-num-gpus-per-node", "2",
                                    "--fsdp.tensor-parallel-size", "2"], 1e-4),
    "fsdp, two ranks of contexts": (["--trainer", "fsdp", "--actor-num-gpus-per-node", "2",
                                     "--fsdp.context-parallel-size", "2"], 1e-4),
    "fsdp, two ranks in bfloat16": (["--trainer", "fsdp", "--actor-num-gpus-per-node", "2", "--bf16",
                                     "--engine-dtype", "float32"], 1e-2),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_demo_learns(name, tmp_path):
    """Greedy accuracy rises, and the mean log-prob difference to the engine stays within the dtype's."""
    flags, bound = RUNS[name]
    if "two ranks" in name and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    words = ["run", "examples/demo.toml", "--no-live", "--run-dir", tmp_path / "run", "--num-rollout", "10",
             "--engine", "local", *flags]
    command = [sys.executable, "-c", "from miles_core.cli import main; main()", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280,
                          env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    print(done.stdout[-2500:])
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    events = list(read(tmp_path / "run" / "events.jsonl"))
    steps = [event["metrics"] for event in events if event["event"] == "metrics"]
    scores = [event["metrics"]["eval/sums"] for event in events if event["event"] == "eval"]
    gap = max(step["train/train_rollout_logprob_abs_diff"] for step in steps[:1])
    norms = [round(step["train/grad_norm"], 6) for step in steps]
    print(f"{name}: accuracy {scores}, first mean difference {gap:.1e}, norms of gradients {norms}")
    assert scores[-1] > scores[0] + 0.2
    assert gap <= bound
