"""Trainer and engine compute with the same weights; layouts change nothing; conversions; what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from miles_int4_qat.conversion import convert_to_plain
from miles_int4_qat.names import check_width, stated
from miles_int4_qat.quantise import rounded
from miles_int4_qat.stream import unpacked
from miles_megatron import cpu
from miles_megatron.testing.checkpoints import tensors
from miles_megatron.testing.ranks import batches, distance
from miles_testing.forked import miles

from miles_core.errors import CheckpointError, ConfigError
from miles_core.plugins.plan import prepare
from miles_core.record.events import read

pytestmark = pytest.mark.xdist_group("int4-qat")  # one worker: the processes are started once

ARITHMETIC = Path(__file__).parents[3] / "examples" / "arithmetic"
SIZES = dict(vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=128, eos_token_id=258, pad_token_id=256,
             attn_implementation="eager", tie_word_embeddings=True)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True,
               decoder_sparse_step=1)
RUN = ("--prompt-data", "x/no.jsonl", "--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
       "--rollout-max-response-len", "41", "--no-bf16", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "96",
       "--trainer-host", "process", "--disable-rewards-normalization", "--advantage-estimator", "grpo",
       "--lr", "1e-2")  # fmt: skip
QAT = ("--plugin", "int4-qat")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with `dense` and `moe`, and `dense-int4` and `moe-int4`, which the command made of them."""
    import transformers as hf

    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    made = {"dense": hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES)),
            "llama": hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
            "moe": hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SIZES, **EXPERTS))}
    for name, model in made.items():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3 if parameter.dim() > 1 else 1)
        model.save_pretrained(folder / name)
        subprocess.run([sys.executable, ARITHMETIC / "make_tokenizer.py", folder / name], check=True)
        converted(folder / name, folder / f"{name}-int4")
    return folder


def converted(source, out, *flags):
    from miles_core.cli import cli

    try:
        cli(["convert", "hf-to-int4", str(source), str(out), *map(str, flags)], standalone_mode=False)
    finally:
        cpu.leave()  # the command's process would end here
    return json.loads((out / "config.json").read_text())


# ------------------------------------------------------------------------------------------------------- conversion


