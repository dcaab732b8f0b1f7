"""What is said of adapters before and after a run: options, PEFT directories, conversions, streams."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from miles_lora import peft
from miles_lora.merging import Base, merged
from miles_lora.plugin import Lora, LoraOptions
from miles_lora.served import modules
from miles_lora.targets import INSIDE, PEFT, added, alone, choice, names_of, targets
from miles_megatron.specs import Rule, WeightMap
from miles_megatron.testing.ranks import batches
from miles_testing.forked import miles
from safetensors.torch import load_file, save_file

from miles_core.config.tables import Checkpoint, Perf, Rollout, RunConfig
from miles_core.errors import CheckpointError, ConfigError, SyncError

ROOT = Path(__file__).parents[3]
LORA = ("--lora-rank", 4, "--lora-alpha", 12)

LAYER = WeightMap(rules=(
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Rule("decoder.layers.{layer}.self_attention.linear_qkv.weight",
         tuple(f"model.layers.{{layer}}.self_attn.{part}_proj.weight" for part in "qkv"), "qkv", (0, 1)),
    Rule("decoder.layers.{layer}.mlp.router.weight", ("model.layers.{layer}.mlp.gate.weight",), layers=(0, 1)),
    Rule("decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight",
         ("model.layers.{layer}.mlp.experts.{expert}.gate_up_proj.weight",), "halves", (0, 1), 2),
), heads=4, groups=2, head_dim=8)  # fmt: skip


def logits(model):
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits[0]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("kind", ["dense", *(pytest.param(kind, marks=pytest.mark.full)
                                             for kind in ("tied", "fused", "moe", "sees"))])
def test_peft_loads_what_a_run_saves_with_the_logits_of_the_merged_model(checkpoint, plan, one, export, kind, tmp_path):
    """A trainer's own export: the model and, beside it, the adapters. Of experts PEFT knows no layer one by one; of a
    model that sees, the adapters lie inside of it and its tower has none."""
    import peft as lib
    from transformers import AutoModelForCausalLM

    narrow = {"moe": ("--target-modules", "q_proj,k_proj,v_proj,o_proj"),
              "sees": ("--target-modules", "o_proj,gate_proj,up_proj,down_proj")}.get(kind, ())
    one.train(plan(checkpoint(kind), *LORA, "--lr", "3e-2", *narrow), batches(2, vocab=264), save=tmp_path / "kept")
    export(plan(checkpoint(kind), *LORA, *narrow, "--load", tmp_path / "kept"), tmp_path / "hf")
    base, whole = (AutoModelForCausalLM.from_pretrained(folder) for folder in (checkpoint(kind), tmp_path / "hf"))
    plain = logits(base)
    found = logits(lib.PeftModel.from_pretrained(base, tmp_path / "hf-adapter"))
    assert (found - logits(whole)).abs().max() < 1e-4 and (found - plain).abs().max() > 0.1
    assert peft.read(tmp_path / "hf-adapter") == peft.Shape(4, 12)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_checkpoint_converts_to_a_directory_that_merges_and_loads(checkpoint, adapter, plan, one, convert, merged,
                                                                   tmp_path, kind):
    """torch_dist with adapters -> one directory with both -> the merged model, to the bit; and back into a run."""
    flags = (*LORA, "--lora-adapter-path", adapter(kind), "--lr", 0)
    one.train(plan(checkpoint(kind), *flags), batches(1, vocab=264), save=tmp_path / "kept")
    convert("dist-to-hf", tmp_path / "kept", tmp_path / "both", "--hf-checkpoint", checkpoint(kind), "--plugin", "lora",
            "--option", "lora.lora_rank=4")
    with pytest.raises(ConfigError) as raised:
        convert("merge-lora", tmp_path / "both", tmp_path / "whole")
    assert raised.value.code == "lora-alpha-missing"
    convert("merge-lora", tmp_path / "both", tmp_path / "whole", "--lora-alpha", 12)
    expected = load_file(merged(kind) / "model.safetensors")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert whole.keys() == expected.keys() and all(torch.equal(whole[name], expected[name]) for name in whole)
    again = one.train(plan(tmp_path / "both", *LORA, "--lr", 0), batches(1, vocab=264))["weights"]
    both = load_file(tmp_path / "both" / "model.safetensors")
    assert again.keys() == both.keys() and all(torch.equal(torch.from_numpy(again[name]), both[name]) for name in both)
    with pytest.raises(ConfigError, match="none of the plugins has this option.*lora.rank=4"):
        convert("hf-to-dist", checkpoint(kind), tmp_path / "no", "--plugin", "lora", "--option", "lora.rank=4")


def test_adapters_of_experts_in_one_tensor_merge_as_the_trainer_does(checkpoint, plan, one, export, convert, tmp_path):
    """To the bit its own export, beside which the adapters lie."""
    base = checkpoint("packed")
    one.train(plan(base, *LORA, "--lr", "3e-2"), batches(2, vocab=264), save=tmp_path / "kept")
    export(plan(base, *LORA, "--load", tmp_path / "kept"), tmp_path / "hf")
    convert("merge-lora", base, tmp_path / "merged", "--lora-adapter-path", tmp_path / "hf-adapter")
    plain, expected, found = (load_file(folder / "model.safetensors")
                              for folder in (base, tmp_path / "hf", tmp_path / "merged"))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    experts = [name for name in plain if ".experts." in name]
    assert experts and not any(torch.equal(found[name], plain[name]) for name in experts)


def test_adapters_are_not_merged_into_quantised_weights(checkpoint, adapter, convert, tmp_path):
    shutil.copytree(checkpoint(), tmp_path / "fp8")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(CheckpointError, match="merged into quantised weights .got fp8"):
        convert("merge-lora", tmp_path / "fp8", tmp_path / "out", "--lora-adapter-path", adapter())


def test_merging_refuses_what_does_not_belong_together(checkpoint, adapter, convert, tmp_path):
    with pytest.raises(CheckpointError, match="no adapters to merge"):
        convert("merge-lora", checkpoint(), tmp_path / "out")
    with pytest.raises(CheckpointError, match="adapters belong to another model"):
        convert("merge-lora", checkpoint("moe"), tmp_path / "out", "--lora-adapter-path", adapter("dense"))
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("more", [{"target_modules": ["q_proj", "embed_tokens"]}, {"lora_bias": True}, {"trained": 1},
                                  {"target_modules": ["q_proj", "lm_head"]}])
def test_what_peft_keeps_beside_adapters_of_layers_is_merged_or_refused(checkpoint, convert, tmp_path, more):
    """An output layer's adapter is one of a layer, and the embedding that PEFT puts beside it is the base's."""
    import peft as lib
    from transformers import AutoModelForCausalLM

    trained = more.pop("trained", 0)
    kind = {"target_modules": ["q_proj"], "r": 4, "lora_alpha": 12, "init_lora_weights": False} | more
    model = lib.get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint()), lib.LoraConfig(**kind)).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(trained)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=bool(trained) or "auto")
    words = ("merge-lora", checkpoint(), tmp_path / "out", "--lora-adapter-path", tmp_path / "adapter")
    if "lm_head" in kind["target_modules"]:
        convert(*words)
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert (logits(whole) - logits(model)).abs().max() < 1e-4
        return
    with pytest.raises(CheckpointError) as raised:
        convert(*words)
    assert raised.value.code in ("lora-tensors-beside", "peft-kind-unsupported") and not (tmp_path / "out").exists()


def test_adapters_to_begin_with_have_to_fit(adapter, tmp_path):
    with pytest.raises(CheckpointError, match="they have --lora-rank 4, the run 8"):
        peft.check(adapter(), peft.Shape(8, 12))
    other = tmp_path / "dora"
    other.mkdir()
    said = json.loads((adapter() / "adapter_config.json").read_text()) | {"use_dora": True}
    (other / "adapter_config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="use_dora"):
        peft.read(other)
    with pytest.raises(CheckpointError, match="PEFT directory"):
        peft.read(tmp_path)


def test_rules_of_adapters_name_layers_as_peft_does():
    chosen = targets(LAYER, ("all-linear",), ("k_proj",))
    whole = added(LAYER, chosen)
    assert [rule.megatron.rpartition(".")[2] for rule in whole.rules] == [
        "weight", "q_proj_A", "q_proj_B", "v_proj_A", "v_proj_B", "weight", "weight", "gate_up_proj_A",
        "gate_up_proj_B", "weight"]
    last = alone(whole).rules[-1]
    assert (last.join, last.experts, last.layers) == ("halves", 2, (0, 1)), "rows of B are cut like the layer's"
    assert last.hf == ("base_model.model.model.layers.{layer}.mlp.experts.{expert}.gate_up_proj.lora_B.weight",)
    with pytest.raises(ConfigError, match="--target-modules: the model has no linear layers of this name .*gate_proj"):
        targets(LAYER, ("gate_proj",), ())
    with pytest.raises(ConfigError, match="no layer is left"):
        targets(LAYER, ("q_proj",), ("q_proj",))


NAMES = [f"model.layers.0.{name}" for name in (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.experts.1.gate_proj",
    "mlp.experts.1.up_proj", "mlp.shared_expert.up_proj", "linear_attn.in_proj_qkv", "linear_attn.out_proj")]
PATH = "language_model.decoder.layers.*."


@pytest.mark.parametrize(("wanted", "found"), [
    (("linear_qkv",), NAMES[:2]), (("linear_proj", "in_proj"), [NAMES[2], NAMES[7]]), (("linear_fc1",), NAMES[3:7]),
    ((f"{PATH}mlp.linear_fc1",), [NAMES[3]]), ((f"{PATH}mlp.experts.linear_fc1",), NAMES[4:6]),
    (("*.mlp.shared_experts.linear_fc1", "linear_k"), [NAMES[1], NAMES[6]]),
    ((f"{PATH}self_attention.out_proj", "up_proj"), [NAMES[5], NAMES[6], NAMES[8]]),
])
def test_layers_go_by_megatrons_names_too(wanted, found):
    assert choice(NAMES, wanted, ()) == set(found)


LATENT = [f"model.layers.0.self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")]


def test_latent_attention_has_no_keys_of_its_own(tmp_path):
    """Lists of launch scripts name the layers of both kinds of attention; a plan says which there are not."""
    wanted = ("q_proj", "k_proj", "v_proj", "o_proj", "q_b_proj")
    assert choice(LATENT, wanted, ()) == {LATENT[1], LATENT[3]}
    for names, absent in ((LATENT, ("o_proj", "gate_proj")), (NAMES, ("v_proj",))):
        with pytest.raises(ConfigError) as caught:
            choice(names, absent, ())
        assert caught.value.code == "lora-target-unknown" and str(caught.value.got) == absent[-1]
    save_file({f"{name}.weight": torch.zeros(2, 2) for name in LATENT}, tmp_path / "model.safetensors")
    config, notes = RunConfig(checkpoint=Checkpoint(hf_checkpoint=str(tmp_path))), []
    Lora(LoraOptions(lora_rank=8, target_modules=",".join(wanted)), config).check(config, notes.append)
    assert len(notes) == 1 and "q_proj, k_proj, v_proj" in notes[0]


def test_a_rank_is_needed_and_a_server_is_told_of_it(checkpoint):
    config = RunConfig(perf=Perf(weight_sync="adapter"), rollout=Rollout(engine="sglang"))
    config = replace(config, checkpoint=replace(config.checkpoint, hf_checkpoint=str(checkpoint())))
    with pytest.raises(ConfigError, match="need a rank"):
        Lora(LoraOptions(), config).engine_args({})
    found = Lora(LoraOptions(lora_rank=8, lora_base_cpu_backup=True), config).engine_args({"max_loras_per_batch": 4})
    assert found == {"enable_lora": True, "max_lora_rank": 8, "max_loras_per_batch": 4,
                     "enable_weights_cpu_backup": True, "lora_target_modules": [
                         "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]}
    assert Lora(LoraOptions(lora_rank=8), replace(config, perf=Perf())).engine_args({"tp_size": 2}) == {"tp_size": 2}
    with pytest.raises(ConfigError, match="q_proj, k_proj, v_proj as one layer.*none for k_proj"):
        modules(checkpoint(), ("q_proj", "v_proj"), ())
    with pytest.raises(ConfigError, match="weights of experts.*gate_proj.*leave --weight-sync out"):
        modules(checkpoint("moe"), ("all-linear",), ())
    assert modules(checkpoint("moe"), ("all-linear",), ("gate_proj", "up_proj", "down_proj"))[0] == "k_proj"


@pytest.mark.parametrize(("own", "lacks"), [
    (["q_proj"], "no k_proj, v_proj"), (["qkv_proj"], None), (["q_proj", "k_proj", "v_proj", "o_proj"], None),
    (["all"], None), (["gate_up_proj"], "no k_proj, q_proj, v_proj"),
])
def test_layers_that_a_run_names_for_servers_have_room_for_all_adapters(own, lacks, checkpoint):
    config = RunConfig(perf=Perf(weight_sync="adapter"), rollout=Rollout(engine="sglang"))
    config = replace(config, checkpoint=replace(config.checkpoint, hf_checkpoint=str(checkpoint())))
    plugin = Lora(LoraOptions(lora_rank=8, target_modules="q_proj,k_proj,v_proj"), config)
    if lacks is None:
        assert plugin.engine_args({"lora_target_modules": own})["lora_target_modules"] == own
        return
    with pytest.raises(ConfigError) as caught:
        plugin.engine_args({"lora_target_modules": own})
    assert caught.value.who == "--sglang-lora-target-modules" and lacks in str(caught.value)


def test_a_stream_is_merged_whole_or_not_at_all():
    names, weight = names_of("w.weight"), torch.randn(6, 5)
    first, second = torch.randn(2, 5), torch.randn(6, 2)
    pair = list(zip(names, (first, second), strict=True))
    ((name, found),) = merged(iter([*pair, ("w.weight", weight)]), 3.0)
    assert name == "w.weight" and torch.allclose(found, weight + 3 * second @ first, atol=1e-6)
    zero = [(names[0], first), (names[1], torch.zeros(6, 2)), ("w.weight", weight.bfloat16())]
    assert torch.equal(dict(merged(iter(zero), 3.0))["w.weight"], weight.bfloat16())
    with pytest.raises(SyncError, match="half of an adapter"):
        list(merged(iter([pair[0], ("w.weight", weight)]), 3.0))
    with pytest.raises(SyncError, match="without the weights"):
        list(merged(iter([("w.weight", weight), *pair]), 3.0))
    for kind in (torch.float8_e4m3fn, torch.uint8):  # their scales are other tensors
        with pytest.raises(SyncError) as caught:
            list(merged(iter([*pair, ("w.weight", weight.to(kind))]), 3.0))
        assert caught.value.code == "lora-weight-quantised"


def test_an_engine_keeps_the_base_and_takes_adapters_alone():
    names, weight, other = names_of("w.weight"), torch.randn(6, 5), torch.randn(3)
    base, (first, second) = Base(2.0), (torch.randn(2, 5), torch.randn(6, 2))
    with pytest.raises(SyncError, match="before any weights"):
        list(base.taken(iter([(names[0], first), (names[1], second)])))
    whole = [("w.weight", weight), ("n.weight", other)]
    dict(base.taken(iter([(names[0], first), (names[1], second), *whole])))
    later = dict(base.taken(iter([(names[0], first), (names[1], 5 * second)])))
    assert list(later) == ["w.weight", "n.weight"] and torch.equal(later["n.weight"], other)
    assert torch.allclose(later["w.weight"], weight + 10 * second @ first, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), pytest.param(("--trainer-host", "process"), marks=pytest.mark.slow)],
                         ids=["in-process", "shared-memory"])
def test_a_run_is_the_same_whether_weights_travel_merged_or_adapters_alone(tmp_path, more):
    """Every metric of three rollouts; the first tokens have the base's log-probs to the bit; accuracy rises."""
    found = {}
    for name, flags in {"merged": (), "alone": ("--weight-sync", "adapter")}.items():
        words = ["run", "examples/demo.toml", "--no-live", "--run-dir", tmp_path / name, "--num-rollout", "3",
                 "--lora-rank", "8", "--lr", "3e-3", *more, *flags]
        outcome = miles(words, ROOT, timeout=200)
        assert outcome.code == 0, outcome.err
        events = [json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()]
        steps = [event["metrics"] for event in events if event["event"] == "metrics"]
        found[name] = [{key: value for key, value in step.items() if not key.startswith("perf/")} for step in steps]
        sizes = [event["bytes"] for event in events if event["event"] == "weight_sync"]
        assert len(set(sizes)) == 1 if name == "merged" else sizes[1] < sizes[0] / 2 and len(set(sizes[1:])) == 1
    assert found["merged"] == found["alone"]
    first, *_, last = found["merged"]
    assert first["train/train_rollout_logprob_abs_diff_max"] == 0 < last["train/train_rollout_logprob_abs_diff_max"]
    scores = [event["metrics"]["eval/sums"] for event in events if event["event"] == "eval"]
    assert scores[-1] > scores[0] + 0.2


