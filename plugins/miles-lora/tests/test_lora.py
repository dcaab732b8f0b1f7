"""What adapters compute, on one rank and on several; what trains and what stays; what comes back.

Trainers live in processes that are started once.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from miles_lora.attach import one_by_one
from miles_megatron.testing.ranks import batches, distance
from safetensors.torch import load_file

pytestmark = pytest.mark.xdist_group("lora")  # one worker: the processes are started once

LORA = ("--lora-rank", 4, "--lora-alpha", 12)  # as conftest.py makes PEFT directories
STILL = ("--no-use-distributed-optimizer", "--clip-grad", 0, "--lr", 0)
TWO = ("--actor-num-gpus-per-node", 2)
TENSOR = (*TWO, "--tensor-model-parallel-size", 2)
LAYOUTS = {
    "tp2": ("dense", TENSOR),
    "tp2-sp": ("dense", (*TENSOR, "--sequence-parallel")),
    "tp2-sp-recompute": ("tied", (*TENSOR, "--sequence-parallel", "--recompute-granularity", "full")),
    "tp2-sp-fused": ("fused", (*TENSOR, "--sequence-parallel")),
    "tp2-sp-delta": ("delta", (*TENSOR, "--sequence-parallel")),
    "tp2-latent": ("latent", TENSOR),
    "tp2-sp-latent": ("latent", (*TENSOR, "--sequence-parallel")),
    "pp2": ("dense", (*TWO, "--pipeline-model-parallel-size", 2)),
    "pp2-tied": ("tied", (*TWO, "--pipeline-model-parallel-size", 2)),
    "vpp": ("dense", (*TWO, "--pipeline-model-parallel-size", 2, "--num-virtual-stages-per-pipeline-rank", 2)),
    "cp2": ("dense", (*TWO, "--context-parallel-size", 2)),
    "dp2": ("moe", TWO),
    "ep2": ("moe", (*TWO, "--expert-model-parallel-size", 2)),
    "tp2-sp-etp2": ("moe", (*TENSOR, "--sequence-parallel")),
    "tp2-sp-ep2": ("moe", (*TENSOR, "--sequence-parallel", "--expert-model-parallel-size", 2,
                           "--expert-tensor-parallel-size", 1)),
}  # fmt: skip


def rollouts(count=1):
    return batches(count, vocab=264)


def split(tensors):
    """(adapters, all else) of tensors by name."""
    ours = {name: one for name, one in tensors.items() if ".lora_" in name}
    return ours, {name: one for name, one in tensors.items() if name not in ours}


def column(found, name):
    return np.concatenate([sample.columns[name] for sample in found["batch"].samples])


@pytest.mark.parametrize("kind", ["dense", pytest.param("moe", marks=pytest.mark.full),
                                  pytest.param("fused", marks=pytest.mark.full)])
def test_the_forward_with_adapters_is_that_of_the_merged_model(checkpoint, adapter, merged, plan, one, kind):
    """Log-probs in float32, of adapters that are far from 0."""
    flags = (*LORA, "--lora-adapter-path", adapter(kind), *STILL)
    apart = one.train(plan(checkpoint(kind), *flags), rollouts())
    whole, base = (one.train(plan(folder, *STILL), rollouts()) for folder in (merged(kind), checkpoint(kind)))
    assert np.abs(column(apart, "log_probs") - column(whole, "log_probs")).max() < 1e-5
    assert np.abs(column(apart, "log_probs") - column(base, "log_probs")).max() > 0.1


@pytest.mark.parametrize("kind", ["dense", pytest.param("moe", marks=pytest.mark.full)])
def test_fresh_adapters_change_no_bit_and_the_reference_has_none(checkpoint, adapter, plan, one, kind):
    """Also where the run begins with other adapters, and takes steps. Nor are gradients of the base counted as work."""
    flags = ("--use-kl-loss", "--kl-loss-coef", 0.1)
    base = one.train(plan(checkpoint(kind), *flags, "--lr", 0), rollouts())
    fresh = one.train(plan(checkpoint(kind), *flags, *LORA), rollouts())
    np.testing.assert_array_equal(column(fresh, "log_probs"), column(base, "log_probs"))
    whole, without = (found["steps"][0]["perf/actor_train_tflops"] * found["steps"][0]["perf/actor_train_time"]
                      for found in (base, fresh))
    assert 2 / 3 * whole < without < 0.8 * whole
    warm = one.train(plan(checkpoint(kind), *flags, *LORA, "--lora-adapter-path", adapter(kind)), rollouts(2))
    again = one.train(plan(checkpoint(kind), *flags, "--lr", 0), rollouts(2))
    np.testing.assert_array_equal(column(warm, "ref_log_probs"), column(again, "ref_log_probs"))
    assert np.abs(column(warm, "log_probs") - column(again, "log_probs")).max() > 0.1


@pytest.mark.full
@pytest.mark.parametrize("layout", [
    name if name in ("tp2-sp", "tp2-sp-delta", "tp2-sp-latent") else pytest.param(name, marks=pytest.mark.slow)
    for name in LAYOUTS])
def test_a_layout_changes_no_gradient(checkpoint, adapter, plan, one, two, layout):
    """Of A and of B, both far from 0; the base gets none."""
    kind, flags = LAYOUTS[layout]
    plain = (*STILL, *LORA, "--lora-adapter-path", adapter(kind))
    loss, expected = one.gradients(plan(checkpoint(kind), *plain, "--max-tokens-per-gpu", 256), rollouts()[0])
    other, found = two.gradients(plan(checkpoint(kind), *plain, *flags), rollouts()[0])
    (ours, base), (wanted, _) = split(found), split(expected)
    assert other == pytest.approx(loss, abs=1e-6)
    assert ours.keys() == load_file(adapter(kind) / "adapter_model.safetensors").keys()
    assert distance(ours, wanted) < 4e-6
    for suffix in ("lora_A.weight", "lora_B.weight"):  # neither hides behind the other
        parts = [{name: one for name, one in each.items() if name.endswith(suffix)} for each in (ours, wanted)]
        assert distance(*parts) < 4e-6
    assert base and not any(gradient.any() for gradient in base.values())


@pytest.mark.full
@pytest.mark.parametrize("flags", [("--sequence-parallel",), pytest.param((), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("parts", [None, pytest.param(("q_proj", "v_proj", "down_proj"), marks=pytest.mark.slow)],
                         ids=["all", "q-v"])
def test_ranks_that_share_keys_are_one(checkpoint, adapter, plan, one, ranks_of, tmp_path, flags, parts):
    """Four of a model with two: gradients and norm, a step's checkpoint, and the next step of one rank from there."""
    four, path = ranks_of(4), adapter("dense", parts)
    layout = ("--actor-num-gpus-per-node", 4, "--tensor-model-parallel-size", 4, *flags)
    plain = (*LORA, "--lora-adapter-path", path, *(("--target-modules", ",".join(parts)) if parts else ()))
    (loss, wanted), (other, found) = (ranks.gradients(plan(checkpoint(), *plain, *STILL, *more), rollouts()[0])
                                      for ranks, more in ((one, ("--max-tokens-per-gpu", 256)), (four, layout)))
    assert other == pytest.approx(loss, abs=1e-6) and split(found)[0].keys() == load_file(
        path / "adapter_model.safetensors").keys()
    for suffix in ("lora_A.weight", "lora_B.weight"):
        pair = [{name: grad for name, grad in each.items() if name.endswith(suffix)} for each in (found, wanted)]
        assert distance(*pair) < 4e-6
    [first, second] = rollouts(2)
    straight = one.train(plan(checkpoint(), *plain, "--clip-grad", 0.1), [first, second])
    begun = four.train(plan(checkpoint(), *plain, "--clip-grad", 0.1, *layout), [copy.deepcopy(first)],
                       save=tmp_path / "kept")
    assert begun["steps"][0]["train/grad_norm"] == pytest.approx(straight["steps"][0]["train/grad_norm"], rel=1e-5)
    resumed = one.train(plan(checkpoint(), *plain, "--clip-grad", 0.1, "--load", tmp_path / "kept"), [second])
    for name, weight in straight["weights"].items():
        np.testing.assert_allclose(resumed["weights"][name], weight, atol=2e-3, err_msg=name)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2-sp-etp2", "tp2-sp-ep2"])
