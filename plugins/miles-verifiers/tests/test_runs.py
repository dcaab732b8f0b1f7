"""Whole runs: trained and evaluated on an environment, and what cannot be meant is said by a plan."""

import json
import subprocess
import sys

import pytest
from miles_testing import toy_run
from miles_verifiers.plugin import Verifiers, VerifiersOptions

from miles_core.config.tables import Eval, Rollout, RunConfig
from miles_core.errors import ConfigError

OPTIONS = {"rollout.prompt_data": "words.verifiers", "rollout.generate": "verifiers",
           "rollout.apply_chat_template": True, "rollout.rollout_max_context_len": 128, "rollout.rm_type": []}
ENVS = json.dumps({"words": {"taskset": {"id": "words_env"}}})


@pytest.mark.full
@pytest.mark.integration
def test_a_run_trains_and_is_evaluated_on_an_environment():
    run = toy_run(["grpo", "verifiers"], options=OPTIONS, flags=[
        "--verifiers.envs", ENVS, "--eval-interval", "2", "--eval-prompt-data", "held", "words.verifiers@[0:2]"])
    samples = [json.loads(line) for file in sorted((run.folder / "samples").glob("rollout_*.jsonl"))
               for line in file.read_text().splitlines()]
    assert len(run.metrics) == 2 and len(samples) == 8
    for metrics in run.metrics:
        assert metrics["rollout/raw_reward"] == pytest.approx(metrics["rollout/agent/right"])
        assert metrics["rollout/agent/characters"] > 0
    assert "eval/held" in {key for event in run.events for key in event.get("metrics", ())}


@pytest.mark.full
@pytest.mark.integration
def test_a_harness_that_speaks_anthropics_protocol_and_sends_out_an_agent():
    """Its conversations are samples of one rollout, and each drawn token has the log-prob of its draw."""
    envs = json.dumps({"words": {"taskset": {"id": "words_env"}, "agent": {"harness": {"id": "sends_out"}}}})
    run = toy_run(["grpo", "verifiers"], options=OPTIONS | {"rollout.rollout_max_response_len": 64}, flags=[
        "--verifiers.envs", envs, "--verifiers.conversations", "2"])
    for metrics in run.metrics:
        assert metrics["rollout/agent/conversations"] == 2
        assert metrics["train/train_rollout_logprob_abs_diff_max"] == 0
    samples = [json.loads(line) for file in sorted((run.folder / "samples").glob("rollout_*.jsonl"))
               for line in file.read_text().splitlines()]
    assert len(samples) == 16  # two of each rollout


@pytest.mark.parametrize(("rollout", "evaluated", "code"), [
    ({"prompt_data": "rows.jsonl"}, {}, "verifiers-no-task"),
    ({"prompt_data": "harbor.verifiers"}, {"eval_prompt_data": ["held", "rows.jsonl"]}, "verifiers-no-task"),
    ({"prompt_data": "unheard-of.verifiers"}, {}, "verifiers-taskset-missing"),
    ({"prompt_data": "a/unheard-of@1.2.verifiers"}, {}, "verifiers-taskset-missing"),
    ({"prompt_data": "words_env.verifiers@[0:2]", "apply_chat_template": False}, {}, "verifiers-without-chat-template"),
])
def test_a_run_that_cannot_play_is_refused(rollout, evaluated, code):
    config = RunConfig(rollout=Rollout(generate="verifiers", **{"apply_chat_template": True} | rollout),
                       eval=Eval(**evaluated))
    with pytest.raises(ConfigError) as caught:
        Verifiers(VerifiersOptions(), config)
    assert caught.value.code == code


def test_a_plan_does_not_import_verifiers():
    code = ("import sys; import miles_verifiers, miles_verifiers.plugin; "
            "assert not {'verifiers', 'openai', 'torch'} & sys.modules.keys()")
    subprocess.run([sys.executable, "-c", code], check=True)
