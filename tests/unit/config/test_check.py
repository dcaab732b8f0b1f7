"""Relations between values: batch arithmetic as a table, and what does not start with the reason for it."""

import pytest

from miles_core.errors import BatchError, CheckpointError, ConfigError, OwnerError

# rollout_batch_size, n_samples_per_prompt, global_batch_size, num_steps_per_rollout -> batch, steps (None: refused)
ARITHMETIC = [
    (8, 4, None, None, (32, 1)), (8, 4, 32, None, (32, 1)), (8, 4, 16, None, (16, 2)), (8, 4, None, 4, (8, 4)),
    (8, 4, 8, 4, (8, 4)), (8, 4, 1, None, (1, 32)), (1, 1, None, None, (1, 1)), (6, 5, 10, None, (10, 3)),
    (8, 4, 5, None, None), (8, 4, None, 5, None), (8, 4, 16, 4, None), (8, 4, 64, None, None),
]  # fmt: skip


@pytest.mark.parametrize(("prompts", "answers", "batch", "steps", "expected"), ARITHMETIC)
def test_batch_arithmetic(plan, prompts, answers, batch, steps, expected):
    flags = ["--rollout-batch-size", prompts, "--n-samples-per-prompt", answers]
    for flag, value in (("--global-batch-size", batch), ("--num-steps-per-rollout", steps)):
        flags += [flag, value] if value is not None else []
    if expected is None:
        with pytest.raises(BatchError, match="batch|steps|n_samples"):
            plan(*flags)
        return
    rollout = plan(*flags, "--disable-rewards-normalization").config.rollout
    assert (rollout.global_batch_size, rollout.num_steps_per_rollout) == expected
    assert prompts * answers == rollout.global_batch_size * rollout.num_steps_per_rollout


def test_the_message_names_all_knobs_and_who_set_them(plan):
    with pytest.raises(BatchError) as caught:
        plan("--global-batch-size", 5)
    for part in ("rollout.rollout_batch_size (recipe.toml:8)", "rollout.n_samples_per_prompt (recipe.toml:9)",
                 "rollout.global_batch_size (--global-batch-size)", "8 x 4 = 32"):
        assert part in str(caught.value)


@pytest.mark.parametrize("flag", ["--run-dir", "--save", "--load"])
def test_a_path_that_the_system_refuses_is_not_the_checkpoints(plan, flag):
    with pytest.raises(CheckpointError, match=rf"^\S*{'x' * 300}\S*: .* \(got OSError: .*File name too long"):
        plan(flag, "x" * 300)


