"""A teacher on a real SGLang server: what it says of the student's likeliest tokens is what it says in the trainer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from miles_testing.forked import miles

from conftest import ROOT, serving
from miles_core.record.events import read

pytestmark = [pytest.mark.slow, pytest.mark.integration]
PROMPTS = ROOT / "examples" / "arithmetic" / "train.jsonl"


def test_a_hosted_teacher_teaches_what_it_teaches_in_the_trainer(config, models, tmp_path):
    """Answers are longer than what one request is about; the server finds their beginnings in its cache."""
    argv = ["run", "--no-live", "--hf-checkpoint", models["new"], "--prompt-data", PROMPTS, "--input-key", "prompt",
            "--label-key", "label", "--apply-chat-template", "--num-rollout", "2",
            "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "80", "--no-bf16",
            "--threads", "1", "--lr", "1e-3", "--use-opd", "--opd-log-prob-top-k", "6"]
    holds = ["--opd-teacher-load", models["old"], "--rm-type", "teacher_only"]
    functions = "miles.rollout.on_policy_distillation"  # as Miles's launch scripts of a hosted teacher have it
    script = ["--opd-type", "sglang", "--custom-rm-path", f"{functions}.reward_func",
              "--custom-reward-post-process-path", f"{functions}.post_process_rewards", "--rm-url"]
    with serving(replace(config, surfaces={"server": {"max_total_tokens": 8192}}), "teacher.log") as url:
        asks = [*script, f"{url}/generate"]
        for strategy in ("only-student", "union"):
            runs = [steps([*argv, "--opd-top-k-strategy", strategy, *kind], tmp_path / f"{strategy}-{place}")
                    for place, kind in enumerate((asks, holds))]
            np.testing.assert_allclose(*runs, rtol=1e-3)


def steps(argv, folder):
    """The divergence, the teacher's log-probs and the norm of the gradient of each rollout of a run."""
    outcome = miles([*argv, "--run-dir", folder], folder.parent, timeout=200)
    assert outcome.code == 0, outcome.err
    metrics = [event["metrics"] for event in read(folder / "events.jsonl") if event["event"] == "metrics"]
    assert max(m["rollout/response_len/max"] for m in metrics) > 64
    return [[m[name] for name in ("rollout/opd_reverse_kl", "rollout/teacher_log_probs", "train/grad_norm")]
            for m in metrics]
