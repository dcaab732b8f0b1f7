"""What the plan of a run refuses."""

import pytest
from miles_vllm.checks import check_servers
from miles_vllm.plugin import VllmOptions

from miles_core.config.tables import Checkpoint, Eval, Perf, Rollout, RunConfig
from miles_core.errors import ConfigError


def run(perf=None, evaluation=None, **rollout) -> RunConfig:
    return RunConfig(checkpoint=Checkpoint(hf_checkpoint="model"), rollout=Rollout(**{"engine": "vllm", **rollout}),
                     perf=Perf(**(perf or {})), eval=Eval(**(evaluation or {})))


@pytest.mark.parametrize("config, args, code", [
    (run(perf={"colocate": True}), [], "vllm-with-colocate"),
    (run(), ["logprobs-mode=raw_logprobs"], "vllm-argument-owned"),
    (run(), ["--max_model_len=9"], "vllm-argument-owned"),
    (run(rollout_temperature=0.7, rollout_top_p=0.9), [], "vllm-log-probs-inexact"),
    (run(rollout_temperature=0.7, rollout_min_new_tokens=2), [], "vllm-log-probs-inexact"),
    (run(evaluation={"eval_interval": 1, "eval_prompt_data": ["x.jsonl"], "eval_temperature": 0.6}), [],
     "vllm-log-probs-inexact"),
], ids=["colocated", "its log-probs", "its context", "cut", "least tokens", "evaluation at another temperature"])
def test_a_plan_is_refused(config, args, code):
    with pytest.raises(ConfigError) as refused:
        check_servers(config, VllmOptions(args=args))
    assert refused.value.code == code


@pytest.mark.parametrize("config", [
    run(rollout_top_p=0.9, rollout_top_k=5, rollout_min_new_tokens=3), run(rollout_temperature=0.7),
    run(evaluation={"eval_interval": 1, "eval_prompt_data": ["x.jsonl"], "eval_temperature": 0.0, "eval_top_p": 0.5}),
    run(engine="local", rollout_temperature=0.7, rollout_top_p=0.9),
], ids=["cut at 1", "another temperature", "greedy evaluation", "another engine"])
def test_a_plan_is_taken(config):
    assert check_servers(config, VllmOptions(args=["enforce-eager"])) is config