@pytest.mark.parametrize("name", ["dense", "moe", "llama"])
def test_transformers_loads_what_the_command_writes(models, name):
    """With compressed-tensors: its logits are those of the rounded weights, not those of the plain ones."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(models / name)
    theirs = AutoModelForCausalLM.from_pretrained(models / f"{name}-int4")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        before, found = plain(ids).logits, theirs(ids).logits
        weights = dict(unpacked(tensors(models / f"{name}-int4").items()))
        source = tensors(models / name)
        assert weights.keys() == source.keys()
        for key, weight in weights.items():
            packed = f"{key}_packed" in tensors(models / f"{name}-int4")
            assert packed == ("experts." in key if name == "moe" else "_proj" in key), key
            assert torch.equal(weight, rounded(source[key], 32, torch.float32) if packed else source[key]), key
        plain.save_pretrained(models / f"{name}-rounded", state_dict=None)
    from safetensors.torch import save_file

    save_file(weights, models / f"{name}-rounded" / "model.safetensors", {"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(models / f"{name}-rounded")
    with torch.no_grad():
        assert torch.equal(found, expected(ids).logits)
    assert (found - before).abs().max() > 0.05


def test_experts_in_one_tensor_are_packed_apart(tmp_path):
    """As a weight sync sends them; engines have names for one expert."""
    import transformers as hf

    source, out, back = tmp_path / "plain", tmp_path / "packed", tmp_path / "back"
    config = hf.Gemma4TextConfig(**SIZES | dict(head_dim=32), global_head_dim=32, enable_moe_block=True, num_experts=2,
                                 top_k_experts=1, moe_intermediate_size=64, hidden_size_per_layer_input=0,
                                 layer_types=["sliding_attention", "full_attention"])
    hf.Gemma4ForCausalLM(config).save_pretrained(source)
    converted(source, out)
    before, after, each = tensors(source), tensors(out), "model.layers.0.experts."
    assert f"{each}gate_up_proj" in before and f"{each}gate_up_proj" not in after
    assert sum(name.endswith("_packed") for name in after) == 2 * 2 * 3
    convert_to_plain(out, back)
    gate, up = before[f"{each}gate_up_proj"][1].chunk(2)
    for name, part in {"gate": gate, "up": up}.items():
        assert torch.equal(tensors(back)[f"{each}1.{name}_proj.weight"], rounded(part.contiguous(), 32, torch.float32))


@pytest.mark.parametrize("inside", [False, True], ids=["text model", "beside a vision tower"])
def test_a_packed_directory_becomes_plain(models, tmp_path, inside):
    """Kimi K2.5 says of its text model alone that it is packed."""
    source, out = tmp_path / "packed", tmp_path / "plain"
    shutil.copytree(models / "moe-int4", source)
    keys = json.loads((source / "config.json").read_text())
    if inside:
        keys = {"model_type": "outer", "dtype": "float32", "text_config": keys}
        (source / "config.json").write_text(json.dumps(keys))
    assert stated(source).group_size == 32
    convert_to_plain(source, out)
    before, after = tensors(models / "moe"), tensors(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], rounded(tensor, 32, torch.float32) if "experts." in name else tensor)
               for name, tensor in before.items())
    assert "quantization_config" not in (out / "config.json").read_text()
    with pytest.raises(CheckpointError) as caught:
        convert_to_plain(out, tmp_path / "no")
    assert caught.value.code == "int4-source-not-packed"


def test_options_of_the_command_and_what_it_refuses(models, tmp_path):
    said = converted(models / "moe", tmp_path / "all", "--targets", "linears", "--group-size", 64)
    assert said["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 64
    assert said["dtype"] == "float32"
    assert sum(name.endswith("_packed") for name in tensors(tmp_path / "all")) == 2 * (4 + 4 * 3)
    with pytest.raises(ConfigError, match=r"groups of 128 do not divide .*\(got 64\).*groups of 32 or 64 would fit"):
        converted(models / "dense", tmp_path / "no", "--group-size", 128)
    with pytest.raises(ConfigError, match=r"group_size should be one of 32, 64, 128 \(got 48\)"):
        converted(models / "dense", tmp_path / "no", "--group-size", 48)
    with pytest.raises(ConfigError, match=r"no weight would be packed \(got targets experts\)"):
        converted(models / "dense", tmp_path / "no", "--targets", "experts")
    with pytest.raises(CheckpointError, match="already quantised"):
        converted(models / "dense-int4", tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_sizes_from_shapes_are_those_of_the_files(models, tmp_path):
    """Of a bfloat16 checkpoint; and what int4 saves of 70B, by shapes alone: between 3.2 and 3.7 times."""
    import transformers as hf
    from miles_int4_qat.sizes import KNOWN, shapes, size

    for name in ("dense", "moe"):
        source = tmp_path / name
        hf.AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.bfloat16).save_pretrained(source)
        fields = json.loads((source / "config.json").read_text())
        found = size(shapes(fields.pop("model_type"), fields), (32, 64))
        assert found.plain == sum(tensor.nbytes for tensor in tensors(source).values())
        for (targets, group), expected in found.packed.items():
            out = tmp_path / f"{name}-{targets}-{group}"
            assert converted(source, out, "--targets", targets, "--group-size", group)["dtype"] == "bfloat16"
            assert expected == sum(tensor.nbytes for tensor in tensors(out).values())
    large = size(shapes(*KNOWN["70B (Llama-3-70B)"]))
    assert large.plain == 2 * 70_553_706_496
    assert [3.2 < large.plain / one < 3.7 for one in large.packed.values()] == [True] * 4


# ------------------------------------------------------------------------------------------- trainer against engine


RUN_FILE = """
plugins = ["digits.py", "grpo"]
[rollout]
prompt_data = "train.jsonl"
input_key = "prompt"
label_key = "label"
apply_chat_template = true
num_rollout = 2
rollout_batch_size = 4
n_samples_per_prompt = 4
rollout_max_response_len = 20
rm_type = ["digits"]
[perf]
bf16 = false
use_dynamic_batch_size = true
max_tokens_per_gpu = 256
[optimizer]
lr = 1e-2
"""
DIGITS = '''
"""A reward that a random model can earn at once: the share of even token ids in its answer."""
from miles_core import hookimpl


class Digits:
    """Scores the parity of token ids."""

    @hookimpl("reward", name="digits")
    def digits(self, sample):
        ids = sample.tokens[-sample.response_length:]
        return float((ids % 2 == 0).mean())
'''


@pytest.fixture
def run(models, tmp_path):
    """(model, engine's checkpoint, *flags) -> the metrics of a run."""
    (tmp_path / "run.toml").write_text(RUN_FILE)
    (tmp_path / "digits.py").write_text(DIGITS)
    rows = [{"prompt": [{"role": "user", "content": f"{10 + i}+{i}="}], "label": str(10 + 2 * i)} for i in range(32)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start(name, engine, *flags):
        done = miles(["run", "run.toml", "--no-live", "--run-dir", "run", "--ref-load", models / name,
                      "--hf-checkpoint", models / engine, *QAT, *map(str, flags)], tmp_path)
        assert done.code == 0, done.err
        return [event["metrics"] for event in read(tmp_path / "run" / "events.jsonl") if event["event"] == "metrics"]

    return start


def gaps(metrics, kind=""):
    return [one[f"train/train_rollout_logprob_abs_diff{kind}"] for one in metrics]


@pytest.mark.parametrize(("name", "flags", "most"), [
    ("dense", (), 0.0), pytest.param("dense", ("--trainer-host", "process"), 0.0, marks=pytest.mark.full),
    ("moe", (), 2e-6), pytest.param("llama", (), 2e-5, marks=pytest.mark.full), ("dense", ("--bf16",), 0.03),
], ids=["dense", "dense-shared-memory", "moe", "llama-through-transformers", "dense-bf16"])  # fmt: skip
def test_the_trainer_computes_what_an_int4_engine_computes(run, name, flags, most):
    """In float32 to the bit (a mixture sums its experts in another order); the engine unpacks what it is sent."""
    assert max(gaps(run(name, f"{name}-int4", *flags), "_max")) <= most


@pytest.mark.full
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_without_rounding_in_the_forward_the_engine_computes_something_else(run, name):
    """What quantisation-aware training removes: the same engine and the same stream, a trainer with plain weights."""
    assert min(gaps(run(name, f"{name}-int4", "--int4-qat.forward", "false"))) > 0.005


def test_a_plain_engine_is_sent_the_rounded_values(run):
    assert gaps(run("dense", "dense"), "_max") == [0.0, 0.0]


@pytest.mark.full
def test_it_learns(run):
    metrics = run("dense", "dense-int4", "--num-rollout", 14, "--rollout-batch-size", 8,
                  "--rollout-max-response-len", 10)
    rewards = [one["rollout/raw_reward"] for one in metrics]
    assert np.mean(rewards[:2]) < 0.65 and np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.2, rewards


# --------------------------------------------------------------------------------------------------------- trainers


@pytest.fixture(scope="module")
def plan():
    """(folder, *flags) -> the plan of a run on it."""
    return lambda folder, *flags: prepare(None, ["--hf-checkpoint", str(folder), *RUN, *map(str, flags)])


PLAIN = ("--no-use-distributed-optimizer", "--clip-grad", 0, "--lr", 0)
TWO = ("--actor-num-gpus-per-node", 2)
LAYOUTS = {
    "tp2": ("dense", (*TWO, "--tensor-model-parallel-size", 2)),
    "tp2-sp-recompute": ("dense", (*TWO, "--tensor-model-parallel-size", 2, "--sequence-parallel",
                                   "--recompute-granularity", "full")),
    "pp2": ("dense", (*TWO, "--pipeline-model-parallel-size", 2)),
    "ep2": ("moe", (*TWO, "--expert-model-parallel-size", 2)),
    "etp2": ("moe", (*TWO, "--tensor-model-parallel-size", 2, "--sequence-parallel",
                     "--expert-tensor-parallel-size", 2)),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2-sp-recompute", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "tp2", "pp2", "ep2", "etp2"))])
def test_a_layout_changes_nothing(models, plan, one, two, layout):
    """Loss and gradient on two ranks and on one, in other micro-batches; and they are not those of plain weights."""
    name, flags = LAYOUTS[layout]
    [batch] = batches(1, vocab=SIZES["vocab_size"])
    loss, expected = one.gradients(plan(models / name, *QAT, *PLAIN, "--max-tokens-per-gpu", 256), batch)
    other, found = two.gradients(plan(models / name, *QAT, *PLAIN, *flags), batch)
    assert other == pytest.approx(loss, abs=1e-6)
    assert distance(found, expected) < 4e-6
    _, without = one.gradients(plan(models / name, *PLAIN), batch)
    assert distance(without, expected) > 0.02


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_the_gradient_is_that_of_a_model_that_holds_the_rounded_weights(models, plan, one, name, tmp_path):
    """The straight-through estimator, through the whole model: to the bit."""
    import shutil

    from safetensors.torch import save_file

    shutil.copytree(models / name, tmp_path / "rounded")
    save_file(dict(unpacked(tensors(models / f"{name}-int4").items())), tmp_path / "rounded" / "model.safetensors")
    [batch] = batches(1, vocab=SIZES["vocab_size"])
    loss, expected = one.gradients(plan(tmp_path / "rounded", *PLAIN), batch)
    other, found = one.gradients(plan(models / name, *QAT, *PLAIN), batch)
    assert other == loss and found.keys() == expected.keys()
    for key in expected:
        assert np.array_equal(found[key], expected[key]), key


def test_weights_stay_and_move_in_full_precision(models, plan, one):
    """What is saved and stepped are the weights themselves."""
    found = one.train(plan(models / "dense", *QAT, "--lr", 1e-6), batches(1, vocab=SIZES["vocab_size"]))["weights"]
    for name, before in tensors(models / "dense").items():
        assert 0 < np.abs(found[name] - before.numpy()).max() < 1e-5, name


@pytest.mark.full
def test_the_reference_computes_as_the_actor_does_or_plainly(models, plan, one):
    """By the option; a KL of 0 before the first step, or that between a model and its rounded self."""
    [batch] = batches(1, vocab=SIZES["vocab_size"])
    kl = {}
    for reference in (True, False):
        made = plan(models / "dense", *QAT, "--use-kl-loss", "--kl-loss-coef", 0.1, "--int4-qat.reference", reference)
        kl[reference] = one.train(made, [batch])["steps"][0]["train/kl_loss"]
    assert kl[True] == 0 and kl[False] > 1e-3


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_what_engines_are_sent(models, plan, name):
    """By their checkpoint: the tensors of an int4 one, names, dtypes and bits; rounded weights under plain names."""
    from miles_int4_qat.plugin import Int4Qat, Int4QatOptions
    from miles_megatron.families import FAMILIES
    from transformers import AutoConfig

    source, hf = tensors(models / name), AutoConfig.from_pretrained(models / name)
    for engine in (f"{name}-int4", name):
        plugin = Int4Qat(Int4QatOptions(), plan(models / engine, *QAT, "--ref-load", models / name).config)
        plugin.weight_map(FAMILIES[hf.model_type].weight_map(hf), "actor")
        sent = dict(plugin.export_weights(iter(source.items())))
        expected = tensors(models / f"{name}-int4")
        expected = expected if engine != name else dict(unpacked(expected.items()))
        assert sent.keys() == expected.keys() and len(sent) == len(expected)
        for key, tensor in sent.items():
            assert tensor.dtype == expected[key].dtype and torch.equal(tensor, expected[key]), key


def test_an_int4_checkpoint_enables_it(models, plan):
    assert "int4-qat" in [one.manifest.name for one in plan(models / "moe-int4", "--ref-load", models / "moe").selected]
    assert "int4-qat" not in [one.manifest.name for one in plan(models / "moe").selected]


@pytest.mark.parametrize(("flags", "what"), [
    (("--int4-qat.group-size", 64), r"the engine's checkpoint has groups of 32 \(got group_size 64\)"),
    (("--engine", "sglang", "--weight-sync", "disk", "--update-weight-disk-dir", "d"),
     "SGLang loads no files over layers that it has repacked"),
])
def test_what_is_refused_before_anything_runs(models, plan, flags, what):
    with pytest.raises(ConfigError, match=what):
        plan(models / "dense-int4", *QAT, "--ref-load", models / "dense", *flags)


@pytest.mark.parametrize(("change", "what"), [
    ({"num_bits": 8}, "8"), ({"symmetric": False}, "False"), ({"strategy": "channel"}, "channel"), ({}, None),
    (None, "gptq"),
], ids=str)
def test_a_plan_knows_what_int4_is_trained(models, plan, tmp_path, change, what):
    for file in (models / "dense-int4").iterdir():
        (tmp_path / file.name).symlink_to(file)
    said = json.loads((tmp_path / "config.json").read_text())
    (group,) = said["quantization_config"]["config_groups"].values()
    group["weights"] |= change or {}
    if change is None:
        said["quantization_config"]["quant_method"] = "gptq"
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(said))
    if what is None:
        plan(tmp_path, *QAT, "--ref-load", models / "dense")
    else:
        with pytest.raises(ConfigError, match=f"quantised in a way that plugin int4-qat does not train .*{what}"):
            plan(tmp_path, *QAT, "--ref-load", models / "dense")


def test_a_plan_knows_the_sizes_of_groups(models, plan):
    with pytest.raises(ConfigError, match=r"group_size should be one of 32, 64, 128 \(got 16\)"):
        plan(models / "dense-int4", *QAT, "--ref-load", models / "dense", "--int4-qat.group-size", 16)


def test_a_plan_knows_two_precisions_for_one_weight(models, plan):
    with pytest.raises(ConfigError, match="rounded to int4 in the forward cannot be rounded to fp8"):
        plan(models / "dense-int4", *QAT, "--ref-load", models / "dense", "--fp8-format", "e4m3")
    weight = rounded(torch.linspace(-1, 1, 128)[None], 32, torch.float32)
    assert not torch.equal(weight.to(torch.float8_e4m3fn).float(), weight), "the engine has the one, the trainer both"


def test_the_environment_of_a_launch_script_has_to_agree(models, plan, monkeypatch):
    monkeypatch.setenv("OPEN_TRAINING_INT4_GROUP_SIZE", "128")
    for flags in ((), ("--int4-qat.group-size", 32)):
        with pytest.raises(ConfigError, match=r"OPEN_TRAINING_INT4_GROUP_SIZE=128.*--int4-qat\.group-size 128"):
            plan(models / "dense", *QAT, *flags)
    plan(models / "dense", *QAT, "--int4-qat.group-size", 128)
    weight = torch.linspace(-1, 1, 128)[None]
    assert not torch.equal(rounded(weight, 32, torch.float32), rounded(weight, 128, torch.float32))


@pytest.mark.full
@pytest.mark.parametrize(("name", "flags", "what"), [
    ("dense-int4", (), r"training cannot start from quantised weights .*--ref-load"),
    ("dense-int4", ("--int4-qat.targets", "experts"), r"other layers in int4 than the run trains for"),
    ("dense", ("--int4-qat.targets", "experts"), r"no weight would be rounded to int4"),
    ("dense", ("--int4-qat.group-size", 128), r"groups of 128 do not divide the input axis of"),
])
def test_what_is_refused_when_the_model_is_built(models, plan, one, name, flags, what):
    start = ("--ref-load", models / "dense") if flags else ()
    with pytest.raises((ConfigError, CheckpointError), match=what):
        one.train(plan(models / name, *QAT, *start, *flags), [])


def test_a_shard_that_groups_do_not_divide_is_refused():
    """64 inputs of the attention's output projection fit groups of 64 whole, and not in halves."""
    check_width("o_proj", 64, 64)
    with pytest.raises(ConfigError, match="divide the input axis of o_proj .got 32 on each of 2 tensor-parallel ranks"):
        check_width("o_proj", 32, 64, ranks=2)
