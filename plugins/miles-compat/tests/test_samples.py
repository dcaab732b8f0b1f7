"""Samples that functions made, looked at or changed: what of them is trained on, and what is refused.

Hooks of this plugin: generate, filter_group, shape_rewards, reward.
"""

import asyncio
import copy
import socket
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from miles_compat.agents import _answers as session_answers
from miles_compat.generation import drawn
from miles_compat.own_rollout import hooked
from miles_compat.paths import noted, ready
from miles_compat.rollout import converted, kept, marked, post_processed, rollout_data
from miles_compat.sample import asked, lent
from miles_compat.session import Drawn
from miles_megatron.testing.ranks import batches

from miles_core.config.tables import Algorithm
from miles_core.errors import HookError
from miles_core.stages.rollout import Response, SamplingParams
from miles_core.types import Prompt, Sample, Status

PROMPT = Prompt(0, 0, "", (1, 2))
SESSION = SimpleNamespace(
    generation=SimpleNamespace(engine=SimpleNamespace(version=9), vocabulary=16, sampling=SamplingParams(),
                               on_response=lambda sample, response: sample),
    args=SimpleNamespace(reward_key="score", debug_train_only=False))


def answer(context, ids, temperature=1.0):
    """One whose log-probs tell every token of every context apart."""
    log_probs = -np.arange(1.0, len(ids) + 1, dtype=np.float32) - len(context)
    response = Response(np.array(ids, np.int32), log_probs, np.full(len(ids), 3), "stop")
    return Drawn(tuple(context), response, temperature)


def made(tokens, length, mask=None, **more):
    return SimpleNamespace(**{"tokens": tokens, "response_length": length, "loss_mask": mask, "status": "completed",
                              "response": "", "remove_sample": False, "metadata": {}, "reward": None} | more)


@pytest.mark.parametrize("start", range(4))
def test_what_is_trained_on_of_an_answer_has_its_own_log_probs(start):
    """The drawn tokens repeat, so that any of them alone is found in several places."""
    mask = [0] * start + [1] + [0] * (3 - start)
    found = drawn(made([1, 2, 7, 7, 7, 7], 4, mask), PROMPT, 0, [answer([1, 2], [7, 7, 7, 7])], SESSION)
    expected = np.where(np.array(mask) > 0, [-3, -4, -5, -6], 0)
    assert found.columns["rollout_log_probs"].tolist() == expected.tolist()


@pytest.mark.parametrize(("tokens", "columns", "read"), [
    ([1, 2, 7, 8, 4, 5], None, 1), ([1, 2, 7, 8], None, 0), ([1, 2, 7, 8, 4, 5, 6], None, None),
    ([1, 3, 7, 8], None, None), ([1, 2, 7, 8, 4, 5], {"routes": np.zeros(5)}, None)])
def test_plugins_read_the_answer_that_a_sample_ends_with(tokens, columns, read):
    """Also of several turns, and what they have read of an agent's stays; behind an answer nothing is known."""
    answers = [answer([1, 2], [7, 8]), answer([1, 2, 7, 8, 4], [5])]
    answers[1] = replace(answers[1], columns=columns)
    seen = []
    generation = SimpleNamespace(**vars(SESSION.generation) | {
        "on_response": lambda sample, response: seen.append(response) or sample})
    session = SimpleNamespace(generation=generation, args=SESSION.args)
    mask = [int(token in (5, 7, 8)) for token in tokens[2:]]
    found = drawn(made(tokens, len(mask), mask), PROMPT, 0, answers, session)
    assert seen == ([] if read is None else [answers[read].response])
    assert found.columns.get("routes") is (columns or {}).get("routes")


@pytest.mark.parametrize(("given", "expected"), [(None, [0, 0]), ([-0.5, -1.5], [-0.5, -1.5])])
def test_without_an_engine_tokens_and_log_probs_are_the_functions(given, expected):
    args = SimpleNamespace(reward_key=None, debug_train_only=True)
    session = SimpleNamespace(generation=SESSION.generation, args=args)
    made_up = drawn(made([1, 2, 7, 8], 2, rollout_log_probs=given), PROMPT, 0, [], session)
    assert made_up.columns["rollout_log_probs"].tolist() == expected
    assert made_up.columns["versions"].tolist() == [9, 9] and made_up.columns["loss_mask"].tolist() == [1, 1]


def test_turns_may_be_picked_among_several_that_were_drawn():
    """Two candidates of each turn with nothing between the turns: what was picked is one run of trained tokens."""
    answers = [answer([1, 2], [7, 8]), answer([1, 2], [7, 9]), answer([1, 2, 7, 8], [5]), answer([1, 2, 7, 8], [6])]
    found = drawn(made([1, 2, 7, 8, 6], 3), PROMPT, 0, answers, SESSION)
    assert found.columns["rollout_log_probs"].tolist() == [-3, -4, -5]
    with pytest.raises(HookError) as raised:
        drawn(made([1, 2, 7, 9, 6], 3), PROMPT, 0, answers, SESSION)
    assert raised.value.code == "generate-function-trains-prompt"


