"""The trainer's loss and gradients against float64, and against themselves under any packing.

The reference is transformers' own model run in float64 throughout, one sample at a time, with the objective written
down token by token in Python; it shares no line with the trainer. Two measures of a gradient's error: |g - g64| / |g64|
over all parameters together (Euclidean norms), and max |g - g64| / max |g64| of the parameter where that is largest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from miles_core.build import trainer_part, with_context
from miles_core.columns import Columns
from miles_core.config.load import with_values
from miles_core.errors import ColumnError
from miles_core.kl import approximate_kl
from miles_core.plugins import bind
from miles_core.plugins.plan import prepare
from miles_core.types import Batch, Group, Prompt, Rank, Sample, Status

LOSS = GRADIENT = SPLIT = 1e-6
# A single parameter's worst element is fp32's own rounding, amplified where the gradient is a sum that nearly cancels
# (norms and projections of q and k): transformers' fp32 backward is no closer to float64. The test prints both.
WORST_PARAMETER = 3e-6

OBJECTIVES = {
    "plain": {},
    "dual-clip, KL and entropy": {
        "eps_clip_c": 1.5, "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl",
        "entropy_coef": 0.01,
    },
    "token mean, k2": {"reduction": "token", "use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k2"},
}  # fmt: skip


class InFloat64(TorchFunctionMode):
    """Transformers computes norms, rope, softmax and router in fp32 whatever the model's dtype; here in float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        wide = lambda x: torch.float64 if x is torch.float32 or x is torch.float else x  # noqa: E731
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


def make_batch() -> Batch:
    """Ten samples of unequal lengths in three groups: masks with holes, siblings, advantages of both signs and zero."""
    draw = np.random.default_rng(7)
    groups = []
    shapes = [[(5, 9), (5, 1), (5, 30)], [(11, 17), (11, 40), (11, 3), (11, 8)], [(3, 21), (3, 12), (3, 60)]]
    for uid, sizes in enumerate(shapes):
        ids = draw.integers(0, 256, sizes[0][0]).astype(np.int32)
        prompt = Prompt(uid, uid, "", tuple(ids.tolist()))
        group = Group(prompt, [])
        for index, (_, length) in enumerate(sizes):
            mask = (draw.random(length) < 0.75).astype(np.uint8)
            mask[-1] = 1
            log_probs = draw.uniform(-7, -4.5, length).astype(np.float32)
            columns = {
                "tokens": np.concatenate([ids, draw.integers(0, 256, length)]).astype(np.int32), "loss_mask": mask,
                "versions": np.ones(length, np.int32), "rollout_log_probs": log_probs, "log_probs": log_probs.copy(),
                "ref_log_probs": (log_probs + draw.normal(0, 0.3, length)).astype(np.float32),
                "advantages": draw.normal(0, 1, length).astype(np.float32) * (index != 1),
            }  # fmt: skip
            rollout = 77 if uid == 1 and index in (1, 2) else None
            group.samples.append(Sample(prompt, index, columns, length, "", Status.COMPLETED, rollout=rollout))
        groups.append(group)
    return Batch(0, groups, 1)


def kl_by_hand(d: torch.Tensor, kind: str) -> torch.Tensor:
    """One token's estimate, from the formulas of http://joschu.net/blog/kl-approx.html."""
    if kind == "k1":
        return d
    if kind == "k2":
        return d**2 / 2
    return torch.exp(-d) - 1 + d


def token_loss(log_prob, entropy, sample, j, a) -> torch.Tensor:
    """The objective of one token by cases."""
    advantage = float(sample.columns["advantages"][j])
    ratio = torch.exp(log_prob - float(sample.columns["log_probs"][j]))
    bounded = min(max(ratio.item(), 1 - a.eps_clip), 1 + a.eps_clip_high)
    if -bounded * advantage > -ratio.item() * advantage:
        loss = torch.tensor(-bounded * advantage, dtype=torch.float64)
    else:
        loss = -ratio * advantage
    if a.eps_clip_c is not None and advantage < 0 and loss.item() > -a.eps_clip_c * advantage:
        loss = torch.tensor(-a.eps_clip_c * advantage, dtype=torch.float64)
    if a.use_kl_loss:
        loss = loss + a.kl_loss_coef * kl_by_hand(log_prob - float(sample.columns["ref_log_probs"][j]), a.kl_loss_type)
    return loss - a.entropy_coef * entropy


