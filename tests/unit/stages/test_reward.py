"""Scorers: per sample or per group, plain or async; whatever goes wrong is an error with a name, never a zero."""

import asyncio
import math
import threading

import numpy as np
import pytest
from miles_testing.toy import toy_group

from miles_core.errors import ColumnError, RewardError
from miles_core.stages.metrics import figures
from miles_core.stages.reward import Scoring, weighted_sum
from miles_core.types import Prompt

PROMPT = Prompt(3, 9, "", (1,))


def score(scorers, weights=None, combine=weighted_sum, timeout=5.0, samples=3, key="score"):
    """The group after the scorers."""
    group = toy_group(PROMPT, 1, samples=samples)
    for sample in group.samples:
        sample.reward = None
    weights = weights or dict.fromkeys(scorers, 1.0)
    return asyncio.run(Scoring(scorers, weights, combine, timeout, key)(group))


async def async_sample(sample):
    await asyncio.sleep(0.02 * (2 - sample.index))  # finishes in reverse order
    return sample.index


async def async_group(samples):
    return [sample.index for sample in samples]


SCOPES = {"plain, sample": lambda sample: sample.index, "plain, group": lambda samples: [s.index for s in samples],
          "async, sample": async_sample, "async, group": async_group,
          "numbers of numpy": lambda samples: [np.float32(s.index) for s in samples]}  # fmt: skip


@pytest.mark.parametrize("scope", SCOPES)
def test_every_scope_gives_each_sample_its_own_number(scope):
    group = score({"one": SCOPES[scope]})
    assert [sample.reward for sample in group.samples] == [0.0, 1.0, 2.0]
    assert [sample.rewards for sample in group.samples] == [{"one": float(i)} for i in range(3)]


def test_several_scorers_are_weighted_and_stay_visible():
    group = score({"a": lambda sample: 1.0, "b": async_sample}, {"a": 0.5, "b": 10.0})
    assert [sample.reward for sample in group.samples] == [0.5, 10.5, 20.5]
    assert group.samples[2].rewards == {"a": 1.0, "b": 2.0}


def test_a_combination_of_ones_own():
    scorers = {"a": lambda sample: 2.0, "b": lambda sample: 3.0}
    group = score(scorers, combine=lambda sample, weights: max(sample.rewards.values()))
    assert group.samples[0].reward == 3.0


def test_plain_scorers_do_not_block_the_loop():
    """Four groups whose scorers wait for each other are scored, so side by side."""
    together = threading.Barrier(4, timeout=30)

    def waits(samples):
        together.wait()
        return [0.0] * len(samples)

    async def main():
        scoring = Scoring({"slow": waits}, {"slow": 1.0}, weighted_sum, 60.0)
        return await asyncio.gather(*(scoring(toy_group(PROMPT, 1)) for _ in range(4)))

    assert [group.samples[0].reward for group in asyncio.run(main())] == [0.0] * 4


async def hangs(sample):
    await asyncio.sleep(60)


def raises(sample):
    raise ZeroDivisionError("by zero")


BAD = {
    "took longer": hangs, "ZeroDivisionError: by zero": raises, "one number for each of 3": lambda samples: [1.0],
    "float32 for train prompt 3": lambda sample: 10**400, "cannot be printed": lambda sample: 10**5000,
    "(got nan)": lambda sample: math.nan, "(got None)": lambda sample: None,
    "got 'right'": lambda sample: "right", "1e+300": lambda sample: 1e300, "-1e+39": lambda sample: -1e39,
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_a_failure_names_the_scorer_and_is_never_a_reward(message):
    with pytest.raises(RewardError) as caught:
        score({"fragile": BAD[message]}, timeout=0.1 if BAD[message] is hangs else 60.0)
    assert "'fragile'" in str(caught.value)
    assert message.replace("got 'right'", "right") in str(caught.value)


def writes(sample):
    sample.columns["tokens"][-1] = 7
    return 1.0


def replaces(samples):
    samples[0].columns["loss_mask"] = samples[0].columns["loss_mask"] * 0
    return [1.0] * len(samples)


def takes_away(sample):
    del sample.columns["rollout_log_probs"]
    return 1.0


async def writes_later(sample):
    sample.columns["versions"] += 1
    return 1.0


@pytest.mark.parametrize("scorer", [writes, replaces, takes_away, writes_later])
def test_a_scorer_that_changes_what_is_trained_on_is_named(scorer):
    with pytest.raises(ColumnError, match="'vandal'"):
        score({"vandal": scorer})
    with pytest.raises(ColumnError, match="combine_rewards"):
        score({"a": lambda sample: 1.0}, combine=lambda sample, weights: writes(sample))


def test_a_scorer_may_add_columns_and_what_was_there_can_be_written_afterwards():
    def adds(sample):
        assert sample.tokens.sum() > 0
        sample.columns["teacher"] = np.full(sample.response_length, 0.5)
        return 1.0

    for sample in score({"adds": adds, "again": adds}).samples:
        assert {"tokens", "teacher"} <= sample.columns.keys()
        assert all(array.flags.writeable for array in sample.columns.values())


def test_a_plain_scorer_that_hangs_is_given_up():
    let_go = threading.Event()
    with pytest.raises(RewardError, match="took longer"):
        score({"stuck": lambda sample: let_go.wait(60) or pytest.fail("it was waited for")}, timeout=0.1)
    let_go.set()


def test_a_combination_that_is_not_finite_is_an_error():
    with pytest.raises(RewardError, match="combine_rewards"):
        score({"a": lambda sample: 1.0}, combine=lambda sample, weights: math.inf)


def test_without_a_scorer_the_generator_has_to_have_set_the_reward():
    with pytest.raises(RewardError, match=r"\[sample-not-scored\]"):
        score({})

    async def main():
        group = toy_group(PROMPT, 1, reward=0.25)
        return await Scoring({}, {}, weighted_sum, 5.0)(group)

    assert [sample.reward for sample in asyncio.run(main()).samples] == [0.25, 0.25]


VERDICT = {"score": -1.0, "acc": False, "pred": "46", "length": np.float32(2.5), "lost": math.nan}


def test_of_a_dict_one_number_is_the_reward_and_the_others_are_figures():
    group = score({"dapo": lambda sample: VERDICT, "plain": lambda samples: [0.5] * len(samples)})
    assert [(sample.rewards, sample.reward) for sample in group.samples] == [({"dapo": -1.0, "plain": 0.5}, -0.5)] * 3
    assert group.samples[0].metadata["figures"] == {"reward/dapo/acc": 0.0, "reward/dapo/length": 2.5}
    assert figures(group.samples) == {
        "reward/dapo": -1.0, "reward/plain": 0.5, "reward/dapo/acc": 0.0, "reward/dapo/length": 2.5}


def test_the_key_names_the_reward_of_a_dict():
    group = score({"dapo": lambda samples: [VERDICT] * len(samples)}, key="acc")
    assert group.samples[0].reward == 0.0 and group.samples[0].metadata["figures"]["reward/dapo/score"] == -1.0


@pytest.mark.parametrize(("key", "words"), [("value", "--reward-key"), ("pred", "finite"), ("lost", "finite")])
def test_a_dict_without_the_number_is_an_error(key, words):
    with pytest.raises(RewardError, match=words):
        score({"dapo": lambda sample: VERDICT}, key=key)
