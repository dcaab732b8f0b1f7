"""Checkpoints as they are published: planned, converted, trained for two rollouts, exported, and read again."""

import json

import numpy as np
import pytest
import torch
from miles_megatron.testing.ranks import batches
from miles_testing.forked import miles

from miles_core.plugins.plan import prepare
from miles_core.plugins.scan import KNOWN
from miles_core.record.events import read as events
from tests.integration.published import EXAMPLES, published, read, write

ROOT = EXAMPLES.parents[1]
ALL = published()
UNPUBLISHED = {"gemma3n_text", "gemma4_text", "gemma4_unified", "llama4_text", "qwen3_5_text", "qwen3_5_moe_text",
               "qwen3_5", "ministral", "ministral3", "mistral4"}
"""Text models that are released inside others or under another name alone, and two whose larger siblings are in the
table."""
DECODED_BY_SERVERS_ALONE = {"mimo": "architecture-not-in-transformers",
                            "qwen2_5_vl": "local-config-unsupported", "qwen3_vl": "local-config-unsupported",
                            "qwen3_vl_moe": "local-config-unsupported"}
PLAIN = {"fp8": "fp8-to-hf", "fp8-mxfp4": "fp8-to-hf", "int4": "int4-to-hf"}
DRAFTS = ("mtp.", "model.mtp_layers.", "model.layers.2.")
UNTRAINED = (*DRAFTS, "visual.", "model.visual.")
TRAINER = ("--prompt-data", "data/none.jsonl", "--num-rollout", "1", "--rollout-batch-size", "4",
           "--n-samples-per-prompt", "4", "--rollout-max-response-len", "41", "--use-dynamic-batch-size",
           "--max-tokens-per-gpu", "96", "--trainer-host", "process", "--disable-rewards-normalization", "--no-bf16",
           "--lr", "1e-3")  # fmt: skip
NORMS = ("model.norm.weight", "language_model.norm.weight", "norm_f.weight")
COPIES = ("embed_tokens.weight", "shared_head.head.weight", "lm_head.weight")


FULL = {"Qwen2.5-0.5B-Instruct", "Qwen3-Next-80B-A3B-Instruct", "Llama-2-7b-hf", "Mistral-7B-Instruct-v0.3", "GLM-4.6",
        "gemma-3-1b-it", "GLM-4-9B-0414", "MiniMax-M2", "Kimi-K2-Thinking", "gpt-oss-20b", "GLM-5", "Kimi-K2.5",
        "EXAONE-4.0-32B"}
"""Those whose whole runs are in the full tier: one of each package, and each kind of quantised weights."""


def tiered(gate=(), which=ALL, full=None):
    """A few in the gate, the rest in the full tier, or those of `full` and the others in the slow one."""
    return [pytest.param(one, id=str(one), marks=() if str(one) in gate else pytest.mark.full
                         if full is None or str(one) in full else pytest.mark.slow) for one in which]


def ids_of(keys):
    value = keys.get("eos_token_id")
    return value if isinstance(value, list) else [] if value is None else [value]