@pytest.mark.parametrize(("kind", "outer"), [("dense", "model."), *(("sees", outer) for outer in INSIDE)])
def test_an_engine_alone_serves_the_adapters_that_it_is_given(kind, outer, checkpoint, adapter, convert, tmp_path):
    """--debug-rollout-only: nobody trains, and the local engine reads the base and the PEFT directory, whatever that
    calls a text model inside of another."""
    from miles_local.weights import read_tensors

    from miles_core.config.tables import Debug

    base = checkpoint(kind)
    given = {f"{PEFT}{outer}{name[name.index('layers.'):]}": one
             for name, one in peft.tensors(adapter(kind, ("o_proj",)))}
    peft.write(tmp_path / "adapter", peft.Shape(4, 12), given, str(base))
    convert("merge-lora", base, tmp_path / "merged", "--lora-adapter-path", tmp_path / "adapter")
    plugin = Lora(LoraOptions(lora_alpha=12.0, lora_adapter_path=str(tmp_path / "adapter")),
                  RunConfig(checkpoint=Checkpoint(hf_checkpoint=str(base)), debug=Debug(debug_rollout_only=True)))
    found = dict(plugin.import_weights(read_tensors(base)))
    expected = load_file(tmp_path / "merged" / "model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.filterwarnings("ignore:.*(is_gradient_checkpointing|missing adapter keys)")
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_peft_loads_what_is_saved_of_a_model_that_sees_whatever_its_release_calls_the_text_model(kind, monkeypatch,
                                                                                               tmp_path):
    """Where a name is none of the module's, PEFT warns and computes without the adapter."""
    import peft as lib
    from transformers import AutoConfig, AutoModelForImageTextToText

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
             "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 16}
    seeing = {"depth": 1, "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1,
              "num_attention_heads": 1, "out_hidden_size": 8, "patch_size": 4}
    folder, out = tmp_path / "base", tmp_path / "out"
    AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, text_config=sizes, vision_config=seeing)
                                            ).save_pretrained(folder)
    (name, weight), = [one for one in load_file(folder / "model.safetensors").items()
                       if one[0].endswith("self_attn.o_proj.weight")]
    first, second = torch.randn(2, 8), torch.randn(8, 2)
    plugin = Lora(LoraOptions(lora_rank=2), RunConfig(checkpoint=Checkpoint(hf_checkpoint=str(folder))))
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    list(plugin.save_weights(iter([*zip(names_of(name), (first, second), strict=True), (name, weight)]), out))
    base = AutoModelForImageTextToText.from_pretrained(folder)
    adapted = lib.PeftModel.from_pretrained(base, tmp_path / "out-adapter").merge_and_unload()
    merged = adapted.model.language_model.layers[0].self_attn.o_proj.weight
    assert torch.allclose(merged, weight + 8 * second @ first, atol=1e-5)


