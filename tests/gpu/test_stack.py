"""Whole runs on GPUs: SGLang, Megatron and Ray with the demo's run file, to which flags add nothing but the backends.

    python -m pytest tests/gpu/test_stack.py -s -k colocated         one GPU
    python -m pytest tests/gpu/test_stack.py -s -k disaggregated     two GPUs
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
BACKENDS = [
    "--engine", "sglang", "--placement", "ray", "--bf16", "--fp32-lm-head",
    "--sglang-attention-backend", "triton", "--sglang-sampling-backend", "pytorch", "--sglang-grammar-backend", "none",
    "--sglang-cuda-graph-max-bs", "64", "--sglang-mem-fraction-static", "0.4",
]  # fmt: skip

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.integration]


def run(folder: Path, *flags: str, seconds: float = 480) -> list[dict]:
    """The events of a run of the demo."""
    words = ["run", "examples/demo.toml", "--no-live", "--run-dir", folder, *BACKENDS, *flags]
    command = [sys.executable, "-c", "from miles_core.cli import main; main()", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, env={**os.environ})
    logs = "".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}"
                   for log in (folder / "logs").glob("*.log")
                   ) if done.returncode else ""
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:] + logs
    print(done.stdout[-1500:])
    return list(read(folder / "events.jsonl"))


def learned(events: list[dict], name: str, gain: float = 0.2, *, current: bool = True) -> float:
    """Prints reward, difference and seconds of each stage; returns the mean seconds of a step after the first two.

    Args:
        current: whether the trainer holds the very weights that were sampled from, so that log-probs agree.
    """
    steps = [event["metrics"] for event in events if event["event"] == "metrics"]
    scores = [event["metrics"]["eval/sums"] for event in events if event["event"] == "eval"]
    gaps = [step["train/train_rollout_logprob_abs_diff"] for step in steps]
    parts = sorted({key for step in steps for key in step if key.startswith("perf/")})
    late = steps[2:]
    seconds = {key: sum(step.get(key, 0.0) for step in late) / len(late) for key in parts}
    print(f"{name}: accuracy {[round(s, 3) for s in scores]}")
    print(f"{name}: reward {[round(step['rollout/raw_reward'], 3) for step in steps]}")
    print(f"{name}: mean log-prob difference {[round(gap, 5) for gap in gaps]}")
    print(f"{name}: seconds {({key: round(value, 3) for key, value in seconds.items()})}")
    assert scores[-1] > scores[0] + gain
    assert not current or (sum(gaps) / len(gaps) <= 0.01 and max(gaps) <= 0.02)
    return seconds["perf/step_time"]


def test_colocated_on_one_gpu(tmp_path):
    """Trainer and engine take turns on one GPU; weights go by CUDA IPC."""
    learned(run(tmp_path / "run", "--colocate"), "colocated")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_disaggregated_on_two_gpus(tmp_path):
    """A GPU each; weights go by an NCCL group. Sampling ahead of training learns as well, and takes less wall time."""
    flags = ["--rollout-num-gpus", "1", "--num-rollout", "14", "--eval-interval", "14"]
    alone = learned(run(tmp_path / "sync", *flags), "max_lag 0")
    ahead = learned(run(tmp_path / "ahead", *flags, "--max-lag", "1", "--use-rollout-logprobs"), "max_lag 1",
                    current=False)
    print(f"wall per step, max_lag 1 over max_lag 0: {ahead / alone:.3f}")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensor_parallel_on_both_sides(tmp_path):
    """Two trainer ranks and one engine of two GPUs share them; every engine rank holds what was sent."""
    flags = ["--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel", "--colocate",
             "--rollout-num-gpus-per-engine", "2", "--num-rollout", "4", "--eval-interval", "4"]
    learned(run(tmp_path / "run", *flags), "tensor parallel", gain=-0.1)


def test_speculative_decoding_on_one_gpu(tmp_path):
    """Drafts from n-grams of the text so far: the run learns, and says how many drafted tokens were accepted."""
    events = run(tmp_path / "run", "--colocate", "--sglang-speculative-algorithm", "NGRAM", "--num-rollout", "12",
                 "--eval-interval", "12", "--sglang-speculative-num-draft-tokens", "4")
    learned(events, "speculative", gain=0.1)
    steps = [event["metrics"] for event in events if event["event"] == "metrics"]
    rates = [step["rollout/spec_accept_rate"] for step in steps]
    lengths = [step["rollout/spec_accept_length"] for step in steps]
    print(f"speculative: rates {[round(r, 3) for r in rates]}, lengths {[round(n, 3) for n in lengths]}")
    assert all(0 <= rate <= 1 for rate in rates) and all(length >= 1 for length in lengths)


@pytest.mark.skipif(torch.cuda.device_count() > 3, reason="needs a host with fewer GPUs than are asked for")
def test_a_gpu_too_many_is_named(tmp_path):
    """The sentence says how many there are, and nothing was started."""
    with pytest.raises(AssertionError, match=r"GPU"):
        run(tmp_path / "run", "--colocate", "--actor-num-gpus-per-node", "4", "--num-rollout", "1", seconds=120)