def test_a_norm_counts_every_adapter_of_experts_once(checkpoint, adapter, plan, one, two, layout):
    """Also where a rank has experts whole that has a part of the dense layers."""
    kind, flags = LAYOUTS[layout]
    plain = (*LORA, "--lora-adapter-path", adapter(kind), "--clip-grad", 0.1)
    norms = [ranks.train(plan(checkpoint(kind), *plain, *more), rollouts())["steps"][0]["train/grad_norm"]
             for ranks, more in ((one, ()), (two, flags))]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_the_gradient_is_that_of_peft(checkpoint, adapter, plan, one):
    """A step's gradient against autograd through PEFT's own layers, of transformers' model."""
    import peft
    from transformers import AutoModelForCausalLM

    [batch] = rollouts()
    _, found = one.gradients(plan(checkpoint(), *STILL, *LORA, "--lora-adapter-path", adapter()), batch)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint()), adapter(),
                                           is_trainable=True)
    total = 0
    for sample in batch.samples:
        tokens, first = torch.from_numpy(sample.tokens).long(), len(sample.tokens) - sample.response_length
        scores = model(tokens[None]).logits[0, first - 1 : -1].log_softmax(-1).gather(1, tokens[first:, None])[:, 0]
        mask = torch.from_numpy(sample.columns["loss_mask"]).float()
        total = total - sample.reward * (scores * mask).sum() / mask.sum() / len(batch.samples)
    total.backward()
    theirs = {name.replace(".default", ""): p.grad.numpy() for name, p in model.named_parameters() if p.requires_grad}
    ours = split(found)[0]
    assert ours.keys() == theirs.keys()
    assert distance(ours, theirs) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("flags", [(), pytest.param(("--bf16", "--lr", "1e-2"), marks=pytest.mark.slow),
                                   pytest.param(("--recompute-granularity", "full"), marks=pytest.mark.slow)],
                         ids=["float32", "bfloat16", "recompute"])