def reference(folder, batch: Batch, algorithm, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the whole step by Hugging Face name; float32 is transformers as it comes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                 experts_implementation="eager").to(dtype)
    samples, total, counts = batch.samples, 0.0, {}
    for i, sample in enumerate(samples):
        key = sample.rollout if sample.rollout is not None else -1 - i
        counts[key] = counts.get(key, 0) + int(sample.columns["loss_mask"].sum())
    with InFloat64() if dtype == torch.float64 else contextlib.nullcontext():
        for i, sample in enumerate(samples):
            logits = model(torch.from_numpy(sample.tokens).long()[None]).logits[0]
            assert logits.dtype == dtype
            loss = torch.zeros((), dtype=torch.float64)
            for j in np.flatnonzero(sample.columns["loss_mask"]):
                place = sample.length - sample.response_length + int(j)
                all_log_probs = torch.log_softmax(logits[place - 1], -1)
                entropy = -(all_log_probs.exp() * all_log_probs).sum()
                loss = loss + token_loss(all_log_probs[int(sample.tokens[place])], entropy, sample, j, algorithm)
            if algorithm.reduction == "token":
                loss = loss / sum(counts.values())
            else:
                loss = loss / counts[sample.rollout if sample.rollout is not None else -1 - i] / len(counts)
            loss.backward()
            total += loss.item()
    return total, dict(on_disk(model))


def on_disk(model):
    """(name on disk, gradient): transformers fuses the experts' matrices in memory."""
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            for expert, grad in enumerate(parameter.grad):
                for part, half in zip(("gate_proj", "up_proj"), grad.chunk(2), strict=True):
                    yield name.replace("gate_up_proj", f"{expert}.{part}.weight"), half
        elif name.endswith("experts.down_proj"):
            for expert, grad in enumerate(parameter.grad):
                yield name.replace("down_proj", f"{expert}.down_proj.weight"), grad
        else:
            yield name, parameter.grad


