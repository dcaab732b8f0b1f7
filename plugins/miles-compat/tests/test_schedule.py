"""Rollout functions with a schedule of their own, by themselves; whole runs are in tests/integration.

Hooks of this plugin: prompt_source, generate, combine_rewards.
"""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
from miles_compat.data_sources import NoPrompts, RolloutDataSourceWithBuffer
from miles_compat.generation import drawn, reward_of
from miles_compat.schedule import Evaluations, Places, Schedule
from miles_compat.session import CURRENT, Drawn

from miles_core.errors import ConfigError, HookError
from miles_core.stages.rollout import Generation, Response, SamplingParams
from miles_core.types import Prompt


class Numbers:
    """A source of numbered prompts."""

    data = "numbers"

    def __init__(self):
        self.number, self.again = 0, []

    def next(self) -> Prompt:
        if self.again:
            number = self.again.pop(0)
        else:
            number, self.number = self.number, self.number + 1
        return Prompt(number, number, str(number), (1,))

    def state_dict(self):
        return {"next": self.number, "again": [*self.again]}

    def load_state_dict(self, state):
        self.number, self.again = state["next"], [*state["again"]]


def slot(schedule, place, engine, then=None) -> asyncio.Task:
    """As a run has them: a task takes a group, and then scores it."""
    async def sampled():
        await schedule.group(place, Generation(engine, SamplingParams(), 1, None, None, 5.0))
        if then is not None:
            await then.wait()

    return asyncio.ensure_future(sampled())


def test_a_resumed_run_draws_the_prompts_that_the_unbroken_one_would():
    """After drops, which use up places, and with groups in the buffer, whose prompts are sampled again."""
    asked: list[list[int]] = []

    def rollout(args, rollout_id, data_buffer, evaluation):
        groups = data_buffer.get_samples(4)
        asked.append([group[0].group_index for group in groups])
        states.append(json.loads(json.dumps(places.state_dict())))
        data_buffer.add_samples(groups[3:])
        for group in groups[:3]:
            one = group[0]
            one.tokens, one.response_length, one.loss_mask, one.status = [1, 2], 1, [0], "completed"
        return groups[:3]

    args = SimpleNamespace(rollout_seed=0, rollout_max_context_len=8, max_lag=0, debug_rollout_only=False,
                           debug_train_only=False, reward_key="score", n_samples_per_prompt=1, buffer_filter_path=None,
                           apply_chat_template=False)
    states: list[dict] = []

    async def sampled(version, count):
        schedule = Schedule(rollout, args, places, lambda args: RolloutDataSourceWithBuffer(args, places.inner),
                            lambda name, value: None)
        engine = SimpleNamespace(version=version)
        for _ in range(count):
            await slot(schedule, places.next(), engine)
        return json.loads(json.dumps(places.state_dict()))

    places = Places(Numbers(), 3)
    state = asyncio.run(sampled(1, 4))  # one of the three was dropped, so a second call was needed
    assert asked == [[0, 1, 2, 3], [3, 4, 5, 6]] and states[1]["inner"] == {"next": 4, "again": [3]}
    assert state["inner"] == {"next": 7, "again": [6]} and state["next"] == 4
    for again, next_call in ((states[1], asked[1]), (state, [6, 7, 8, 9])):
        places = Places(Numbers(), 3)
        places.load_state_dict(again)
        asyncio.run(sampled(2, 1))
        assert asked[-1] == next_call


def test_groups_that_are_being_scored_are_drawn_again_by_a_resumed_run():
    """They are neither the function's any more nor the run's already; once they are, no prompt comes twice."""
    found: list[dict] = []

    async def rollout(given):
        groups = schedule.source.get_samples(2)
        if groups[0][0].group_index:
            found.append(places.state_dict()["inner"])
            scored.set()
            await asyncio.wait(slots)
            found.append(places.state_dict()["inner"])
        for (one,) in groups:
            one.tokens, one.response_length, one.loss_mask, one.status = [1, 2], 1, [0], "completed"
        return groups

    async def sampled():
        engine = SimpleNamespace(version=1)
        slots.extend(slot(schedule, places.next(), engine, then=scored) for _ in range(2))
        await slot(schedule, places.next(), engine)

    args = arguments(max_lag=1, n_samples_per_prompt=1, buffer_filter_path=None, apply_chat_template=False)
    slots, scored, places = [], asyncio.Event(), Places(Numbers(), 2)
    schedule = Schedule(rollout, args, places, lambda args: RolloutDataSourceWithBuffer(args, places.inner),
                        lambda name, value: None)
    asyncio.run(sampled())
    assert found == [{"next": 2, "again": [0, 1]}, {"next": 2, "again": []}]


