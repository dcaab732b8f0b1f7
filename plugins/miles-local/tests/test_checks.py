"""What the local engine would compute otherwise than the trainer, without a word."""

import pytest
import torch
from miles_local.checks import check

from miles_core.config.tables import Algorithm, Perf, Rollout, RunConfig
from miles_core.errors import ConfigError


def test_a_rounded_logit_is_another_log_prob():
    run = RunConfig(algorithm=Algorithm(fp32_lm_head=True), perf=Perf(bf16=True), rollout=Rollout(engine="local"))
    with pytest.raises(ConfigError) as caught:
        check(run, print)
    assert "algorithm.fp32_lm_head" in caught.value.who
    logits = torch.linspace(-8, 8, 264)
    assert (logits.bfloat16().float().log_softmax(0) - logits.log_softmax(0)).abs().max() > 1e-2
    check(RunConfig(algorithm=Algorithm(fp32_lm_head=True), perf=Perf(bf16=False)), print)


@pytest.mark.parametrize(("engine", "notes"), [("local", 1), (None, 1), ("sglang", 0)])
def test_gpus_of_engines_are_none_of_the_local_one(engine, notes):
    """It says so, and tokens per GPU are not divided by them."""
    messages = []
    run = check(RunConfig(perf=Perf(rollout_num_gpus=4), rollout=Rollout(engine=engine)), messages.append)
    assert len(messages) == notes and all("--rollout-num-gpus" in message for message in messages)
    assert run.perf.rollout_num_gpus == (None if notes else 4)
