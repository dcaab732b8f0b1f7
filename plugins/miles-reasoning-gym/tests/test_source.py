"""Prompts by number: the same on every way to them, of the tasks that are named, at the level of now."""

import collections
import json

import pytest
from miles_reasoning_gym import problems
from miles_reasoning_gym.problems import Task

from miles_core.errors import ConfigError, DataError

EASY = {"name": "chain_sum", "config": {"min_digits": 1, "max_digits": 2, "max_terms": 3}}


def told(prompts):
    return [(prompt.uid, prompt.text, prompt.token_ids, prompt.metadata) for prompt in prompts]


def test_a_resumed_source_goes_on_with_the_prompts_it_would_have_had(source):
    tasks = [EASY, {"name": "ransom_note", "weight": 2}, {"name": "leg_counting", "curriculum": True}]
    whole, first = source(tasks), source(tasks)
    expected = [whole.next() for _ in range(16)]
    begun = [first.next() for _ in range(9)]
    first.give_back(begun[6:])
    state = json.loads(json.dumps(first.state_dict()))
    resumed = source(tasks)
    resumed.load_state_dict(state)
    assert told(begun) == told(expected[:9])
    assert told(resumed.next() for _ in range(10)) == told(expected[6:])
    assert len({prompt.text for prompt in expected}) == 16


def test_what_was_given_back_comes_first_and_leaves_no_trace_where_it_is_the_stream(source):
    prompts = source([EASY])
    begun = [prompts.next() for _ in range(5)]
    before = prompts.state_dict()
    ahead = [prompts.next() for _ in range(3)]
    prompts.give_back(ahead)
    assert prompts.state_dict() == before
    prompts.give_back(begun[1:2])
    assert [prompts.next().uid for _ in range(3)] == [1, 5, 6]


def test_other_seeds_and_other_tasks_are_other_prompts(source):
    assert source([EASY], seed=0).next().text != source([EASY], seed=1).next().text
    assert len({source([EASY], seed=1).data, source([EASY]).data, source(["chain_sum"]).data}) == 3


def test_weights_are_shares(source):
    prompts = source([EASY, {"name": "products", "weight": 3}])
    count = collections.Counter(prompts.next().metadata["reasoning_gym"]["task"] for _ in range(200))
    assert 120 < count["products"] < 180, "three quarters"


def test_training_and_evaluation_share_no_seed():
    numbers = {problems.number(seed, index) for seed in range(50) for index in (0, 10**6, 2**30)}
    assert max(numbers) < problems.HALF <= problems.HALF + 10**6 < 2**32


@pytest.mark.parametrize("task", ["isomorphic_strings", "polynomial_multiplication", "word_ladder", "gsm_symbolic"])
def test_a_problem_is_a_function_of_its_number_in_every_process(task):
    """The first two walk through sets of strings, the others have no more problems than their size."""
    before = problems.draw(Task(task), None, 1234)
    problems.close()
    problems.draw(Task(task), None, 7)
    assert problems.draw(Task(task), None, 1234) == before


def test_prompts_that_are_too_long_are_passed_over(source):
    prompts = source([EASY], prompt="{expression}", max_prompt_len=8)
    uids = [prompt.uid for prompt in (prompts.next() for _ in range(6)) if len(prompt.token_ids) <= 8]
    assert len(uids) == 6 and uids != list(range(6))
    with pytest.raises(DataError) as caught:
        source([EASY], max_prompt_len=3).next()
    assert caught.value.code == "reasoning-gym-all-too-long"


def test_a_prompt_that_names_what_no_problem_has_is_refused(source):
    with pytest.raises(ConfigError, match="expression") as caught:
        source([EASY], prompt="{question} {nothing}").next()
    assert caught.value.code == "reasoning-gym-prompt-field"


def test_a_config_that_the_task_refuses_names_the_task(source):
    with pytest.raises(DataError, match="max_terms") as caught:
        source([{"name": "chain_sum", "config": {"min_terms": 5, "max_terms": 2}}]).next()
    assert caught.value.code == "reasoning-gym-problem-failed" and "chain_sum" in str(caught.value)
