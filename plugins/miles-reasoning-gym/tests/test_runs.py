"""Whole runs: trained and evaluated on problems, and what was stopped goes on with its prompts and levels."""

import json

import pytest
from miles_testing import toy_run

TASKS = {"rollout.prompt_source": "reasoning-gym", "reasoning-gym.tasks": ["chain_sum"],
         "reasoning-gym.answer": "text", "reasoning-gym.prompt": "{expression}=", "rollout.rm_type": ["reasoning-gym"],
         "rollout.rollout_max_context_len": 128}


def sampled(run):
    """Of every answer all that is kept, in order."""
    return [json.loads(line) for file in sorted((run.folder / "samples").glob("rollout_*.jsonl"))
            for line in file.read_text().splitlines()]


@pytest.mark.integration
def test_a_run_trains_and_is_evaluated_on_problems():
    run = toy_run(["reasoning-gym"], options=TASKS, flags=[
        "--eval-interval", "2", "--eval-prompt-data", "sums", "chain_sum.gym@[0:4]"])
    assert len(run.metrics) == 2 and len(sampled(run)) == 8
    assert all(metrics["rollout/reasoning_gym_ungraded"] == 0 for metrics in run.metrics)
    assert "rollout/reasoning_gym/chain_sum" in run.metrics[0]
    assert "eval/sums" in {key for event in run.events for key in event.get("metrics", ())}


@pytest.mark.full
@pytest.mark.integration
def test_a_run_that_was_stopped_goes_on_with_the_prompts_and_levels_it_would_have_had(tmp_path):
    options = TASKS | {"reasoning-gym.tasks": ['{"name": "chain_sum", "level": 0}'],
                       "reasoning-gym.curriculum_answers": 4, "reasoning-gym.curriculum_up": 0.0,
                       "reasoning-gym.curriculum_down": -0.5}  # it always rises
    saved, flags = str(tmp_path / "checkpoints"), ["--debug-determinism"]
    whole = toy_run(["reasoning-gym"], steps=4, options=options, flags=flags)
    first = toy_run(["reasoning-gym"], steps=4, options=options, flags=[
        *flags, "--save", saved, "--save-interval", "1", "--debug-exit-after-rollout", "2"])
    second = toy_run(["reasoning-gym"], steps=4, options=options, flags=[*flags, "--load", saved])
    assert sampled(first) + sampled(second) == sampled(whole) and len(sampled(whole)) == 16
    assert whole.metrics[-1]["rollout/reasoning_gym/chain_sum/level"] == 3