class Bench:
    """One real trainer whose step leaves the weights as they are; its objective and packing can be changed."""

    def __init__(self, plan):
        self.selected, self.config = plan.selected, with_context(plan.config)
        self.trainer = trainer_part(self.selected, self.config, Rank())
        self.trainer.load()
        self.models = self.trainer.models

    def configure(self, algorithm=None, perf=None) -> None:
        """Another trainer over the same models."""
        config = with_values(self.config, "test", **{f"algorithm__{k}": v for k, v in (algorithm or {}).items()},
                             **{f"perf__{k}": v for k, v in (perf or {}).items()})
        self.trainer = type(self.trainer)(config, bind.bind(self.selected, config, "trainer"), Columns(), Rank())
        self.trainer.models = self.models

    def step(self, batch: Batch) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Metrics and gradients of one optimizer step by Hugging Face name."""
        batch = dataclasses.replace(batch)
        self.trainer.take_batch(batch)
        metrics = self.trainer.step(0)
        self.trainer.end_batch()
        with torch.no_grad():
            parameters = list(self.models.actor.parameters())
            kept = [parameter.detach().clone() for parameter in parameters]
            for parameter in parameters:
                parameter.copy_(parameter.main_grad)
            found = {name: tensor.clone() for name, tensor in self.trainer.weights()}
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)
        return metrics, found

    def padded(self, multiple: int, times: int) -> None:
        """Pad samples to a multiple, as context parallelism would, and micro-batches to several times the usual."""

        class Padded(Columns):
            def pack(self, samples, *, total_multiple, **_):
                return super().pack(samples, multiple=multiple, total_multiple=total_multiple * times)

        self.trainer.columns = Padded()


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def bench(request, tiny, tmp_path_factory) -> Bench:
    torch.set_num_threads(1)
    return bench_of(tiny, request.param, tmp_path_factory.mktemp("bench"))


def bench_of(tiny, family, folder, *flags) -> Bench:
    """A trainer of one step over ten samples, at a learning rate of 0 and without clipping."""
    run_file = folder / "run.toml"
    run_file.write_text(f"""
    [checkpoint]
    hf_checkpoint = "{tiny / family}"
    [rollout]
    prompt_data = "{tiny}/train.jsonl"
    input_key = "prompt"
    rm_type = ["math"]
    label_key = "label"
    apply_chat_template = true
    rollout_batch_size = 5
    n_samples_per_prompt = 2
    num_rollout = 1
    [perf]
    bf16 = false
    [optimizer]
    lr = 0.0
    clip_grad = 0.0
    """)
    return Bench(prepare(run_file, ["--plugin", "grpo", *flags]))


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """max |g - g'| / max |g'| of the parameter where it is largest."""
    assert found.keys() == expected.keys()
    return max(float((found[k].double() - g.double()).abs().max() / g.abs().max()) for k, g in expected.items())


def overall(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """|g - g'| / |g'| of all parameters together, Euclidean."""
    gap = sum(float((found[k].double() - g.double()).square().sum()) for k, g in expected.items())
    return math.sqrt(gap / sum(float(g.double().square().sum()) for g in expected.values()))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradients_are_those_of_float64(bench, name, record_property):
    """Also beside what transformers' own fp32 backward reaches, which shows what is left to fp32 itself."""
    bench.configure(OBJECTIVES[name], {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 128})
    batch, folder = make_batch(), bench.config.checkpoint.hf_checkpoint
    metrics, found = bench.step(batch)
    loss, expected = reference(folder, batch, bench.trainer.config.algorithm, torch.float64)
    theirs_loss, theirs = reference(folder, batch, bench.trainer.config.algorithm, torch.float32)
    figures = {
        "loss": abs(metrics["train/loss"] / loss - 1), "all gradients": overall(found, expected),
        "worst parameter": worst(found, expected), "loss, transformers fp32": abs(theirs_loss / loss - 1),
        "all gradients, transformers fp32": overall(theirs, expected),
        "worst parameter, transformers fp32": worst(theirs, expected),
    }  # fmt: skip
    for key, value in figures.items():
        record_property(key, f"{value:.1e}")
    print(f"\n{folder} {name}: " + ", ".join(f"{key} {value:.1e}" for key, value in figures.items()))
    assert figures["loss"] <= LOSS
    assert figures["all gradients"] <= GRADIENT
    assert figures["worst parameter"] <= WORST_PARAMETER


@pytest.fixture(scope="module")
def one_pass(bench):
    """(metrics, gradients) of everything in one micro-batch: what all other packings are compared with."""
    bench.configure(OBJECTIVES["dual-clip, KL and entropy"],
                    {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 9999})
    found = bench.step(make_batch())
    return lambda: found


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(10)), limit=st.integers(1, 400), size=st.sampled_from([0, 1, 2, 3, 5, 10]),
       multiple=st.sampled_from([1, 2, 8]), times=st.sampled_from([1, 2, 5]))
def test_no_packing_changes_the_step(bench, one_pass, order, limit, size, multiple, times):
    """Any split into micro-batches (by tokens, or `size` samples each), any order of the samples, any padding."""
    bench.configure(OBJECTIVES["dual-clip, KL and entropy"],
                    {"use_dynamic_batch_size": size == 0, "max_tokens_per_gpu": limit, "micro_batch_size": size or 1})
    bench.padded(multiple, times)
    batch = make_batch()
    samples = batch.samples
    batch.groups = [Group(samples[i].prompt, [samples[i]]) for i in order]
    metrics, found = bench.step(batch)
    expected_metrics, expected = one_pass()
    for name in ("loss", "pg_loss", "kl_loss", "entropy_loss", "pg_clipfrac", "ppo_kl"):
        assert metrics[f"train/{name}"] == pytest.approx(expected_metrics[f"train/{name}"], rel=SPLIT, abs=1e-9), name
    assert overall(found, expected) <= SPLIT
    assert worst(found, expected) <= WORST_PARAMETER


