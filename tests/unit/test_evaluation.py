"""When an evaluation is due, and what its figures mean."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_testing.toy import toy_group

from miles_core.evaluation import Dataset, Evaluation, metrics_of, pass_at_k
from miles_core.stages.reward import Scoring, weighted_sum
from miles_core.types import Prompt

PROMPT = Prompt(0, 0, "", (1,), stream="eval/x")


def group(rewards):
    made = toy_group(PROMPT, 1, samples=len(rewards))
    for sample, reward in zip(made.samples, rewards, strict=True):
        sample.reward, sample.rewards = reward, {"digits": reward}
    return made


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=8), st.data())
def test_pass_at_k_counts_the_subsets_with_a_right_answer(rewards, data):
    k = data.draw(st.integers(1, len(rewards)))
    subsets = list(itertools.combinations(rewards, k))
    brute = sum(max(subset) >= 1 for subset in subsets) / len(subsets)
    assert pass_at_k(group(rewards), k) == pytest.approx(brute, abs=1e-12)


def test_metrics_by_hand():
    found = metrics_of("math", [group([1.0, 0.0, 0.0, 0.0]), group([1.0, 1.0, 0.0, 0.0])])
    assert found["eval/math"] == pytest.approx(3 / 8) == found["eval/math/reward/digits"]
    assert found["eval/math-pass@1"] == pytest.approx((1 / 4 + 2 / 4) / 2)
    assert found["eval/math-pass@2"] == pytest.approx((1 / 2 + 5 / 6) / 2)
    assert found["eval/math-pass@4"] == 1.0 and "eval/math-pass@8" not in found
    assert found["eval/math/response_len/mean"] == 2.0 and found["eval/math-truncated_ratio"] == 0.0


def test_a_rollout_of_several_samples_counts_once():
    """Of two rollouts the first has three samples; and no k of pass@k is above what every group has."""
    split, other = group([1.0, 1.0, 1.0, 0.0]), group([0.0, 0.0, 0.0])
    for sample, rollout in zip(split.samples, (0, 0, 0, 1), strict=True):
        sample.rollout = rollout
    assert pass_at_k(split, 1) == 0.5 and pass_at_k(split, 2) == 1.0
    assert metrics_of("math", [split])["eval/math"] == 0.5
    found = metrics_of("math", [split, other])
    assert [key for key in found if "pass@" in key] == ["eval/math-pass@1", "eval/math-pass@2"]
    assert found["eval/math-pass@1"] == 0.25 and found["eval/math-pass@2"] == 0.5


def test_a_score_that_some_samples_lack_is_the_mean_of_the_others():
    made = group([1.0, 0.5])
    made.samples[0].rewards = {}
    assert metrics_of("math", [made])["eval/math/reward/digits"] == 0.5


def test_one_answer_per_prompt_has_no_pass_at_k():
    assert not [key for key in metrics_of("math", [group([1.0])]) if "pass@" in key]


@pytest.mark.parametrize(("interval", "skip", "expected"), [
    (2, False, ["before", 2, 4, 5]), (5, False, ["before", 5]), (1, True, [1, 2, 3, 4, 5]), (None, False, []),
])  # fmt: skip
def test_due_at_both_ends_and_by_interval(interval, skip, expected):
    evaluation = Evaluation([object()], interval, skip)
    found = ["before"] * evaluation.due(0, 5)
    found += [n for n in range(1, 6) if evaluation.due(n, 5)]
    assert found == expected


def test_without_a_dataset_nothing_is_due():
    assert not Evaluation([], 1).due(0, 5)


def test_every_prompt_of_every_dataset_is_generated_and_scored_once():
    seen = []

    async def generate(prompt):
        seen.append((prompt.stream, prompt.uid))
        return toy_group(prompt, 1)

    scorings = {name: Scoring({"one": lambda sample, one=one: one}, {"one": 1.0}, weighted_sum, 5.0)
                for name, one in (("a", 1.0), ("b", {"score": 0.5, "acc": True}))}
    datasets = [Dataset(name, [Prompt(i, i, "", (1,), stream=name) for i in range(3)], generate, scorings[name])
                for name in "ab"]
    found = asyncio.run(Evaluation(datasets, 1)())
    assert sorted(seen) == [(name, uid) for name in "ab" for uid in range(3)]
    figures = [(name, metrics[f"eval/{name}"], len(samples)) for name, metrics, samples in found]
    assert figures == [("a", 1.0, 6), ("b", 0.5, 6)]
    assert found[1][1]["eval/b/reward/one/acc"] == 1.0
