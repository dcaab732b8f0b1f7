"""What a rollout brought, where its samples are not all alike."""

from miles_testing.batches import make_sample

from miles_core.stages.metrics import rollout_metrics
from miles_core.types import Batch, Group


def batch_of(*samples):
    return Batch(0, [Group(sample.prompt, [sample]) for sample in samples], 3)


def test_an_answer_without_a_token_is_no_reason_for_a_run_to_end():
    """A generator may find no room for one, and of its group nobody says how old it is."""
    found = rollout_metrics(batch_of(make_sample(0, 0, 1.0, mask=()), make_sample(1, 0, 0.0)))
    assert found["rollout/weight_version/lag"] == 2 and found["rollout/response_len/min"] == 0
    assert rollout_metrics(batch_of(make_sample(0, 0, 1.0, mask=())))["rollout/weight_version/lag"] == 0


def test_scores_are_means_over_the_samples_that_have_them():
    """As of agents that score their answers by names of their own."""
    one, other = make_sample(0, 0, 1.0), make_sample(1, 0, 0.0)
    one.rewards, other.rewards = {"mine": 1.0}, {"yours": 0.5}
    found = rollout_metrics(batch_of(one, other))
    assert found["rollout/reward/mine"] == 1.0 and found["rollout/reward/yours"] == 0.5


def test_what_no_trainer_s_weights_drew_has_no_age():
    """--debug-rollout-only's answers, or a training step on those: they are not older by the number of rollouts."""
    sample = make_sample(0, 0, 1.0)
    assert rollout_metrics(batch_of(sample))["rollout/staleness/max"] == 2
    sample.columns["versions"] = sample.columns["versions"] * 0
    ages = {"weight_version/lag", "staleness/mean", "staleness/max", "off_policy_tokens"}
    assert not rollout_metrics(batch_of(sample)).keys() & {f"rollout/{name}" for name in ages}


def test_one_answer_is_no_group_of_one_score():
    """Of PPO or SFT: all groups would look as if they taught nothing."""
    one, twin = make_sample(0, 0, 1.0), make_sample(0, 1, 1.0)
    assert "rollout/zero_std/percentage" not in rollout_metrics(batch_of(one))
    assert rollout_metrics(Batch(0, [Group(one.prompt, [one, twin])], 3))["rollout/zero_std/percentage"] == 1


def test_a_rollout_of_several_samples_counts_once():
    """As in baselines and evaluations: an agent of many conversations is not rewarded more often than one of few."""
    many, few = [make_sample(0, i, 1.0, rollout=0) for i in range(3)], [make_sample(0, 3, 0.0, rollout=1)]
    found = rollout_metrics(Batch(0, [Group(many[0].prompt, [*many, *few])], 3))
    assert found["rollout/raw_reward"] == 0.5 and found["rollout/zero_std/percentage"] == 0
    many[0].metadata["raw_reward"] = many[1].metadata["raw_reward"] = many[2].metadata["raw_reward"] = 2.0
    few[0].metadata["raw_reward"] = 0.0
    found = rollout_metrics(Batch(0, [Group(many[0].prompt, [*many, *few])], 3))
    assert (found["rollout/raw_reward"], found["rollout/rewards"]) == (1.0, 0.5)
    alone = rollout_metrics(Batch(0, [Group(many[0].prompt, many)], 3))
    assert "rollout/zero_std/percentage" not in alone, "one answer, of three conversations"


def test_answers_that_all_failed_have_a_reward_and_demonstrations_none():
    """Also where the generator gives the rewards itself: no scorer has left any."""
    failed = [make_sample(uid, 0, 0.0) for uid in range(2)]
    assert rollout_metrics(batch_of(*failed))["rollout/raw_reward"] == 0
    given = make_sample(0, 0, 0.0, rollout_log_probs=(0, 0))
    assert "rollout/raw_reward" not in rollout_metrics(batch_of(given))