@pytest.mark.parametrize("kind", ["dense", pytest.param("moe", marks=pytest.mark.full)])
def test_adapters_move_and_the_base_stays_to_the_bit(checkpoint, plan, two, kind, flags):
    """Three steps of two data-parallel ranks that share the optimizer's state."""
    before = plan(checkpoint(kind), *LORA, *TWO, *flags, "--lr", 0)
    after = plan(checkpoint(kind), *LORA, *TWO, *flags)
    (started, base), (moved, same) = (split(two.train(each, rollouts(3))["weights"]) for each in (before, after))
    for name, tensor in base.items():
        np.testing.assert_array_equal(same[name], tensor, err_msg=name)
    assert len(moved) == 2 * sum("_proj" in name for name in base)
    assert all(not np.array_equal(one, started[name]) for name, one in moved.items())
    assert all(not tensor.any() for name, tensor in started.items() if "lora_B" in name)


@pytest.mark.full
@pytest.mark.parametrize(("flags", "later"), [((), ()), (("--use-kl-loss",), ()),
                                              pytest.param((*TENSOR, "--sequence-parallel"), TWO,
                                                           marks=pytest.mark.slow)],
                         ids=["one", "reference", "tp2-to-dp2"])
def test_a_resumed_run_goes_on_to_the_bit(checkpoint, adapter, plan, one, two, tmp_path, flags, later):
    """Float32 masters, moments and schedule come back; under another layout up to the order of sums."""
    ranks = two if "--actor-num-gpus-per-node" in flags else one
    begun = (*LORA, "--lora-adapter-path", adapter("dense"))
    folder, [first, *rest] = checkpoint(), rollouts(3)
    straight = ranks.train(plan(folder, *begun, *flags), [first, *rest])
    ranks.train(plan(folder, *begun, *flags), [copy.deepcopy(first)], save=tmp_path / "kept")
    layout = later or flags
    resumed = ranks.train(plan(folder, *begun, *layout, "--load", tmp_path / "kept"), rest)
    for name, weight in straight["weights"].items():
        if later:
            np.testing.assert_allclose(resumed["weights"][name], weight, atol=2e-3, err_msg=name)
        else:
            np.testing.assert_array_equal(resumed["weights"][name], weight, err_msg=name)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["delta", "latent"])
