"""Every value knows who set it; flags win over the file and the file over defaults; defaults are pinned."""

import pytest

from miles_core.config.tables import RunConfig


def origin(plan, key):
    return str(plan.config.origin.get(key, "default"))


def test_who_set_a_value(plan):
    made = plan("--eps-clip", "0.1", "--micro_batch_size=4")
    assert origin(made, "rollout.rollout_temperature") == "default"
    assert origin(made, "rollout.rollout_batch_size") == "recipe.toml:8"
    assert origin(made, "optimizer.lr") == "recipe.toml:14"
    assert origin(made, "megatron.num_layers") == "recipe.toml:15"
    assert origin(made, "algorithm.eps_clip") == "--eps-clip"
    assert origin(made, "perf.micro_batch_size") == "--micro-batch-size"
    assert origin(made, "rollout.global_batch_size") == "batch arithmetic"
    assert made.config.origin["rollout.global_batch_size"].kind == "derived"


def test_a_flag_wins_over_the_file_and_takes_the_blame(plan):
    made = plan("--lr", "1e-3", "--rollout-batch-size", "16")
    assert made.config.optimizer.lr == 1e-3 and origin(made, "optimizer.lr") == "--lr"
    assert made.config.rollout.rollout_batch_size == 16


def test_the_last_of_two_flags_wins(plan):
    assert plan("--lr", "1e-3", "--lr", "1e-4").config.optimizer.lr == 1e-4


def test_a_derived_value_does_not_take_the_place_of_a_given_one(plan):
    made = plan("--global-batch-size", "16")
    assert origin(made, "rollout.global_batch_size") == "--global-batch-size"
    assert made.config.rollout.num_steps_per_rollout == 2
    assert origin(made, "rollout.num_steps_per_rollout") == "batch arithmetic"


@pytest.mark.parametrize(("flags", "band", "who"), [
    ((), (0.2, 0.28), "default"),
    (("--eps-clip", 4e-4), (4e-4, 4e-4), "as eps_clip"),
    (("--eps-clip", 4e-4, "--eps-clip-high", 0.3), (4e-4, 0.3), "--eps-clip-high"),
    (("--eps-clip-high", 0.3), (0.2, 0.3), "--eps-clip-high"),
])  # fmt: skip
def test_a_width_of_the_clip_band_that_is_given_alone_is_that_of_both_sides(plan, flags, band, who):
    made = plan(*flags)
    assert (made.config.algorithm.eps_clip, made.config.algorithm.eps_clip_high) == band
    assert origin(made, "algorithm.eps_clip_high") == who


def test_the_plan_prints_what_is_not_a_default_with_its_origin(plan):
    text = plan("--eps-clip", "0.1").to_text()
    assert "algorithm.eps_clip = 0.1  (--eps-clip)" in text
    assert "optimizer.lr = 2e-05  (recipe.toml:14)" in text
    assert "max_lag 0" in text and "rollout_temperature" not in text


def test_the_text_of_a_plan_is_the_same_bytes_every_time(plan):
    one, other = plan("--max-lag", "1"), plan("--max-lag", "1")
    assert one.to_text() == other.to_text() and one.digest == other.digest
    assert plan("--max-lag", "2").digest != one.digest


DEFAULTS = {
    "algorithm.advantage_estimator": "grpo", "algorithm.eps_clip": 0.2, "algorithm.eps_clip_high": 0.28,
    "algorithm.eps_clip_c": None, "algorithm.use_kl_loss": False, "algorithm.kl_loss_coef": 0.0,
    "algorithm.entropy_coef": 0.0,
    "algorithm.kl_loss_type": "k1", "algorithm.calculate_per_token_loss": False, "optimizer.lr": 1e-6,
    "optimizer.lr_decay_style": "constant", "optimizer.lr_warmup_iters": 0, "optimizer.weight_decay": 0.0,
    "optimizer.adam_beta1": 0.9, "optimizer.adam_beta2": 0.95, "optimizer.clip_grad": 1.0, "rollout.max_lag": 0,
    "rollout.rollout_temperature": 1.0, "rollout.rollout_top_p": 1.0, "rollout.rollout_top_k": -1,
    "rollout.rollout_seed": 42,
    "rollout.rollout_shuffle": False, "rollout.n_samples_per_prompt": 1, "perf.bf16": True, "perf.micro_batch_size": 1,
    "perf.use_dynamic_batch_size": False, "perf.trainer": "megatron", "perf.weight_sync": None,
    "optimizer.seed": 1234,
}  # fmt: skip


@pytest.mark.parametrize("key", DEFAULTS)
def test_defaults(key):
    table, _, name = key.partition(".")
    assert getattr(getattr(RunConfig(), table), name) == DEFAULTS[key]


def test_defaults_that_a_plan_derives(plan):
    made = plan()
    assert made.config.rollout.num_steps_per_rollout == 1 and made.config.rollout.global_batch_size == 32
    assert made.config.rollout.over_sampling_batch_size == 8
    assert made.owner("reduction").name == "sample" and made.owner("policy_loss").name == "clip"
    assert made.owner("engine").name == "local" and made.owner("placement").name == "local"
    assert made.owner("weight_sync").name == "in-process"


def test_the_buffer_is_first_in_first_out(plan):
    """The only buffer there is takes batches in the order in which groups were started (tests/unit/test_loop.py)."""
    from miles_core.plugins.select import all_specs

    assert "buffer" not in all_specs()