def test_calls_of_one_rollout_draw_different_numbers():
    """A second call after drops may ask with the same tokens: data may be few, or have a row twice."""
    keys: list[int] = []

    def rollout(args, rollout_id, data_buffer, evaluation):
        keys.append(CURRENT.get().name([1, 2])[1])
        return [[sample([1, 2], 1, [0], group_index=None, prompt="", label=None)]]

    async def sampled():
        args = arguments()
        places = Places(Numbers(), 4)
        schedule = Schedule(rollout, args, places, lambda args: None, lambda name, value: None)
        for _ in range(3):
            await slot(schedule, places.next(), SimpleNamespace(version=1))

    asyncio.run(sampled())
    assert len(set(keys)) == 3


@pytest.mark.parametrize(("executions", "rollouts"), [
    ([None, None], [None, None]), ([4, 4, 9], [0, 0, 1]), ([4, 9], [None, None]), ([[None, None], None], [0, 0, 1]),
    ([[4, 4], 7, 7], [0, 0, 1, 1])])
def test_samples_of_one_rollout_id_are_one_rollout(executions, rollouts):
    """Miles has it in flat groups, too: siblings share a reward and count once in denominators."""
    def one(rollout_id):
        return sample([1, 2], 1, [0], group_index=None, prompt="", label=None, rollout_id=rollout_id)

    async def sampled():
        args = arguments()
        places = Places(Numbers(), 1)
        groups = [[list(map(one, ids)) if isinstance(ids, list) else one(ids) for ids in executions]]
        schedule = Schedule(lambda given: groups, args, places, lambda args: None, lambda name, value: None)
        generation = Generation(SimpleNamespace(version=1), SamplingParams(), 1, None, None, 5.0)
        return await schedule.group(places.next(), generation)

    found = asyncio.run(sampled())
    assert [one.rollout for one in found] == rollouts and [one.index for one in found] == [*range(len(found))]


def test_passes_over_a_dataset_that_is_not_there_cannot_be_counted():
    with pytest.raises(ConfigError) as caught:
        len(Places(NoPrompts(), 4))
    assert caught.value.code == "num-epoch-without-dataset"


def arguments(**more):
    """What a schedule reads of Miles's arguments."""
    return SimpleNamespace(**{"rollout_seed": 0, "rollout_max_context_len": 8, "max_lag": 0, "reward_key": "score",
                              "debug_rollout_only": False, "debug_train_only": False} | more)


def answer(context, ids):
    ids = np.array(ids, np.int32)
    return Drawn(tuple(context), Response(ids, -np.arange(1.0, len(ids) + 1, dtype=np.float32), np.full(len(ids), 3),
                                          "stop"))


def sample(tokens, length, mask, **more):
    return SimpleNamespace(tokens=tokens, response_length=length, loss_mask=mask, status="completed", response="",
                           remove_sample=False, metadata={}, reward=None, **more)


SESSION = SimpleNamespace(generation=SimpleNamespace(engine=SimpleNamespace(version=9), vocabulary=16,
                                                     sampling=SamplingParams(),
                                                     on_response=lambda sample, response: sample),
                          args=SimpleNamespace(reward_key="score", debug_train_only=False))


def test_log_probs_are_those_of_the_context_that_a_token_followed():
    """Two answers hold the same tokens; the second follows what the sample says."""
    answers = [answer([1, 2], [7, 8]), answer([5, 6], [7, 8])]
    answers[1].response.log_probs[:] = -0.125
    found = drawn(sample([5, 6, 7, 8, 0, 4], 4, [1, 1, 0, 0]), Prompt(0, 0, "", (5, 6)), 0, answers, SESSION)
    assert found.columns["rollout_log_probs"].tolist() == [-0.125, -0.125, 0, 0]
    assert found.columns["versions"].tolist() == [3, 3, 3, 3]
    with pytest.raises(HookError):
        drawn(sample([5, 6, 9], 1, [1]), Prompt(0, 0, "", (5, 6)), 0, answers, SESSION)