REFUSED = {
    "below rollout_batch_size": ["--over-sampling-batch-size", 4],
    "rollout.max_lag should be at least 0": ["--max-lag", -1],
    "[colocate-needs-lag-zero]": ["--colocate", "--max-lag", 1],
    "max_weight_staleness should be at least 0": ["--max-weight-staleness", -1],
    "no room for one group": ["--async-max-concurrent-samples", 1],
    "rollout_top_p 0": ["--rollout-top-p", 0],
    "3 weights": ["--rm-weights", 1, 2, 3],
    "named twice": ["--rm-type", "math", "math"],
    "rounds bf16 logits": ["--fp32-lm-head", "--bf16", "--engine", "local"],
    "NAME PATH pairs": ["--eval-interval", 2, "--eval-prompt-data", "a", "a.jsonl", "b"],
    "eps_clip_c 1.0": ["--eps-clip-c", 1.0],
    "eval_temperature should be at least 0": ["--eval-temperature", -0.5],
    "rollout_top_p should be at least 0 and at most 1": ["--rollout-top-p", 2],
    "num_steps_per_rollout 2": ["--skip-actor-forward-only", "--num-steps-per-rollout", 2],
    "calculate_per_token_loss True, reduction": ["--calculate-per-token-loss", "--reduction", "sample"],
    "reduction_constant should be": ["--reduction", "constant", "--reduction-constant", 0],
    "kl_coef 0.1, kl_loss_coef 0.1": ["--kl-coef", 0.1, "--use-kl-loss", "--kl-loss-coef", 0.1],
    "skip_actor_forward_only True, kl_coef 0.1": ["--kl-coef", 0.1, "--skip-actor-forward-only"],
    "gamma should be at least 0 and at most 1": ["--gamma", 1.5],
    "lambd should be": ["--lambd", -0.1],
    # A trainer would climb the loss, let weights grow, or make no log-probs at all: -1 is "off" elsewhere.
    "clip_grad should be at least 0": ["--clip-grad", -1],
    "min_lr should be at least 0": ["--min-lr", -1e-3],
    "weight_decay should be at least 0": ["--weight-decay", -0.1],
    "adam_beta1 should be at least 0 and at most 1": ["--adam-beta1", 1.5],
    "adam_beta2 should be at least 0": ["--adam-beta2", -0.9],
    "adam_eps should be at least 0": ["--adam-eps", -1e-8],
    "lr_warmup_iters should be at least 0": ["--lr-warmup-iters", -3],
    "lr_decay_iters should be at least 1": ["--lr-decay-iters", 0],
    "log_probs_chunk_size should be at least -1": ["--log-probs-chunk-size", -2],
    "log_probs_max_tokens_per_gpu should be at least 1": ["--log-probs-max-tokens-per-gpu", 0],
    "rollout.rollout_batch_size should be at least 1": ["--rollout-batch-size", 0],
    "rollout.n_samples_per_prompt should be at least 1": ["--n-samples-per-prompt", -8],
    "rollout.global_batch_size should be at least 1": ["--global-batch-size", 0],
    "rollout.num_steps_per_rollout should be at least 1": ["--num-steps-per-rollout", 0],
    "1 rank does not divide by tensor_model_parallel_size 2": ["--tensor-model-parallel-size", 2],
    "needs max_tokens_per_gpu": ["--use-dynamic-batch-size"],
    "does not divide by micro_batch_size": ["--micro-batch-size", 5],
    "[train-only-without-data]": ["--debug-train-only"],
    "should hold {rollout_id}": ["--save-debug-rollout-data", "data"],
    "old policy's log-probs": ["--hidden-dropout", 0.1],
    "[debug-modes-exclusive]": ["--debug-rollout-only", "--load-debug-rollout-data", "{rollout_id}"],
    "should be one of": ["--use-pytorch-profiler", "--profile-target", "train_critic"],
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_impossible_relations_do_not_start(plan, message):
    with pytest.raises(ConfigError) as caught:
        plan(*REFUSED[message])
    assert message in str(caught.value) and "Fix:" in str(caught.value)


@pytest.mark.parametrize("line", ['hf_checkpoint = "elsewhere/tiny"', 'prompt_data = "data/train.jsonl"',
                                  "rollout_batch_size = 8", "num_rollout = 3"])
def test_what_is_needed_is_asked_for(plan, line):
    with pytest.raises(ConfigError, match=rf"{line.partition(' ')[0]} .*\[setting-required\]"):
        plan(**{line: ""})


NOTED = {
    "sampling runs 0 rollout(s) ahead": ["--max-lag", 2, "--max-weight-staleness", 0],
    "reads checkpoint.save_interval, eval.eval_interval": ["--save-interval", 1, "--eval-interval", 2],
    "uncut distribution": ["--rollout-top-p", 0.9],
    "num_epoch is ignored": ["--num-epoch", 2],
    "rides alone": ["--use-dynamic-batch-size", "--max-tokens-per-gpu", 100],
    "--debug-train-only is implied": ["--load-debug-rollout-data", "data/{rollout_id}"],
    "the reference model is --hf-checkpoint": ["--use-kl-loss"],
    "overrides micro_batch_size": ["--use-dynamic-batch-size", "--max-tokens-per-gpu", 9999, "--micro-batch-size", 2],
    "changes nothing": ["--padded-vocab-size", 512],
    "nothing that is enabled reads algorithm.kl_loss_coef, algorithm.reduction_constant, debug.profile_step_end": [
        "--kl-loss-coef", 0.1, "--reduction-constant", 8, "--profile-step-end", 3],
    "reads rollout.max_weight_staleness": ["--max-weight-staleness", 1],
    "reads tis.tis_clip, tis.rs_upper_bound, tis.opsm_delta": [
        "--plugin", "tis", "--tis-clip", 3, "--rs-upper-bound", 3, "--opsm-delta", 1e-3],
    "reads eval.eval_temperature, remote-rm.rm_retries": [
        "--eval-temperature", 0, "--plugin", "remote-rm", "--remote-rm.rm-retries", 2],
}  # fmt: skip


@pytest.mark.parametrize("text", NOTED)
def test_documented_overrides_are_announced(plan, text):
    made = plan(*NOTED[text])
    assert any(text in note for note in made.notes) and text in made.to_text()


@pytest.mark.parametrize(("flags", "idle"), [
    *((["--lr-decay-style", style, "--min-lr", 1e-7, "--lr-decay-iters", 2], []) for style in (
        "linear", "cosine", "inverse-square-root")),
    (["--min-lr", 1e-7, "--lr-decay-iters", 2], ["min_lr", "lr_decay_iters"]),
    (["--lr-warmup-fraction", 0.5, "--lr-decay-iters", 2], []),  # a share of these
    (["--lr-warmup-fraction", 0.5, "--lr-warmup-iters", 1], ["lr_warmup_fraction"]),
])
def test_what_a_schedule_does_not_read_is_said_of_nothing_else(plan, flags, idle):
    [*said] = (note for note in plan(*flags).notes if "nothing that is enabled reads" in note)
    assert [word.partition("optimizer.")[2].strip(",") for note in said for word in note.split()[5:]] == idle


@pytest.mark.parametrize("switch", ["--use-tis", "--use-rs"])
def test_bounds_of_a_correction_are_read_once_it_is_on(plan, switch):
    notes = plan("--plugin", "tis", switch, "--tis-clip", 3, "--rs-veto-threshold", 1e-4).notes
    assert not [note for note in notes if "nothing that is enabled reads" in note]


@pytest.mark.parametrize("flags", [
    ["--async-max-concurrent-samples", 8],
    ["--max-restarts", 1],  # from the start of the run
    ["--plugin", "partial-rollout", "--over-sampling-batch-size", 16, "--batch-order", "window",
     "--max-weight-staleness", 1, "--async-unused-samples-handler", "retry"]])
def test_what_acts_without_a_lag_or_a_checkpoint_has_a_reader(plan, flags):
    assert not [note for note in plan(*flags).notes if "nothing that is enabled reads" in note]


def test_what_is_turned_off_has_no_reader_and_needs_none(plan):
    off = ("--save", "none", "--save-interval", "none", "--save-hf", "none", "--no-async-save", "--eval-interval",
           "none")
    assert not [note for note in plan(*off).notes if "nothing that is enabled reads" in note]


def test_an_eval_dataset_knows_its_keys(plan, run_file):
    from miles_core.config.check import check
    from miles_core.config.load import load

    text = "\n[[eval.datasets]]\nname = \"a\"\npath = \"a.jsonl\"\ntemprature = 0.5\n"
    path = run_file()
    path.write_text(path.read_text() + text)
    with pytest.raises(ConfigError, match="no key 'temprature'"):
        check(load(path).config)


def test_parts_that_nobody_offers_name_the_nearest(plan):
    with pytest.raises(OwnerError, match="did you mean 'local'"):
        plan("--engine", "locl")
    with pytest.raises(OwnerError, match=r"policy_loss 'mine'.*\[part-not-enabled\]"):
        plan("--policy-loss", "mine")


@pytest.mark.parametrize(("flags", "needed"), [([], False), (["--use-kl-loss"], True), (["--kl-coef", 0.1], True)])
def test_the_reference_is_loaded_for_a_divergence_in_the_loss_or_in_the_reward(plan, flags, needed):
    config = plan(*flags).config
    assert config.algorithm.needs_reference is needed
    assert config.checkpoint.ref_load == ("elsewhere/tiny" if needed else None)


@pytest.mark.parametrize(("flags", "name"), [
    ([], "sample"), (["--calculate-per-token-loss"], "token"), (["--reduction", "constant"], "constant"),
])
def test_which_reduction(plan, flags, name):
    assert plan(*flags).owner("reduction").name == name


def test_a_reduction_that_nobody_offers_is_refused(plan):
    with pytest.raises(OwnerError, match="did you mean 'constant'"):
        plan("--reduction", "konstant")


@pytest.mark.parametrize("flags, lag", [
    (["--fully-async"], 2), (["--fully-async", "--max-lag", 5], 5), (["--max-lag", 5, "--fully-async"], 5),
    (["--train-async"], 1), (["--fully-async", "--train-async"], 2),
    (["--fully-async", "--max-weight-staleness", 1], 2),
])
def test_old_flags_of_asynchrony_are_one_number_and_yield_to_it(plan, flags, lag):
    assert plan(*flags).config.rollout.max_lag == lag


def test_a_launch_script_of_one_step_off_training_is_recognised(monkeypatch):
    """`miles run train_async.py FLAGS`: what follows `python3` in an old script."""
    from click.testing import CliRunner

    from miles_core.cli.run import command

    seen = []
    monkeypatch.setattr("miles_core.plugins.plan.prepare", lambda path, argv: seen.append((path, tuple(argv))))
    for script in ("train_async.py", "slime/train.py"):
        CliRunner().invoke(command, ["--plan", script, "--fully-async"])
    assert seen == [(None, ("--fully-async", "--script-defaults", "--train-async")),
                    (None, ("--fully-async", "--script-defaults"))]
