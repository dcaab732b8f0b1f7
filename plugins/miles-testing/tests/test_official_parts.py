"""The kits by part on what the official plugins offer."""

from __future__ import annotations

import pytest
from miles_testing import (
    advantage_contract,
    buffer_contract,
    canned_samples,
    filter_contract,
    generator_contract,
    reward_contract,
)
from miles_testing.plugin_under_test import PluginUnderTest
from miles_testing.sample_inputs import Inputs, grouped

from miles_core.plugins import bind


def hooks(plugin, role, **options):
    """What a plugin has bound in a role."""
    subject = PluginUnderTest(plugin, options, [], Inputs(), None, ())
    return bind.bind([subject.selected], subject.plan.config, role)


@pytest.mark.parametrize(("plugin", "name"), [
    ("grpo", "grpo"), ("gspo", "gspo"), ("cispo", "cispo"), ("reinforce", "reinforce_plus_plus"),
    ("reinforce", "reinforce_plus_plus_baseline"), ("reinforce", "rloo"), ("sft", "sft"),
])  # fmt: skip
def test_estimators(plugin, name):
    advantage_contract(hooks(plugin, "trainer").advantage[name])


def test_the_filter_of_dapo():
    flat = canned_samples()
    for sample in flat:
        sample.reward = 1.0
    filter_contract(hooks("dapo-filter", "rollout").filter_group, drops=lambda: grouped(flat)[0],
                    keeps=lambda: grouped(canned_samples())[0])


@pytest.mark.parametrize("mask", [False, True])
def test_the_keeper_of_partial_rollout(mask):
    found = hooks("partial-rollout", "rollout", mask_offpolicy_in_partial_rollout=mask)
    buffer_contract(unfinished=found.unfinished, select=found.select_from_buffer)


@pytest.mark.parametrize(("name", "right"), [
    ("boxed_math", {"\\boxed{4}": 1.0, "4": 0.0}), ("math", {"\\boxed{4}": 1.0, "it is 4": 0.0, "5": 0.0}),
    ("format", {"so \\boxed{4}": 1.0, "4": 0.0}),
])  # fmt: skip
def test_the_scorers_of_math(name, right):
    found = hooks("math", "rollout")
    try:
        reward_contract(found.reward[name], right=right, label="4")
    finally:
        found.finish("completed")


def test_the_generator_of_sft():
    prompts = [group.prompt for group in grouped(canned_samples(row={"response": "four"}))]
    generator_contract(hooks("sft", "rollout").generate["sft"], prompts=lambda: prompts, samples=1, asks=False)
