"""DeepSeek-V4: runs, layouts, conversions, tables of token ids, blocks of queries, and what a plan counts."""

from pathlib import Path

import numpy as np
import pytest
import torch
from miles_megatron import cpu, estimate, hf_config, model, weights
from miles_megatron.testing.checkpoints import tensors
from miles_megatron.testing.demo import VOCAB, demo_checkpoint, demo_run, layout_gradients, trainer_plan
from miles_megatron.testing.parity import TINY, cases, model_parity, packed_logits, random_model
from miles_megatron.testing.ranks import batches, distance
from miles_specs_moe import compressed
from miles_specs_moe.deepseek_v4 import deepseek_v4
from safetensors.torch import save_file

from miles_core.errors import ConfigError

ROOT = Path(__file__).parents[3]
CASES = {case.name: case for case in cases(Path(__file__).with_name("parity.toml"))}
CASE, ODD = CASES["DeepSeek-V4"], CASES["DeepSeek-V4, three streams"]
STAYS = (".indexer.", ".tid2eid", ".gate.bias")
"""In names of tensors that no gradient moves."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose vocabulary is the examples'."""
    return demo_checkpoint(ROOT, CASE, tmp_path_factory.mktemp("v4"))


@pytest.mark.full
def test_a_run_trains_every_tensor_that_the_engine_decodes_with(folder, tmp_path):
    steps, _ = demo_run(ROOT, folder, tmp_path, "--entropy-coef", "0.01")
    assert len(steps) == 2 and all(one["train/train_rollout_logprob_abs_diff_max"] <= 2e-5 for one in steps)
    before, after = tensors(folder), tensors(tmp_path / "run" / "hf")
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    # An expert that no token was sent to stays as well.
    assert {name for name in same if ".experts." not in name} == {
        name for name in before if any(part in name for part in STAYS)}


def built(folder, **overrides):
    """The case's model under Megatron."""
    if not torch.distributed.is_initialized():
        cpu.initialize()
    random_model(CASE).save_pretrained(folder)
    hf = hf_config.read(folder)
    spec = deepseek_v4(hf).spec()
    ours = model.build(model.transformer_config(spec, overrides), spec)
    weights.load_hf(folder, ours, deepseek_v4(hf).weight_map())
    return ours


def test_where_samples_are_short_compressors_have_a_gradient_of_zero(tmp_path):
    """Ranks that wait for each parameter's gradient do not wait for ever."""
    ours = built(tmp_path)
    packed_logits(ours, [torch.arange(3, 6), torch.arange(9, 11)], None).square().sum().backward()
    found = {name: parameter.grad for name, parameter in ours.named_parameters() if "compressor" in name}
    assert all((gradient is None) == ("indexer" in name) for name, gradient in found.items()) and len(found) == 18
    assert not any(gradient.any() for gradient in found.values() if gradient is not None)


