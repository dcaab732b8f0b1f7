"""Adapters by themselves; tests/integration/test_compat.py has them all in whole runs.

Hooks of this plugin: megatron_init, log_prob, microbatch, train_step, reward, select_from_buffer, shape_rewards,
advantage, policy_loss, token_weights, reduction.
"""

import asyncio
import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_compat.args import Args, parser_defaults
from miles_compat.importance import weighted
from miles_compat.paths import function_at
from miles_compat.plugin import Compat, CompatOptions
from miles_compat.reducer import token_weights
from miles_compat.rewards import scores
from miles_compat.rollout import advantages, post_processed, rollout_data
from miles_compat.sample import asked
from miles_compat.selection import selected
from miles_flags.settings import custom_config
from miles_megatron.testing.ranks import batches

from miles_core.columns import Columns
from miles_core.config.tables import Algorithm, Checkpoint, Perf, Rollout, RunConfig
from miles_core.errors import ConfigError, DataError, HookError
from miles_core.stages.loss import LossInputs, TokenWeights, per_constant, per_sample, per_token
from miles_core.stages.reward import Scoring, weighted_sum
from miles_core.types import Prompt


@pytest.fixture
def batch():
    """A rollout of random samples whose masks have holes."""
    found, = batches(1)
    draw = np.random.default_rng(1)
    for sample in found.samples:
        Columns().check(sample)
        engine = sample.columns["rollout_log_probs"]
        sample.columns["log_probs"] = engine + draw.normal(0, 0.5, len(engine)).astype(np.float32)
    return found


def mean_of_samples(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    """Miles's default reducer, from its description."""
    def reduce(x):
        parts = list(zip(x.split(response_lengths), loss_masks, strict=True))
        if calculate_per_token_loss:
            return sum((part * mask).sum() for part, mask in parts)
        return sum((part * mask).sum() / torch.clamp_min(mask.sum(), 1) for part, mask in parts)
    return reduce


def constant(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    """Dr. GRPO's."""
    return lambda x: (x * torch.cat(loss_masks)).sum() / 1000.0


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 4))
def test_miles_reducers_are_the_cores_reductions(seed, groups, size):
    samples = batches(1, groups=groups, samples=size, seed=seed)[0].samples
    for factory, expected, flag in ((mean_of_samples, per_sample, False), (mean_of_samples, per_token, True),
                                    (constant, lambda samples: per_constant(samples, 1000.0), False)):
        found = token_weights(factory, samples, per_token=flag)
        np.testing.assert_allclose(found, expected(samples), rtol=1e-6)


def test_siblings_count_as_one_rollout(batch):
    for sample in batch.samples:
        sample.rollout = sample.index // 2
    found = token_weights(constant, batch.samples, per_token=False)
    np.testing.assert_allclose(found, 1 / (1000 * len(batch.samples) / 2), rtol=1e-6)


