"""What the local engine would compute otherwise than the trainer, without a word."""

import pytest
import torch
from miles_local.checks import check_head

from miles_core.config.tables import Algorithm, Perf, Rollout, RunConfig
from miles_core.errors import ConfigError


def test_a_rounded_logit_is_another_log_prob():
    run = RunConfig(algorithm=Algorithm(fp32_lm_head=True), perf=Perf(bf16=True), rollout=Rollout(engine="local"))
    with pytest.raises(ConfigError) as caught:
        check_head(run, print)
    assert "algorithm.fp32_lm_head" in caught.value.who
    logits = torch.linspace(-8, 8, 264)
    assert (logits.bfloat16().float().log_softmax(0) - logits.log_softmax(0)).abs().max() > 1e-2
    check_head(RunConfig(algorithm=Algorithm(fp32_lm_head=True), perf=Perf(bf16=False)), print)