def test_layers_that_are_cut_otherwise_come_back_under_another_layout(checkpoint, adapter, plan, one, two, tmp_path,
                                                                      kind):
    """Those stacked in one are each cut by themselves, in a checkpoint too; others are not cut at all."""
    folder, flags, [first, *rest] = checkpoint(kind), (*LORA, "--lora-adapter-path", adapter(kind)), rollouts(2)
    straight = one.train(plan(folder, *flags), [first, *rest])
    cut = plan(folder, *flags, *TENSOR, "--sequence-parallel")
    two.train(cut, [copy.deepcopy(first)], save=tmp_path / "kept")
    resumed = one.train(plan(folder, *flags, "--load", tmp_path / "kept"), rest)
    for name, weight in straight["weights"].items():
        np.testing.assert_allclose(resumed["weights"][name], weight, atol=2e-3, err_msg=name)


OF_MEGATRON = ",".join(f"language_model.decoder.layers.*.{layer}" for layer in (
    "self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.in_proj", "self_attention.out_proj",
    "mlp.experts.linear_fc1", "mlp.experts.linear_fc2", "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2"))


OF_GLM = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,q_a_proj,kv_a_proj_with_mqa,q_b_proj,kv_b_proj"


@pytest.mark.full
def test_a_list_of_both_kinds_of_attention_trains_the_one_that_there_is(checkpoint, plan, two):
    """As launchers of GLM-5 name layers, and by Megatron's names."""
    flags = (*LORA, *TENSOR, "--sequence-parallel", "--experts-shared-outer-loras")
    whole, listed, named = (split(two.train(plan(checkpoint("latent"), *flags, *more), rollouts())["weights"])[0]
                            for more in ((), ("--target-modules", OF_GLM), ("--target-modules", ",".join((
                                "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj",
                                "linear_proj", "linear_fc1", "linear_fc2")))))
    assert any("kv_a_proj_with_mqa.lora_B" in name and tensor.any() for name, tensor in whole.items())
    for other in (listed, named):
        assert other.keys() == whole.keys() and all(np.array_equal(one, whole[name]) for name, one in other.items())


@pytest.mark.full
def test_layers_may_have_megatrons_names(checkpoint, plan, one):
    """All of them by their paths are all-linear; experts alone leave the expert that every token passes as it is."""
    def adapted(*flags):
        run = plan(checkpoint("delta"), *LORA, "--experts-shared-outer-loras", *flags)
        return split(one.train(run, rollouts())["weights"])[0]

    whole, named = adapted(), adapted("--target-modules", OF_MEGATRON)
    assert named.keys() == whole.keys() and all(np.array_equal(one, whole[name]) for name, one in named.items())
    experts = adapted("--target-modules", "*.mlp.experts.linear_fc1")
    assert experts.keys() == {name for name in whole if ".experts." in name and "down_proj" not in name}


@pytest.mark.full
def test_without_the_plugin_a_checkpoint_with_adapters_is_refused(checkpoint, plan, one, tmp_path):
    from miles_core.errors import CheckpointError

    one.train(plan(checkpoint(), *LORA), rollouts(), save=tmp_path / "kept")
    with pytest.raises(CheckpointError, match="optimizer state belongs to another model"):
        one.train(plan(checkpoint(), "--load", tmp_path / "kept"), rollouts())


@pytest.mark.full
def test_only_named_layers_have_adapters(checkpoint, adapter, plan, one):
    """A part of a joined layer: of q and v without k."""
    flags = (*LORA, "--target-modules", "q_proj,v_proj,down_proj,o_proj", "--exclude-modules", "o_proj")
    found = split(one.train(plan(checkpoint(), *flags), rollouts())["weights"])[0]
    assert {name.split(".")[-3] for name in found} == {"q_proj", "v_proj", "down_proj"}
    path = adapter("dense", ("q_proj", "v_proj", "down_proj"))
    warm = split(one.train(plan(checkpoint(), *flags, "--lora-adapter-path", path, "--lr", 0), rollouts())["weights"])
    for name, tensor in load_file(path / "adapter_model.safetensors").items():
        np.testing.assert_array_equal(warm[0][name], tensor)


def test_grouped_experts_get_their_own_rows():
    """What Transformer Engine's grouped layers add is what experts one by one would."""
    each = [torch.nn.Linear(8, 6, bias=False) for _ in range(3)]
    x, splits = torch.randn(10, 8), [4, 0, 6]
    found = one_by_one(each, x, splits)
    assert torch.equal(found[:4], each[0](x[:4])) and torch.equal(found[4:], each[2](x[4:]))