@pytest.mark.parametrize(("reduce", "words"), [
    (lambda x, masks: (x * masks).square().sum(), "not linear"),
    (lambda x, masks: (x * masks).abs().sum(), "not linear"),
    (lambda x, masks: (x * masks).max(), "not linear"),
    (lambda x, masks: (x * masks).sum() + 1, "not linear"),
    (lambda x, masks: x.sum(), "tokens of .* that are masked"),
    (lambda x, masks: (x * masks * torch.arange(len(x))).sum(), "weighs the tokens of .* differently"),
    (lambda x, masks: (x * masks).sum().item(), "by operations of torch"),
    (lambda x, masks: x * masks, "to one number"),
])
def test_a_reducer_that_is_no_weighted_sum_is_refused(batch, reduce, words):
    batch.samples[0].columns["loss_mask"][:2] = [1, 0] if batch.samples[0].response_length > 1 else [1]
    for sample in batch.samples:
        sample.columns["loss_mask"][-1] = 1

    def factory(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
        return lambda x: reduce(x, torch.cat(loss_masks))

    with pytest.raises(HookError, match=words):
        token_weights(factory, batch.samples, per_token=False)


def test_what_is_no_reducer_is_refused(batch):
    with pytest.raises(HookError, match="should return a reducer"):
        token_weights(lambda *arguments: 1.0, batch.samples, per_token=False)


def inputs_of(samples):
    """The trained rows of samples, as the trainer packs them."""
    masks = [sample.columns["loss_mask"] > 0 for sample in samples]
    rows = {name: torch.cat([torch.as_tensor(sample.columns[name][mask]) for sample, mask in zip(samples, masks)])
            for name in ("log_probs", "rollout_log_probs")}
    sample = torch.as_tensor(np.repeat(np.arange(len(samples)), [mask.sum() for mask in masks]))
    ones = torch.ones(len(sample))
    return LossInputs(
        log_probs=rows["log_probs"].clone().requires_grad_(), entropy=None, old_log_probs=rows["log_probs"],
        rollout_log_probs=rows["rollout_log_probs"], ref_log_probs=None, advantages=ones, mask=ones, sample=sample,
        segment_sum=lambda values: values.new_zeros(len(samples)).index_add(0, sample, values), eps_clip=0.2,
        eps_clip_high=0.28, eps_clip_c=None, rows=rows, samples=samples,
    )  # fmt: skip


def untouched(inputs):
    return TokenWeights(torch.ones_like(inputs.mask), inputs.mask > 0, {})


def vanilla(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    """Truncated importance sampling as a function of Miles's signature."""
    tis = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    bounded = torch.clamp(tis, min=args.tis_clip_low, max=args.tis_clip)
    return pg_loss * bounded, loss_masks, {"tis": tis, "tis_clipfrac": (bounded != tis).float()}


def by_sample(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, response_lengths, parallel_state,
              **kwargs):
    """Rejects whole samples by the product of their ratios, as the masked importance sampling of Miles's examples."""
    assert parallel_state.cp_size == 1
    masks = []
    for mine, engine, mask, length in zip(train_log_probs, rollout_log_probs, loss_masks, response_lengths):
        assert len(mine) == len(engine) == len(mask) == length
        ratio = torch.exp(((mine - engine) * mask).sum())
        masks.append(mask * bool(0.5 <= ratio <= 2.0))
    return pg_loss, masks, {}


class Clip:
    tis_clip, tis_clip_low = 1.2, 0.8


def test_a_function_gives_what_plugin_tis_gives(batch):
    """Two independent ways to the same weights: Miles's formula through the adapter, and the plugin's."""
    from miles_tis import plugin as tis
    from miles_tis import weights

    inputs = inputs_of(batch.samples)
    given = TokenWeights(torch.full_like(inputs.mask, 0.5), inputs.mask > 0, {})
    found = weighted(vanilla, Clip(), given, inputs)
    options = tis.TisOptions(use_tis=True, tis_clip=1.2, tis_clip_low=0.8)
    expected = weights.corrected(given, inputs, options)
    torch.testing.assert_close(found.weight, expected.weight)
    assert found.keep.all() and 0 < found.metrics["tis_clipfrac"].mean() < 1
    for name in ("tis", "tis_clipfrac"):
        torch.testing.assert_close(found.metrics[name], expected.metrics[name])

    rejected = weighted(by_sample, Clip(), untouched(inputs), inputs)
    options = tis.TisOptions(use_rs=True, rs_level="sequence", rs_lower_bound=0.5, rs_upper_bound=2.0)
    expected = weights.corrected(untouched(inputs), inputs, options)
    assert torch.equal(rejected.keep, expected.keep) and 0 < rejected.keep.float().mean() < 1
    assert not rejected.weight.requires_grad and torch.equal(rejected.weight, torch.ones_like(inputs.mask))


@pytest.mark.parametrize(("answer", "words"), [
    (lambda loss, masks: loss, "should return \\(pg_loss, loss_masks, metrics\\)"),
    (lambda loss, masks: (loss[:-1], masks, {}), "pg_loss should have one value for each"),
    (lambda loss, masks: (loss, masks[:-1], {}), "loss_masks should have one value for each"),
    (lambda loss, masks: (loss, masks, {"far": torch.ones(3)}), "far should have one value for each"),
    (lambda loss, masks: (loss, [mask * 0.5 for mask in masks], {}), "loss_masks should be 0 or 1"),
    (lambda loss, masks: (loss + 1, masks, {}), "does more than multiply"),
    (lambda loss, masks: (loss.square(), masks, {}), "does more than multiply"),
])
def test_a_correction_that_is_no_factor_and_mask_is_refused(batch, answer, words):
    def function(args, *, pg_loss, loss_masks, **kwargs):
        return answer(pg_loss, loss_masks)

    inputs = inputs_of(batch.samples)
    with pytest.raises(HookError, match=words):
        weighted(function, Clip(), untouched(inputs), inputs)


def test_a_scorer_that_removes_a_sample_empties_its_mask_with_the_filter(batch):
    """The core lets no scorer change columns."""
    group = batch.groups[0]
    for sample in group.samples:
        sample.reward = None
    masks = [sample.columns["loss_mask"].copy() for sample in group.samples]

    def function(args, sample):
        sample.remove_sample = sample.index % 2 == 0
        return 1.0

    async def custom(samples):
        return await scores(function, None, samples)

    asyncio.run(Scoring({"custom": custom}, {"custom": 1.0}, weighted_sum, 60.0)(group))
    assert all(map(np.array_equal, masks, [sample.columns["loss_mask"] for sample in group.samples]))
    assert Compat.filter_group(SimpleNamespace(_function=lambda key: None), group) is group
    for sample, mask in zip(group.samples, masks, strict=True):
        np.testing.assert_array_equal(sample.columns["loss_mask"], mask * (sample.index % 2))


@pytest.mark.parametrize("given", [None, 3.0])
def test_a_group_that_goes_on_after_it_was_scored_has_the_same_rewards_again(batch, given):
    """Its reward, of several scorers, is no reward that the function which made the samples has given."""
    group, calls = batch.groups[0], []
    for sample in group.samples:
        sample.reward = given

    async def custom(samples):
        return await scores(lambda args, sample: calls.append(sample) or float(sample.index), None, samples)

    async def ones(sample):
        return 1.0

    scoring = Scoring({"custom": custom, "ones": ones}, {"custom": 0.5, "ones": 2.0}, weighted_sum, 60.0)
    for _ in range(2):
        asyncio.run(scoring(group))
        assert [sample.reward for sample in group.samples] == [
            2.0 + 0.5 * (sample.index if given is None else given) for sample in group.samples]
    assert len(calls) == (len(group.samples) if given is None else 0)


def test_a_label_is_to_a_function_what_the_row_has():
    """An object, as datasets of search-r1 have it, or a number; a text that only looks like one stays text."""
    for text, raw, expected in (('{"target": ["2"]}', {"target": ["2"]}, {"target": ["2"]}), ("2", 2, 2),
                                ('{"target": ["2"]}', None, '{"target": ["2"]}'), ("2", None, "2"), (None, None, None)):
        assert asked(Prompt(0, 0, "1+1=", (1,), text, raw_label=raw), 0, 1).label == expected


def test_rewards_are_replaced_and_the_raw_ones_kept(batch):
    before = [sample.reward for sample in batch.samples]
    post_processed(lambda args, samples: ([s.reward for s in samples], torch.arange(len(samples))), None, batch.groups)
    assert [sample.reward for sample in batch.samples] == list(range(len(before)))
    assert [sample.metadata["raw_reward"] for sample in batch.samples] == before
    assert rollout_data(with_log_probs(batch), Algorithm())["raw_reward"] == before


@pytest.mark.parametrize("answer", [None, [1.0], ([1.0], [1.0]), (["a"], ["b"]), ([0.0] * 16, [float("nan")] * 16)])
def test_what_is_not_two_lists_of_rewards_is_refused(batch, answer):
    before = [sample.reward for sample in batch.samples]
    with pytest.raises(HookError, match="the function should return"):
        post_processed(lambda args, samples: answer, None, batch.groups)
    assert [sample.reward for sample in batch.samples] == before


def test_a_function_selects_from_the_buffer(batch):
    """Miles's default takes from the front and removes what it returns; ours is a copy, and one group is asked for."""
    seen = []

    def pop_first(args, rollout_id, buffer, num_samples):
        seen.append((args, rollout_id, len(buffer), num_samples))
        taken = buffer[:num_samples]
        del buffer[:num_samples]
        return taken

    groups = list(batch.groups)
    assert selected(pop_first, "args", groups, 7) == [groups[0]]
    assert seen == [("args", 7, len(groups), 1)] and groups == batch.groups
    assert selected(lambda args, rollout_id, buffer, n: buffer[::-1], None, groups, 7) == [groups[-1]]
    assert selected(lambda args, rollout_id, buffer, n: [], None, groups, 7) == []


@pytest.mark.parametrize("answer", [None, 3, [[]], ["x"], [[object()]]])
def test_what_is_not_of_the_buffer_is_refused(batch, answer):
    with pytest.raises(HookError, match="should return groups of the buffer"):
        selected(lambda *arguments: answer, None, batch.groups, 0)


def with_log_probs(batch):
    for sample in batch.samples:
        sample.columns["ref_log_probs"] = sample.columns["log_probs"] - 0.25
    return batch


def test_rollout_data_is_miles_training_data(batch):
    data = rollout_data(with_log_probs(batch), Algorithm())
    assert {len(values) for values in data.values()} == {len(batch.samples)}
    for i, sample in enumerate(batch.samples):
        assert data["total_lengths"][i] == len(data["tokens"][i]) == sample.length
        assert data["response_lengths"][i] == len(data["log_probs"][i]) == len(data["loss_masks"][i])
        torch.testing.assert_close(data["kl"][i], torch.full((sample.response_length,), 0.25))
    assert sum(data["rewards"][:4]) == pytest.approx(0), "relative to the group, as [algorithm] says"
    assert rollout_data(batch, Algorithm(rewards_normalization=False))["rewards"] == [s.reward for s in batch.samples]


def test_advantages_are_what_the_function_leaves(batch):
    def function(args, data):
        data["advantages"] = [reward * mask for reward, mask in zip(data["rewards"], data["loss_masks"], strict=True)]

    found = advantages(function, None, batch, Algorithm(rewards_normalization=False))
    for row, sample in zip(found, batch.samples, strict=True):
        np.testing.assert_allclose(row, sample.reward * sample.columns["loss_mask"], rtol=1e-6)
    with pytest.raises(HookError, match='should set rollout_data\\["advantages"\\]'):
        advantages(lambda args, data: None, None, batch, Algorithm())


def test_args_are_the_runs_options_under_miles_names(tmp_path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 7}')
    config = RunConfig(checkpoint=Checkpoint(hf_checkpoint=str(tmp_path)), rollout=Rollout(rollout_batch_size=32),
                       perf=Perf(actor_num_gpus_per_node=2),
                       algorithm=Algorithm(std_normalization=False),
                       surfaces={"megatron": {"tensor_model_parallel_size": 2}},
                       options={"tis": {"tis_clip": 5.0}})  # fmt: skip
    args = Args(config)
    assert args.rollout_batch_size == 32 and args.actor_num_gpus_per_node == 2
    assert args.grpo_std_normalization is False and args.rewards_normalization is True
    assert args.train_backend == "megatron", "Miles's name of another option"
    assert args.num_layers == 7, "the checkpoint's"
    assert args.tensor_model_parallel_size == 2 and args.context_parallel_size == 1
    assert args.tis_clip == 5.0 and args.tis_clip_low == 0.0, "set, and a plugin's default"
    assert not hasattr(args, "no_such_option") and getattr(args, "no_such_option", 7) == 7
    with pytest.raises(AttributeError, match="this run has no option 'normalization'"):
        args.normalization  # noqa: B018 - it raises: the checkpoint decides, and not megatron-core's default
    with pytest.raises(AttributeError, match="cannot be set"):
        args.rollout_batch_size = 1
    args.rollout_batch_size, args.my_own = 32, [1]
    for other in (copy.copy(args), copy.deepcopy(args)):
        assert other.rollout_batch_size == 32 and other.my_own == [1]
        other.rollout_batch_size = 1
        assert other.rollout_batch_size == 1 and args.rollout_batch_size == 32, "the copy's alone"


def test_args_have_every_name_of_miles_parser():
    args = Args(RunConfig())
    missing = [name for name in parser_defaults() if not hasattr(args, name)]
    assert not missing and len(parser_defaults()) > 390
    assert args.mlflow_experiment_name == "miles" and args.use_wandb is False and args.qkv_format == "thd"
    assert args.rm_type is None and args.world_size == args.actor_num_gpus_per_node


def test_settings_of_functions_come_before_options(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("tis_level: token\nuse_tis: true\ntis_upper_bound: 2.0\n")
    args = Args(RunConfig(), custom_config(str(path)))
    assert (args.tis_level, args.use_tis, args.tis_upper_bound) == ("token", True, 2.0)
    with pytest.raises(DataError):
        custom_config(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize("options", [
    {"eval_function_path": "a.b"}, {"rollout_sample_hook_path": ["a.b"]}, {"custom_agent_function_path": "a.b"},
    {"custom_update_weight_post_write_path": "a.b"}, {"rollout_function_path": "a.b", "data_source_path": "a.b"}])
def test_a_function_that_nobody_would_call_is_refused(options):
    with pytest.raises(ConfigError):
        Compat(CompatOptions(**options), RunConfig())


def test_whole_samples_and_context_parallelism_exclude_each_other():
    config = RunConfig(perf=Perf(actor_num_gpus_per_node=2), surfaces={"megatron": {"context_parallel_size": 2}})
    sharded = RunConfig(perf=Perf(trainer="fsdp"), options={"fsdp": {"context_parallel_size": 2}})
    for one in (config, sharded):
        with pytest.raises(ConfigError) as caught:
            Compat(CompatOptions(custom_tis_function_path="a.b"), one)
        assert caught.value.code == "tis-function-context-parallel" and caught.value.got == "context_parallel_size 2"


@pytest.mark.parametrize("key", ["custom_megatron_init_path", "custom_model_provider_path"])
def test_what_megatrons_trainer_alone_calls_is_refused_under_another(key):
    with pytest.raises(ConfigError) as caught:
        Compat(CompatOptions(**{key: "a.b"}), RunConfig(perf=Perf(trainer="fsdp")))
    assert caught.value.code == "function-never-called" and key in str(caught.value)


@pytest.mark.parametrize("word", ["def", "async def"])
def test_a_reward_function_that_raises_is_named_with_its_line(batch, word, tmp_path):
    path, samples = tmp_path / "broken_reward.py", batch.groups[0].samples
    path.write_text(f"{word} score(args, sample, **more):\n    return 1 / 0\n")
    for sample in samples:
        sample.reward = None
    with pytest.raises(ZeroDivisionError) as raised:
        asyncio.run(scores(function_at("custom_rm_path", f"{path}:score"), None, samples))
    assert raised.value.__notes__ == [f"in {path}:2 score"]