def test_routers_replay(tmp_path):
    """Those with a table, too."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    RouterReplay.clear_global_router_replay_instances()
    ours = built(tmp_path, moe_enable_routing_replay=True)
    sequences = [torch.arange(3, 40), torch.arange(50, 90)]
    with torch.no_grad():
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        free = packed_logits(ours, sequences, None)
        routes = RouterReplay.get_recorded_data()
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        for layer, changed in enumerate([None, *range(TINY["num_hidden_layers"])], -1):
            RouterReplay.set_replay_data([(one + (n == changed)) % 8 for n, one in enumerate(routes)])
            assert torch.equal(packed_logits(ours, sequences, None), free) == (changed is None), layer
    RouterReplay.clear_global_router_replay_instances()


@pytest.mark.full
def test_a_run_replays_the_engines_routes(folder, tmp_path):
    steps, _ = demo_run(ROOT, folder, tmp_path, "--plugin", "r3", "--use-rollout-routing-replay")
    assert len(steps) == 2 and all(one["train/train_rollout_logprob_abs_diff_max"] <= 2e-5 for one in steps)


def test_the_memory_plan_counts_every_parameter(folder):
    own = sum(tensor.numel() for name, tensor in tensors(folder).items()
              if not name.endswith((".tid2eid", ".gate.bias")))
    size = estimate.dimensions_of(trainer_plan(folder).config)
    assert 0 <= own - sum(estimate.parameters(size, TINY["num_hidden_layers"], True, True)) < 4  # a mean of layers


LAYOUTS = {
    "dp2-attention-and-experts-again": ("--recompute-granularity", "selective", "--recompute-modules", "core_attn",
                                        "moe"),
    "pp2-experts-again": ("--pipeline-model-parallel-size", 2, "--recompute-granularity", "selective",
                          "--recompute-modules", "moe"),
    "pp2-vpp2-recompute": ("--pipeline-model-parallel-size", 2, "--num-virtual-stages-per-pipeline-rank", 2,
                           "--recompute-granularity", "full"),
    "tp2-sp-one-expert-rank-each": ("--tensor-model-parallel-size", 2, "--sequence-parallel", "--recompute-granularity",
                                    "full", "--expert-tensor-parallel-size", 1, "--expert-model-parallel-size", 2),
    "cp2-ep2-recompute": ("--context-parallel-size", 2, "--expert-model-parallel-size", 2, "--recompute-granularity",
                          "full"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_nothing(folder, one, two, layout):
    """Of the whole gradient, and of parts that are small beside it."""
    found, expected = layout_gradients(folder, one, two, *LAYOUTS[layout])
    assert distance(found, expected) < 4e-6
    for part in ("compressor", "hc_attn_fn", "layers.0.ffn.gate.weight"):
        assert distance(found, expected, [name for name in expected if part in name]) < 1e-5, part


def test_conversion_keeps_every_bit(convert, folder, tmp_path):
    """Also of the whole numbers in tables."""
    convert("hf-to-dist", folder, tmp_path / "dist")
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", folder)
    before, after = tensors(folder), tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_files_may_have_the_names_of_the_release(convert, tmp_path):
    """Those that transformers reads."""
    from transformers import AutoModelForCausalLM

    theirs = random_model(ODD)
    theirs.save_pretrained(tmp_path / "hf")
    renamed = {}
    for name, tensor in tensors(tmp_path / "hf").items():
        name = name.replace(".attn.norm.", ".attn.kv_norm.").replace("model.embed_tokens.", "embed.")
        renamed[name.replace("model.hc_head.hc_", "hc_head_").removeprefix("model.")] = tensor
    assert {"embed.weight", "hc_head_fn", "norm.weight", "layers.0.hc_ffn_base"} <= renamed.keys()
    save_file(renamed, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in theirs.state_dict().items())
    convert("hf-to-dist", tmp_path / "hf", tmp_path / "dist")
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", tmp_path / "hf")
    after = tensors(tmp_path / "back")
    assert renamed.keys() == after.keys() and all(torch.equal(renamed[name], after[name]) for name in renamed)


@pytest.mark.full
def test_in_bfloat16_a_table_and_a_bias_keep_their_bits(folder, one, tmp_path):
    """Loaded, saved, resumed, and streamed; and frequencies of positions are not rounded."""
    before = tensors(folder)
    whole = one.train(trainer_plan(folder, "--bf16"), batches(2, vocab=VOCAB)[:1], save=tmp_path)["weights"]
    kept = [name for name in before if name.endswith((".tid2eid", ".gate.bias"))]
    assert len(kept) == 4 and all(np.array_equal(whole[name], before[name]) for name in kept)
    again = one.train(trainer_plan(folder, "--bf16", "--load", tmp_path), [])["weights"]
    assert all(np.array_equal(again[name], weight) for name, weight in whole.items())


def test_blocks_of_queries_are_no_other_attention(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, "BLOCK", 7)
    model_parity(ODD, tmp_path).check()


@pytest.mark.parametrize(("part", "other"), [
    ("seen", lambda positions, keys, window: positions[:, None] >= torch.arange(keys)),
    ("_attend", lambda scaling, before, query, window, means, mask, sinks, *, attend=compressed._attend: attend(
        scaling, before, query, window, means, torch.full_like(mask, -torch.inf), sinks)),
], ids=["windows", "compressed-keys"])
def test_a_wrong_part_is_noticed(part, other, tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, part, other)
    with pytest.raises(AssertionError, match="logits differ"):
        model_parity(CASE, tmp_path).check()


@pytest.mark.parametrize("key", ["scoring_func", "attention_bias", "n_shared_experts"])
def test_what_is_not_modelled_is_refused(key):
    from transformers import AutoConfig

    other = {"scoring_func": "sigmoid", "attention_bias": True, "n_shared_experts": 2}
    with pytest.raises(ConfigError, match=key):
        deepseek_v4(AutoConfig.for_model("deepseek_v4", **{**TINY, **CASE.config, key: other[key]}))