@pytest.mark.parametrize("one", tiered({"gemma-3-4b-it", "DeepSeek-V3"}))
def test_the_published_config_plans_word_for_word(one, tmp_path):
    stops = {*ids_of(one.config), *ids_of(one.config.get("text_config", {})), *ids_of(one.generation_config)}
    added = [{"id": number, "content": f"<|{number}|>"} for number in sorted(stops)]
    for name, content in {"config": one.config, "generation_config": one.generation_config,
                          "tokenizer": {"added_tokens": added, "normalizer": None}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    plan = prepare(None, ["--hf-checkpoint", str(tmp_path), "--ref-load", "plain", "--plan-without-weights",
                          "--prompt-data", "data/none.jsonl", "--num-rollout", "1", "--rollout-batch-size", "8",
                          "--n-samples-per-prompt", "8"])  # fmt: skip
    assert plan.config.model.model_name == one.model_type


def test_every_family_is_in_the_table():
    offered = {offer.partition(":")[2] for offers in KNOWN.values() for offer in offers
               if offer.startswith("model_spec:")} | {"qwen3", "qwen3_moe"}
    assert {one.model_type for one in ALL} == offered - UNPUBLISHED


@pytest.mark.parametrize("one", tiered({"GLM-5", "Qwen3-0.6B"}))
def test_conversion_keeps_every_bit(one, convert, tmp_path):
    """Of the layers for drafting too, but for their copies of the model's own embedding and output layer."""
    before = write(one, tmp_path / "hf", plain=one.quantised in PLAIN)
    more = ("--plugin", "mtp") if one.drafts else ()
    convert("hf-to-dist", tmp_path / "hf", tmp_path / "dist", *more)
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", tmp_path / "hf", *more)
    after = read(tmp_path / "back")
    gone = {name for name in before.keys() - after.keys() if "inv_freq" not in name}
    if one.quantised == "mxfp4":
        assert {name.rpartition("_")[2] for name in gone} == {"blocks", "scales"}
        assert after.keys() - before.keys() == {name.rpartition("_")[0] for name in gone}
    else:
        assert after.keys() <= before.keys() and all(name.endswith(COPIES) for name in gone)
    assert all(before[name].dtype == tensor.dtype and torch.equal(before[name], tensor)
               for name, tensor in after.items() if name in before)
    source, said = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back"))
    changed = {key for key in source | said if source.get(key) != said.get(key)}
    counts = {"num_mtp_modules", "num_nextn_predict_layers"}  # of layers that no file has
    assert changed <= {"dtype", "quantization_config", "expert_dtype", *counts}
    assert not said.keys() & {"quantization_config", "expert_dtype"}, "of weights that are not quantised any more"
    companions = {file.name for file in (tmp_path / "hf").iterdir() if ".safetensors" not in file.name}
    assert companions <= {file.name for file in (tmp_path / "back").iterdir()}


def run(folder, tmp_path, *flags):
    return miles(["run", str(ROOT / "examples/demo.toml"), "--no-live", "--hf-checkpoint", str(folder),
                  "--prompt-data", str(EXAMPLES / "train.jsonl"), "--run-dir", "run", "--num-rollout", "2",
                  "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--eval-interval", "100",
                  "--eval-prompt-data", "sums", str(EXAMPLES / "eval.jsonl"), "--save-interval", "2",
                  "--entropy-coef", "0.01", *map(str, flags)], tmp_path)  # fmt: skip


@pytest.mark.parametrize("one", tiered({"gemma-3-4b-it"}, [
    one for one in ALL if one.model_type not in DECODED_BY_SERVERS_ALONE and not one.quantised], FULL))
def test_two_rollouts_and_an_export_that_transformers_reads(one, tmp_path):
    before = write(one, tmp_path / "hf")
    outcome = run(tmp_path / "hf", tmp_path)
    assert outcome.code == 0, outcome.err
    trained(one, before, tmp_path)


def trained(one, before, tmp_path):
    """The engine decoded what was trained, and the export is the checkpoint with other numbers."""
    metrics = [event["metrics"] for event in events(tmp_path / "run" / "events.jsonl") if event["event"] == "metrics"]
    gaps = [step["train/train_rollout_logprob_abs_diff_max"] for step in metrics]
    assert len(gaps) == 2 and max(gaps) <= 2e-5
    after = read(tmp_path / "run" / "hf")
    gone = {name for name in before.keys() - after.keys()
            if not (name.endswith(("inv_freq", "lm_head.weight")) or name.startswith(DRAFTS))}
    assert not gone and after.keys() <= before.keys()
    assert all(before[name].shape == tensor.shape for name, tensor in after.items())
    norm = next(name for name in after if name.endswith(NORMS))
    assert not torch.equal(before[norm].to(after[norm].dtype), after[norm])
    assert reloaded(one, tmp_path / "run" / "hf") == {}


def text_of(one, tensors):
    """The text model's, under the names that it has alone."""
    within = "model." if one.inside.startswith("model.") else ""
    return {within + name.removeprefix(one.inside): tensor for name, tensor in tensors.items()
            if name.startswith(one.inside) and name not in one.beside}


def reloaded(one, folder):
    """What transformers misses in an export, finds there and has no place for, or finds in another shape."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    hf_config = json.loads((folder / "config.json").read_text())
    hf_config = hf_config["text_config"] if one.inside else hf_config
    config = AutoConfig.for_model(one.like or hf_config.pop("model_type"), **{
        key: value for key, value in hf_config.items() if key not in ("model_type", "auto_map")})
    kind = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
    if one.inside:
        _, loading = kind._model_mapping[type(config)].from_pretrained(
            None, config=config, output_loading_info=True, state_dict=text_of(one, read(folder)))
    else:
        _, loading = kind.from_pretrained(folder, config=config, output_loading_info=True)
    return {key: sorted(names)[:4] for key, names in loading.items() if names}


@pytest.mark.parametrize("one", tiered(which=[one for one in ALL if one.model_type in DECODED_BY_SERVERS_ALONE],
                                       full=FULL))
def test_what_servers_alone_decode_is_said_and_trains(one, ranks_of, tmp_path):
    """By the local engine before training; the trainer itself steps, and streams the checkpoint's names and shapes."""
    before = write(one, tmp_path / "hf", plain=True)
    outcome = run(tmp_path / "hf", tmp_path)
    assert outcome.code == 2 and DECODED_BY_SERVERS_ALONE[one.model_type] in outcome.err
    plan = prepare(None, ["--hf-checkpoint", str(tmp_path / "hf"), *TRAINER])
    after = ranks_of(1).train(plan, batches(1, vocab=264))["weights"]
    before = {name: tensor for name, tensor in before.items() if name not in one.beside}
    assert before.keys() - after.keys() == {name for name in before if name.startswith(UNTRAINED)}
    assert all(tuple(before[name].shape) == weight.shape for name, weight in after.items())
    norm = next(name for name in after if name.endswith(NORMS))
    assert not np.array_equal(before[norm].float().numpy(), after[norm])


@pytest.mark.parametrize("one", tiered(which=[
    one for one in ALL if one.model_type not in DECODED_BY_SERVERS_ALONE and one.quantised], full=FULL))
def test_a_quantised_original_is_made_plain_and_trained(one, tmp_path):
    """It is refused with the command that makes it plain; then it is what the engine is served, and what is made is
    where training starts."""
    write(one, tmp_path / "hf")
    refused = run(tmp_path / "hf", tmp_path)
    command = PLAIN.get(one.quantised, "hf-to-dist")
    assert refused.code == 2 and "[start-weights-quantised]" in refused.err and command in refused.err
    made = miles(["convert", command, str(tmp_path / "hf"), str(tmp_path / "plain")], tmp_path)
    assert made.code == 0, made.err
    if one.quantised == "mxfp4":
        outcome = run(tmp_path / "hf", tmp_path, "--ref-load", tmp_path / "plain")
        assert outcome.code == 0, outcome.err
        return
    before = read(tmp_path / "plain")
    assert "quantization_config" not in (tmp_path / "plain" / "config.json").read_text()
    outcome = run(tmp_path / "plain", tmp_path)
    assert outcome.code == 0, outcome.err
    trained(one, before, tmp_path)
