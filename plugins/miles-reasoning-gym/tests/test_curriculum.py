"""Levels: they rise and fall by what was scored, and a resumed run has those that it would have had."""

import json

import pytest
from miles_reasoning_gym.curriculum import Curriculum

from miles_core.errors import ConfigError

RISING = {"name": "chain_sum", "curriculum": True}


def curriculum(level=1, most=3):
    return Curriculum({"sums": level}, up=0.8, down=0.2, answers=4, most={"sums": most})


def scored(one, uids, score, level=None):
    for uid in uids:
        one.scored(uid, "sums", one.levels["sums"] if level is None else level, [score, score])
    one.end_of_rollout(max(uids))


@pytest.mark.parametrize(("score", "level"), [(1.0, 2), (0.8, 2), (0.5, 1), (0.2, 0), (0.0, 0)])
def test_a_level_moves_by_the_mean_score(score, level):
    one = curriculum()
    scored(one, [0, 1], score)
    assert one.levels == {"sums": level} and not one.counted


def test_it_is_judged_after_so_many_answers_at_its_own_level():
    one = curriculum()
    scored(one, [0], 1.0)
    scored(one, [1, 2, 3], 1.0, level=0)
    assert one.levels == {"sums": 1}
    scored(one, [4], 1.0)
    assert one.levels == {"sums": 2}


def test_it_stays_within_the_curriculum():
    top, bottom = curriculum(3), curriculum(0)
    scored(top, [0, 1], 1.0)
    scored(bottom, [0, 1], 0.0)
    assert (top.levels, bottom.levels) == ({"sums": 3}, {"sums": 0})


def test_what_was_begun_beyond_the_batch_is_counted_when_it_comes_again():
    one = curriculum()
    one.scored(0, "sums", 1, [1.0, 1.0])
    one.scored(1, "sums", 1, [0.0, 0.0])
    one.end_of_rollout(0)
    assert one.counted == {"sums": [2.0, 2]}
    scored(one, [1], 1.0)
    assert one.levels == {"sums": 2}


def test_a_resumed_run_counts_what_lay_finished_in_the_buffer():
    """With --max-lag groups are scored before a checkpoint and trained on after it."""
    one, resumed = curriculum(), curriculum()
    one.scored(0, "sums", 1, [1.0, 1.0])
    one.scored(1, "sums", 1, [1.0, 1.0])
    one.end_of_rollout(0)
    resumed.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for each in (one, resumed):
        each.end_of_rollout(1)
        assert each.levels == {"sums": 2} and not each.counted


def test_the_source_draws_at_the_level_of_now_and_its_state_has_it(source):
    prompts = source([RISING])
    easy = prompts.next()
    prompts._curriculum.scored(easy.uid, "chain_sum", 0, [1.0] * 4)
    prompts._curriculum.end_of_rollout(easy.uid)
    prompts._curriculum.scored(1, "chain_sum", 1, [1.0])
    prompts._curriculum.end_of_rollout(1)
    resumed = source([RISING])
    resumed.load_state_dict(json.loads(json.dumps(prompts.state_dict())))
    one, other = prompts.next(), resumed.next()
    assert (one.text, one.metadata) == (other.text, other.metadata)
    assert [prompt.metadata["reasoning_gym"]["level"] for prompt in (easy, one)] == [0, 1]
    assert prompts.state_dict() == resumed.state_dict()


def test_a_key_that_the_curriculum_sets_is_not_for_the_config(source):
    with pytest.raises(ConfigError, match="max_terms") as caught:
        source([RISING | {"config": {"max_terms": 3}}])
    assert caught.value.code == "reasoning-gym-key-of-curriculum"