def log_probs(bench, batch: Batch, limit: int) -> list[np.ndarray]:
    """The old log-probs as recomputed under a token budget."""
    bench.configure({}, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": limit})
    bench.trainer.take_batch(batch)
    bench.trainer.score()
    bench.trainer.end_batch()
    return [sample.columns["log_probs"].copy() for sample in batch.samples]


def test_old_log_probs_of_another_packing_leave_the_ratio_at_one(bench):
    one = log_probs(bench, make_batch(), 9999)
    for limit in (1, 60, 100, 130):
        other = log_probs(bench, make_batch(), limit)
        assert max(np.abs(np.exp(a - b) - 1).max() for a, b in zip(one, other, strict=True)) <= 1e-5


def test_with_the_packing_of_the_step_the_first_ratio_is_exactly_one(bench):
    """No |ratio - 1|, no clipping and no KL at the first step, to the last bit."""
    bench.configure({"entropy_coef": 0.01, "skip_actor_forward_only": False},
                    {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 100})
    batch, seen = make_batch(), []
    inner = bench.trainer.objective._policy_loss
    bench.trainer.objective._policy_loss = lambda inputs: (seen.append(inputs), inner(inputs))[1]
    bench.trainer.take_batch(batch)
    bench.trainer.score()
    metrics = bench.trainer.step(0)
    assert len(seen) > 2
    assert all(torch.equal(inputs.log_probs, inputs.old_log_probs) for inputs in seen)
    assert metrics["train/ppo_kl"] == 0.0 and metrics["train/pg_clipfrac"] == 0.0


def test_several_steps_have_whole_rollouts_each_with_the_weights_of_its_own_samples(bench):
    """Nine rollouts of ten samples in four steps: each is the step of a batch of these samples alone."""
    perf = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 100}
    batch = make_batch()
    for sample in batch.samples:
        del sample.columns["log_probs"]
    bench.configure({}, perf)
    trainer = bench.trainer
    trainer.config = with_values(trainer.config, "test", rollout__num_steps_per_rollout=4)
    trainer.take_batch(batch)
    trainer.score()
    losses = [trainer.step(index)["train/loss"] for index in range(4)]
    samples = batch.samples
    for loss, part in zip(losses, ([0, 1], [2, 3], [4, 5, 6], [7, 8, 9]), strict=True):
        bench.configure({}, perf)
        alone = bench.step(Batch(0, [Group(samples[i].prompt, [samples[i]]) for i in part], 1))[0]
        assert loss == pytest.approx(alone["train/loss"], abs=1e-9)


def test_the_distance_to_the_engine_is_that_before_the_first_step(bench):
    """Old log-probs are the engine's here, and the weights are elsewhere."""
    bench.configure()
    assert bench.step(make_batch())[0]["train/train_rollout_logprob_abs_diff"] == 0


def test_a_reduction_that_changes_columns_is_an_error(bench):
    def masks(samples):
        samples[0].columns["loss_mask"][:] = 0
        return np.ones(len(samples))

    bench.configure()
    bench.trainer.hooks.reduction["sample"] = masks
    with pytest.raises(ColumnError, match="reduction"):
        bench.step(make_batch())


def test_an_estimator_that_changes_columns_is_an_error(bench):
    def shifts(batch):
        for sample in batch.samples:
            sample.columns["log_probs"].base[:] = 0
        return [0.0] * len(batch.samples)

    bench.configure()
    bench.trainer.hooks.advantage["grpo"] = shifts
    bench.trainer.take_batch(make_batch())
    with pytest.raises(ColumnError, match="grpo"):
        bench.trainer.advantage()