def test_of_contexts_sent_as_text_a_place_is_found_by_what_is_before_it():
    """The ids of the context are not the sample's, so only the drawn tokens tell where a part of them was."""
    found = drawn(made([1, 2, 7, 7, 5, 7], 4, [0, 1, 0, 1]), PROMPT, 0, [answer([4], [7, 7, 5, 7])], SESSION)
    assert found.columns["rollout_log_probs"].tolist() == [0, -3, 0, -5]


def test_tokens_of_another_temperature_are_not_trained_on():
    """The trainer computes log-probs at the run's; a judge that is asked greedily is not trained on."""
    answers = [answer([1, 2], [7], 0.5), answer([1, 2, 7], [8])]
    with pytest.raises(HookError) as raised:
        drawn(made([1, 2, 7, 8], 2), PROMPT, 0, answers, SESSION)
    assert raised.value.code == "generate-function-temperature" and "0.5" in str(raised.value)
    assert drawn(made([1, 2, 7, 8], 2, [0, 1]), PROMPT, 0, answers, SESSION).columns["loss_mask"].tolist() == [0, 1]
    assert drawn(made([1, 2, 7, 8], 2), Prompt(0, 0, "", (1, 2), stream="eval/a"), 0, answers, SESSION)
    greedy = [answer([1, 2], [7], 0.0)]  # whose log-probs are those of temperature 1
    assert drawn(made([1, 2, 7], 1), PROMPT, 0, greedy, SESSION)


@pytest.mark.parametrize(("changes", "code"), [
    ({"loss_mask": [0.5]}, "generate-function-parts"), ({"loss_mask": [2]}, "generate-function-parts"),
    ({"loss_mask": [-1]}, "generate-function-parts"), ({"loss_mask": ["1"]}, "generate-function-parts"),
    ({"loss_mask": [1, 1]}, "generate-function-parts"), ({"loss_mask": [[1]]}, "generate-function-parts"),
    ({"response_length": 3}, "generate-function-parts"), ({"response_length": 0.5}, "generate-function-parts"),
    ({"tokens": [1, 2, 16], "loss_mask": [0]}, "generate-function-vocabulary"),
    ({"tokens": [1, 2, 2**40], "loss_mask": [0]}, "generate-function-parts"),
    ({"tokens": None}, "generate-function-parts"), ({"status": "done"}, "generate-function-left-pending"),
    ({"reward": "good"}, "generate-function-reward"), ({"reward": np.zeros(2)}, "generate-function-reward"),
])
def test_parts_that_cannot_be_trained_on_are_refused_by_name(changes, code):
    sample = made([1, 2, 7], 1)
    vars(sample).update(changes)
    with pytest.raises(HookError) as raised:
        drawn(sample, PROMPT, 0, [answer([1, 2], [7])], SESSION)
    assert raised.value.code == code


def test_a_sample_that_was_aborted_needs_no_parts():
    assert drawn(made([], 0, status="aborted"), PROMPT, 0, [], SESSION).status is Status.ABORTED


@pytest.mark.parametrize("mask", [[1.0], [True], np.ones(1), (1,)])
def test_a_mask_may_be_written_in_several_ways(mask):
    found = drawn(made([1, 2, 7], 1, mask), PROMPT, 0, [answer([1, 2], [7])], SESSION)
    assert found.columns["loss_mask"].dtype == np.uint8 and found.columns["loss_mask"].tolist() == [1]


def test_what_a_sample_writes_into_its_metadata_is_its_own():
    """Also where a row's metadata hold further dicts and lists."""
    prompt = Prompt(0, 0, "", (1, 2), metadata={"task": {"seen": []}, "row": 3})
    first, second = asked(prompt, 0, 2), asked(prompt, 1, 2)
    first.metadata["task"]["seen"].append(1)
    assert second.metadata["task"] == {"seen": []} and prompt.metadata["task"] == {"seen": []}
    changed = drawn(made([1, 2, 7], 1, [0], metadata=first.metadata), prompt, 0, [], SESSION)
    same = drawn(made([1, 2, 7], 1, [0], metadata=second.metadata), prompt, 1, [], SESSION)
    assert changed.metadata == {"task": {"seen": [1]}} and same.metadata == {}
    with lent([same]) as (one,):
        one.metadata["task"]["seen"].append(2)
    assert same.metadata == {"task": {"seen": [2]}} and prompt.metadata["task"] == {"seen": []}


@pytest.fixture
def batch():
    """A rollout of random samples."""
    found, = batches(1)
    return found


def test_rewards_and_masks_that_a_function_writes_stay(batch):
    def mark(args, data):
        for group in data:
            group[0].reward, group[0].loss_mask = 0.25, [0] * group[0].response_length

    before = copy.deepcopy(batch.samples)
    marked(mark, None, batch.groups)
    for sample, old in zip(batch.samples, before, strict=True):
        assert sample.reward == (0.25 if sample.index == 0 else old.reward)
        assert sample.columns["loss_mask"].any() == (sample.index > 0 and old.columns["loss_mask"].any())