@pytest.mark.parametrize("trainer", ["megatron", "fsdp"])
def test_adapters_of_a_text_model_inside_another_have_any_of_its_names(checkpoint, plan, one, convert, tmp_path,
                                                                      trainer):
    """transformers' modules, releases of Gemma 3, and the text model alone begin them differently."""
    base, found = checkpoint("sees"), {}
    draw = torch.Generator().manual_seed(1)
    shapes = {name: weight.shape for name, weight in load_file(base / "model.safetensors").items()
              if name.endswith(".self_attn.o_proj.weight") and "vision" not in name}
    inside = {name: [torch.randn(4, shape[1], generator=draw), torch.randn(shape[0], 4, generator=draw) * 0.1]
              for name, shape in shapes.items()}
    for outer in ("model.", *INSIDE):
        adapters = {adapter: tensor for name, pair in inside.items()
                    for adapter, tensor in zip(names_of(outer + name[name.index("layers."):]), pair, strict=True)}
        peft.write(tmp_path / outer, peft.Shape(4, 12), adapters, str(base))
        flags = (*LORA, "--lora-adapter-path", tmp_path / outer, "--target-modules", "o_proj", "--lr", 0)
        found[outer] = one.train(plan(base, *flags, "--trainer", trainer), batches(1, vocab=264))["weights"]
        convert("merge-lora", base, tmp_path / f"{outer}merged", "--lora-adapter-path", tmp_path / outer)
    expected, merged_base = found.pop("model."), load_file(tmp_path / "model.merged" / "model.safetensors")
    assert not torch.equal(merged_base[next(iter(inside))], load_file(base / "model.safetensors")[next(iter(inside))])
    for outer, weights in found.items():
        assert weights.keys() == expected.keys()
        assert all((weights[name] == value).all() for name, value in expected.items()), outer
        merged_here = load_file(tmp_path / f"{outer}merged" / "model.safetensors")
        assert all(torch.equal(merged_here[name], one) for name, one in merged_base.items())