def test_the_step_above_left_the_weights_alone(bench, tiny):
    """A learning rate of 0 changes no bit, so that all comparisons were of the same weights."""
    from safetensors.torch import load_file

    kept = load_file(f"{bench.config.checkpoint.hf_checkpoint}/model.safetensors")
    for name, tensor in bench.trainer.weights():
        assert torch.equal(tensor, kept[name]), name


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_the_kl_formulas_of_this_file_are_the_cores(kind):
    a, b = torch.rand(2, 50, dtype=torch.float64)
    torch.testing.assert_close(approximate_kl(a, b, kind), kl_by_hand(a - b, kind))


def test_samples_without_advantage_can_be_left_out(bench):
    """The gradient is that of all samples; only the work is less."""
    batch = make_batch()
    for sample in batch.samples[1::3]:
        sample.columns["advantages"][:] = 0
    quiet = {id(s) for s in batch.samples if not (s.columns["advantages"] * s.columns["loss_mask"]).any()}
    found = {}
    for skip in (False, True):
        bench.configure({}, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 100, "skip_zero_advantages": skip})
        seen, inner = [], bench.trainer.objective._policy_loss

        def watched(inputs, seen=seen, inner=inner):
            seen.extend(inputs.samples)
            loss, metrics = inner(inputs)
            return loss, {**metrics, "one": torch.ones_like(loss)}

        bench.trainer.objective._policy_loss = watched
        found[skip] = bench.step(dataclasses.replace(batch))
        assert found[skip][0]["train/one"] == pytest.approx(1), "a mean of what was computed"
        assert (quiet & {id(sample) for sample in seen} == set()) is skip
    assert found[True][0]["train/skipped_samples"] == pytest.approx(len(quiet) / len(batch.samples))
    assert found[True][0]["train/loss"] == pytest.approx(found[False][0]["train/loss"], abs=1e-9)
    assert overall(found[True][1], found[False][1]) <= SPLIT
    assert worst(found[True][1], found[False][1]) <= WORST_PARAMETER


@pytest.mark.parametrize(("algorithm", "silent"), [
    ({}, True), ({"eps_clip_c": 3.0}, True), ({"entropy_coef": 0.01}, False),
    ({"observe_training_entropy": True}, False),
    ({"use_kl_loss": True}, False),
])
def test_an_objective_says_whether_a_token_without_advantage_is_silent(bench, algorithm, silent):
    bench.configure(algorithm, {"skip_zero_advantages": True})
    assert bench.trainer.skips is silent


def test_routers_learn_from_tokens_without_advantage(tiny, tmp_path):
    found = []
    for skip in ((), ("--skip-zero-advantages",)):
        bench = bench_of(tiny, "qwen3_moe", tmp_path, "--moe-aux-loss-coeff", "0.01", *skip)
        batch = make_batch()
        for sample in batch.samples[1:]:
            sample.columns["advantages"][:] = 0
        found.append(bench.step(batch)[1])
    assert overall(found[1], found[0]) <= SPLIT


def test_router_losses_are_means_over_the_tokens_of_a_step(tiny, tmp_path):
    """A step that has everything twice has the same load-balancing and z gradient, not twice as much."""
    flags = ["--moe-aux-loss-coeff", "0.01", "--moe-z-loss-coeff", "0.001"]
    bench = bench_of(tiny, "qwen3_moe", tmp_path, *flags)
    found = []
    for times in (1, 2):
        batch = make_batch()
        batch.groups = batch.groups + make_batch().groups * (times - 1)
        for sample in batch.samples:
            sample.columns["advantages"][:] = 0
        found.append(bench.step(batch)[1])
    assert overall(found[1], found[0]) <= SPLIT
    assert 1e-5 < max(float(g.abs().max()) for g in found[0].values()) < 1e-1