def test_groups_that_a_rollout_left_over_are_not_trained_on_by_other_weights():
    """A function that gives three groups where two are needed: with --max-lag the third would be older than that."""
    calls: list[int] = []
    logged: dict[str, float] = {}

    def rollout(args, rollout_id, data_buffer, evaluation):
        calls.append(rollout_id)
        return [[sample([1, len(calls)], 1, [0], group_index=None, prompt="", label=None)] for _ in range(3)]

    async def sampled(max_lag):
        engine = SimpleNamespace(version=1)
        args = SimpleNamespace(rollout_seed=0, rollout_max_context_len=8, max_lag=max_lag, debug_rollout_only=False,
                               debug_train_only=False,
                               reward_key="score")
        places = Places(Numbers(), 2)
        schedule = Schedule(rollout, args, places, lambda args: None, lambda name, value: logged.update({name: value}))
        found = []
        for version in (1, 2):
            engine.version = version
            for _ in range(2):
                generation = Generation(engine, SamplingParams(), 1, lambda *key: 0, lambda *ids: "", 5.0)
                (one,) = await schedule.group(places.next(), generation)
                found.append(int(one.tokens[1]))
        return found

    assert asyncio.run(sampled(0)) == [1, 1, 2, 2] and logged == {"surplus_groups": 1} and calls == [0, 1]
    assert asyncio.run(sampled(1)) == [3, 3, 4, 4]


def test_a_rollout_is_named_by_its_own_number_after_drops():
    """Dropped groups use up places of the rollouts to come."""
    told: list[int] = []

    def rollout(args, rollout_id, data_buffer, evaluation):
        told.append(rollout_id)
        return [[sample([1, 2], 1, [0], group_index=None, prompt="", label=None)]]

    async def sampled():
        args = arguments()
        places = Places(Numbers(), 1)
        schedule = Schedule(rollout, args, places, lambda args: None, lambda name, value: None)
        for version in (1, 1, 1, 2):
            engine = SimpleNamespace(version=version)
            await schedule.group(places.next(), Generation(engine, SamplingParams(), 1, None, None, 5.0))

    asyncio.run(sampled())
    assert told == [0, 0, 0, 1]


def test_a_reward_may_be_a_dict():
    args = SimpleNamespace(reward_key="score")
    assert reward_of(SimpleNamespace(reward={"score": 2, "more": 1}), args) == 2.0
    assert reward_of(SimpleNamespace(reward=None), args) is None
    with pytest.raises(HookError):
        reward_of(SimpleNamespace(reward={"acc": 1}), args)


def test_an_eval_function_is_called_once_for_each_evaluation():
    """What it says nothing of is left to the run; too few answers are an error, and too many with the next one."""
    calls: list[int] = []
    logged: dict[str, float] = {}
    given = [0.0, 1.0]

    def evaluate(args, rollout_id, data_buffer, evaluation):
        calls.append(rollout_id)
        return SimpleNamespace(data={"mine": {"rewards": [*given]}}, metrics={"eval/time": 3, "word": "no"})

    async def evaluation():
        evaluations = Evaluations(evaluate, SimpleNamespace(rollout_seed=0, rollout_max_context_len=8),
                                  lambda name, value: logged.update({name: value}))
        generation = SimpleNamespace(samples=1, engine=SimpleNamespace(version=5))
        rewards = []
        for _ in range(2):
            for uid in range(2):
                (one,) = await evaluations.group(Prompt(uid, uid, "", (1,), stream="eval/mine"), generation)
                rewards.append(one.reward)
            assert await evaluations.group(Prompt(0, 0, "", (1,), stream="eval/other"), generation) is None
        with pytest.raises(HookError):
            await evaluations.group(Prompt(9, 9, "", (1,), stream="eval/mine"), generation)
        given.append(0.5)
        await evaluations.group(Prompt(0, 0, "", (1,), stream="eval/mine"), generation)
        with pytest.raises(HookError):
            await evaluations.group(Prompt(0, 0, "", (1,), stream="eval/mine"), generation)
        return rewards

    assert asyncio.run(evaluation()) == [0.0, 1.0, 0.0, 1.0]
    assert calls == [4, 4, 4] and logged == {"time": 3.0}
