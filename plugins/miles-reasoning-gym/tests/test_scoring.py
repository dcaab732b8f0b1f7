"""Scores are the task's own, of the answer where it stands; what cannot be judged is counted."""

import pytest
from miles_reasoning_gym import problems
from miles_reasoning_gym.plugin import ReasoningGym, ReasoningGymOptions
from miles_reasoning_gym.problems import Task
from miles_testing import canned_samples, reward_contract

from miles_core.config.tables import RunConfig
from miles_core.errors import RewardError


def sample(text, task="chain_sum", number=7, **changes):
    """An answer to a problem; RIGHT in the text stands for what is right."""
    asked = {"task": task, "config": "{}", "level": None, "number": number}
    asked["answer"] = problems.draw(Task(task), None, number)["answer"]
    one = canned_samples(row={"reasoning_gym": asked | changes})[0]
    one.text = text.replace("RIGHT", asked["answer"])
    return one


def score(one, **options):
    return ReasoningGym(ReasoningGymOptions(tasks=["chain_sum"], **options), RunConfig()).reward(one)


@pytest.mark.parametrize(("where", "text", "wanted"), [
    ("tag", "I think.\n<answer> RIGHT </answer><|im_end|>", 1.0),
    ("tag", "<answer>1</answer><answer>RIGHT</answer>", 1.0),
    ("tag", "RIGHT", 0.0), ("tag", "<answer>RIGHT.00</answer>", 1.0), ("boxed", "\\boxed{RIGHT}", 1.0),
    ("boxed", "<answer>RIGHT</answer>", 0.0), ("text", " RIGHT<|im_end|>", 1.0), ("text", "x", 0.0)])
def test_the_answer_is_scored_where_it_stands(where, text, wanted):
    one = sample(text)
    assert score(one, answer=where) == wanted
    figures = one.metadata["figures"]
    assert figures["reasoning_gym/chain_sum"] == wanted and figures["reasoning_gym_ungraded"] == 0


def test_a_task_that_takes_several_answers_takes_them():
    """Every way to 24, not the one that its generator had in mind."""
    made = problems.draw(Task("countdown"), None, 3)
    assert score(sample(f"<answer>{made['answer']}</answer>", "countdown", 3)) == 1.0
    assert score(sample("<answer>1</answer>", "countdown", 3)) < 0.1


def test_an_answer_that_takes_too_long_scores_nothing_and_is_counted():
    one = sample("<answer>9**9**9**9</answer>", "countdown", 3)
    assert score(one, scoring_timeout=0.5) < 0.1
    assert one.metadata["figures"]["reasoning_gym_ungraded"] == 1.0 and one.metadata["reasoning_gym_ungraded"]
    assert score(sample("<answer>RIGHT</answer>"), scoring_timeout=0.5) == 1.0, "another process answers"


def test_another_problem_than_was_asked_is_an_error_and_no_score():
    with pytest.raises(RewardError) as caught:
        score(sample("<answer>RIGHT</answer>", answer="something else"))
    assert caught.value.code == "reasoning-gym-problem-changed"
    with pytest.raises(RewardError) as caught:
        score(canned_samples()[0])
    assert caught.value.code == "reasoning-gym-other-prompt"


def test_it_is_a_scorer():
    def samples():
        asked = sample("").prompt.metadata
        return canned_samples(row=asked)

    reward_contract(ReasoningGym(ReasoningGymOptions(), RunConfig()).reward, samples=samples)