@pytest.mark.parametrize(("change", "code"), [
    (lambda group: group[0].tokens.append(3), "function-changes-sample"),
    (lambda group: setattr(group[0], "rollout_log_probs", [0.0]), "function-changes-sample"),
    (lambda group: setattr(group[0], "status", "aborted"), "function-changes-sample"),
    (lambda group: setattr(group[0], "loss_mask", None), "function-loss-mask"),
    (lambda group: setattr(group[0], "loss_mask", [0.5] * group[0].response_length), "function-loss-mask"),
    (lambda group: setattr(group[0], "reward", "a"), "function-reward"),
    (lambda group: group.pop(), "function-changes-groups"),
])
def test_what_was_sampled_is_not_for_a_function_that_looks_at_it(batch, change, code):
    for call in (lambda: marked(lambda args, data: change(data[0]), None, batch.groups),
                 lambda: kept(lambda args, samples: change(samples) or True, None, batch.groups[0])):
        with pytest.raises(HookError) as raised:
            call()
        assert raised.value.code == code
    assert kept(lambda args, samples: samples.reverse() or True, None, batch.groups[0]) is batch.groups[0]


@pytest.mark.parametrize(("changes", "code"), [
    ({"loss_masks": lambda one: [0.5] * one.response_length}, "convert-function-mask-length"),
    ({"loss_masks": lambda one: [-1] * one.response_length}, "convert-function-mask-length"),
    ({"loss_masks": lambda one: [1] * one.response_length}, "loss-mask-trains-more"),
    ({"response_lengths": lambda one: one.response_length - 1}, "convert-function-changes-tokens"),
    ({"rollout_log_probs": lambda one: [-1.0] * one.response_length}, "convert-function-changes-tokens"),
    ({"rewards": lambda one: float("nan")}, "function-reward"), ({"rewards": lambda one: "a"}, "function-reward"),
])
def test_a_conversion_changes_rewards_and_takes_tokens_out(batch, changes, code):
    for sample in batch.samples:
        sample.columns["loss_mask"][-1] = 0

    def convert(args, samples):
        return {name: [value(one) for one in samples] for name, value in changes.items()}

    with pytest.raises(HookError) as raised:
        converted(convert, None, batch.groups)
    assert raised.value.code == code


def test_rollout_data_are_copies(batch):
    """Of columns, which nobody may write into."""
    for sample in batch.samples:
        sample.columns["tokens"].flags.writeable = False
    before = batch.samples[0].tokens[0]
    rollout_data(batch, Algorithm())["tokens"][0][0] += 1
    assert batch.samples[0].tokens[0] == before


def test_an_error_names_the_functions_own_line_once(batch):
    def broken(args, samples):
        raise KeyError("mine")

    line = broken.__code__.co_firstlineno + 1
    for function in (noted(broken), noted(noted(broken))):
        with pytest.raises(KeyError) as raised:
            post_processed(function, None, batch.groups)
        assert raised.value.__notes__ == [f"in {__file__}:{line} broken"]


def test_a_host_without_an_address_is_said_to_be_one():
    async def asks(args, sample, sampling_params):
        try:
            raise socket.gaierror(-2, "Name or service not known")
        except OSError as error:
            raise RuntimeError("Connection error.") from error

    with pytest.raises(HookError) as raised:
        asyncio.run(noted(asks)(None, None, None))
    assert raised.value.code == "engine-address-unknown" and "asks" in str(raised.value)


def test_of_an_agents_session_only_what_was_drawn_can_be_trained_on():
    """A postprocessor may take tokens of the model out; those of the user cannot be put in."""
    columns = {"tokens": np.array([1, 2, 7, 8, 3, 9]), "loss_mask": np.array([1, 1, 0, 1], np.uint8),
               "rollout_log_probs": np.array([-1, -2, 0, -3], np.float32), "versions": np.full(4, 5),
               "routes": np.zeros(5)}
    answers = session_answers(Sample(PROMPT, 0, columns, 4), 1.0)
    found = drawn(made([1, 2, 7, 8, 3, 9], 4, [0, 1, 0, 1]), PROMPT, 0, answers, SESSION)
    assert found.columns["rollout_log_probs"].tolist() == [0, -2, 0, -3]
    assert found.columns["versions"].tolist() == [5] * 4
    assert found.columns["routes"] is columns["routes"], "what plugins have read"
    with pytest.raises(HookError) as raised:
        drawn(made([1, 2, 7, 8, 3, 9], 4), PROMPT, 0, answers, SESSION)
    assert raised.value.code == "generate-function-trains-prompt"


def test_a_sample_hook_gives_the_sample_or_nothing():
    sample = made([1], 0)
    assert asyncio.run(hooked(lambda args, sample: None, None, sample)) is sample
    with pytest.raises(HookError) as raised:
        asyncio.run(hooked(lambda args, sample: {}, None, sample))
    assert raised.value.code == "sample-hook-return"


def test_of_a_class_there_is_one_object():
    class Scorer:
        def __init__(self):
            self.calls = 0

        async def __call__(self, args, sample):
            self.calls += 1
            return self.calls

    assert [asyncio.run(ready(Scorer)(None, None)) for _ in range(2)] == [1, 2]
