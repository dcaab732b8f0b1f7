"""Weights, config.json and the models beside the policy: what does not fit is refused before anything is loaded."""

import json
import math
from pathlib import Path

import pytest

from tests.misconfigurations.measure import ACCEPTED, REFUSED, outcome

TINY = Path("examples/arithmetic/tiny-qwen3")
CONFIG = json.loads((Path(__file__).parents[3] / TINY / "config.json").read_text())
TOKENIZER = json.loads((Path(__file__).parents[3] / TINY / "tokenizer.json").read_text())
ADAPTER = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
Q = "model.layers.0.self_attn.q_proj"
A = f"base_model.model.{Q}.lora_A.weight"


def tensors(shapes, dtype="U8"):
    """The text of a safetensors file of zeros, a byte each."""
    end, header = 0, {}
    for name, shape in shapes.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + math.prod(shape)]}
    text = json.dumps(header)
    text += " " * (-len(text) % 64 if len(text) % 256 < 64 or (len(text) + 63) % 256 < 128 else 256 - len(text) % 256)
    return len(text).to_bytes(8, "little").decode() + text + "\0" * end


def run(tmp_path, flags, files, copied=()):
    copies = {f"{folder}/{name}": str(TINY / name) for folder, names in copied for name in names}
    files = {name: text if isinstance(text, str) else json.dumps(text) for name, text in files.items()}
    return outcome({"id": "one", "flags": ["--plan-without-weights", *flags], "files": files, "copies": copies})


PARTS = {"self_attn.q_proj": [128, 128], "self_attn.k_proj": [64, 128], "self_attn.v_proj": [64, 128],
         "self_attn.o_proj": [128, 128], "mlp.gate_proj": [256, 128], "mlp.up_proj": [256, 128],
         "mlp.down_proj": [128, 256], "self_attn.q_norm": [32], "self_attn.k_norm": [32], "input_layernorm": [128],
         "post_attention_layernorm": [128]}  # fmt: skip
WHOLE = {f"model.layers.{layer}.{part}.weight": size for layer in range(4) for part, size in PARTS.items()} | {
    "model.embed_tokens.weight": [264, 128], "model.norm.weight": [128]}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
WEIGHTS = [
    (WHOLE, {}, None), (WHOLE | {"model.rotary.inv_freq": [16]}, {}, None),
    ({name: size for name, size in WHOLE.items() if "3.mlp.up" not in name}, {}, "lack model.layers.3.mlp.up_proj"),
    ({"actor." + name: size for name, size in WHOLE.items()}, {}, "the weights lack model.layers.0"),
    (WHOLE | {Q + ".weight": [256, 128]}, {}, "misshapen model.layers.0.self_attn.q_proj.weight"),
    (WHOLE | {Q + ".lora_A.weight": [8, 128]}, {}, "a wrapper around the model"),
    ({Q + ".qweight": [4, 4]}, {}, "the weights are quantised, and config.json says nothing of it"),
    ({Q + ".base_layer.weight": [4]}, {}, "a wrapper around the model"),
    ({"module." + Q + ".weight": [4]}, {}, "a wrapper around the model"),
    ({Q + ".weight": [0]}, {}, "the tensors are empty"),
    ({Q + ".weight": [128, 128]}, {}, "another family than config.json's qwen3 (got no q_norm)"),
    ({}, {"architectures": ["Qwen2ForProcessRewardModel"]}, "no language model"),
    ({}, {"layer_types": ["full_attention"] * 5}, "layer_types speaks of 5 layers (got 4)"),
    ({}, {"use_sliding_window": True}, "sliding window are not built"),
    ({}, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0, "factor": 2.0}}, "not scaled in this way"),
    ({}, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "does not say by how much"),
    ({}, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 0.5}}, "at least 1"),
    ({}, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, None),
    ({}, {"hidden_size": "128"}, "hidden_size in config.json is a whole number"),
    ({}, {"max_position_embeddings": None}, None), ({}, {"max_position_embeddings": 0}, "a whole number from 1 on"),
    ({}, {"rms_norm_eps": 1e-5}, None), ({}, {"rms_norm_eps": 1e6}, "a small number"),
    ({}, {"tie_word_embeddings": "true"}, "true or false"), ({}, {"rope_scaling": "yarn"}, "is an object"),
    ({}, {"architectures": "Qwen3ForCausalLM"}, "a list of names"), ({}, {"model_type": ["qwen3"]}, "no model_type"),
    ({}, {"architectures": ["FSDPQwen3ForCausalLM"]}, "not that of config.json's model_type"),
    ({}, {"rope_parameters": YARN}, None), ({}, {"rope_parameters": YARN | {"beta_fast": 32, "beta_slow": 1}}, None),
    ({}, {"rope_parameters": YARN | {"beta_fast": 1, "beta_slow": 32}}, "swapped"),
    ({}, {"rope_parameters": YARN | {"original_max_position_embeddings": 32768}}, "before stretching are more"),
    ({}, {"rope_theta": 10000.0}, None), ({}, {"rope_theta": 1e6}, "two bases"),
    ({}, {"dtype": "torch.bfloat16"}, None), ({}, {"dtype": "bf16"}, "none that PyTorch computes in"),
    ({}, {"layer_types": ["full-attention"] * 4}, "have full attention"),
]


@pytest.mark.parametrize(("shapes", "constants", "words"), WEIGHTS, ids=lambda value: str(value)[:30])
def test_the_policys_folder(shapes, constants, words, tmp_path):
    files = {"model/config.json": CONFIG | constants} | ({"model/model.safetensors": tensors(shapes)} if shapes else {})
    found = run(tmp_path, ["--hf-checkpoint", "{here}/model"], files,
                [("model", ("tokenizer.json", "tokenizer_config.json"))])
    assert found.verdict == (REFUSED if words else ACCEPTED) and (words or "") in found.sentence, found


@pytest.mark.parametrize("name", ["model-q4.gguf", "consolidated.00.pth", "model_world_size_8_rank_0.pt",
                                  "global_step40/mp_rank_00_model_states.pt"])
def test_weights_of_other_programs(name, tmp_path):
    assert "files only" in run(tmp_path, ["--hf-checkpoint", "{here}/model"], {"model/config.json": CONFIG,
                                                                               f"model/{name}": "x"}).sentence


SWAPPED = TOKENIZER | {"model": TOKENIZER["model"] | {
    "vocab": {token: 255 - number for token, number in TOKENIZER["model"]["vocab"].items()}}}
OPD = ["--plugin", "opd", "--use-opd", "--opd-teacher-load", "{here}/other"]
PPO = ["--plugin", "ppo", "--advantage-estimator", "ppo", "--critic-load", "{here}/other"]
OTHERS = [
    (OPD, {"config.json": CONFIG, "tokenizer.json": SWAPPED}, "tokens are not the policy's"),
    (OPD, {"config.json": CONFIG | {"hidden_size": 256}, "tokenizer.json": TOKENIZER}, None),
    (OPD, {"adapter_config.json": ADAPTER}, "an adapter and no model"), (OPD, {"x": ""}, "the folder is no checkpoint"),
    (OPD, {"config.json": CONFIG | {"quantization_config": {"quant_method": "awq"}}}, "weights are plain"),
    (PPO, {"config.json": CONFIG, "model.safetensors": tensors({"score.weight": [2, 128]})}, "no head of one number"),
    (PPO, {"config.json": CONFIG, "model.safetensors": tensors({"v_head.summary.weight": [1, 128]})}, "no head of one"),
    (PPO, {"config.json": CONFIG, "model.safetensors": tensors({"score.weight": [1, 128]})}, None),
    (PPO, {"config.json": CONFIG | {"vocab_size": 200}}, "fewer tokens"),
    (["--ref-load", "{here}/other"], {"config.json": CONFIG | {"model_type": "qwen2"}}, "its model_type is qwen2"),
    (["--ref-load", "{here}/other"], {"config.json": CONFIG, "model.safetensors": ""}, "it is not whole"),
    (["--ref-load", "{here}/other"], {"config.json": CONFIG}, None),
]


@pytest.mark.parametrize(("flags", "files", "words"), OTHERS, ids=[str(number) for number in range(len(OTHERS))])
def test_models_beside_the_policy(flags, files, words, tmp_path):
    found = run(tmp_path, flags, {f"other/{name}": text for name, text in files.items()})
    assert found.verdict == (REFUSED if words else ACCEPTED) and (words or "") in found.sentence, found


LORA = ["--plugin", "lora", "--lora-rank", "8"]
ADAPTERS = [
    ([], {}, {A: [8, 128]}, None), ([], {"r": 16}, {}, "another rank than the run"),
    ([], {"use_dora": True}, {}, "DoRA"), ([], {"target_modules": ["qkv_proj"]}, {}, "of another family"),
    ([], {"base_model_name_or_path": "/llama-factory/out"}, {A: [8, 128]}, None), ([], {}, {}, "holds no adapter"),
    ([], {"base_model_name_or_path": "meta-llama/Llama-3.1-8B"}, {A: [8, 128]}, "belongs to another model"),
    ([], {}, {A.replace("weight", "default.weight"): [8, 128]}, "names of a model in memory"),
    ([], {"lora_alpha": 32}, {}, "another alpha"), ([], {"task_type": "SEQ_CLS"}, {}, "no language model's"),
    ([], {}, {A: [8, 64]}, "of a model of another width"),
    ([], {}, {A: [4, 128]}, "another rank than its adapter_config"),
    (["--target-modules", "v_proj"], {}, {}, "adapts a layer that the run does not"),
    (["--target-modules", "all-linear"], {}, {}, "the run adapts all layers"),
]


@pytest.mark.parametrize(("flags", "constants", "shapes", "words"), ADAPTERS, ids=str)
def test_the_adapter_to_begin_with(flags, constants, shapes, words, tmp_path):
    targets = flags or ["--target-modules", "q_proj"]
    files = {"adapter/adapter_config.json": ADAPTER | constants, "adapter/adapter_model.safetensors": tensors(shapes)}
    found = run(tmp_path, [*LORA, *targets, "--lora-adapter-path", "{here}/adapter"], files)
    assert found.verdict == (REFUSED if words else ACCEPTED) and (words or "") in found.sentence, found


@pytest.mark.parametrize("flags", [
    ("--position-embedding-type", "yarn"), ("--rotary-percent", "0.5"), ("--use-rope-scaling",), ("--quick-geglu",),
    ("--normalization", "LayerNorm"), ("--add-qkv-bias",), ("--kv-lora-rank", "512"), ("--moe-ffn-hidden-size", "768"),
], ids=str)
def test_flags_of_another_models_script(flags, tmp_path):
    assert run(tmp_path, list(flags), {}).verdict == REFUSED


SHARES = ["--plugin", "int4-qat", "--int4-qat.group-size", "32", "--tensor-model-parallel-size"]


@pytest.mark.parametrize(("flags", "environment", "words"), [
    ([*SHARES, "2", "--actor-num-gpus-per-node", "2"], {}, None),
    ([*SHARES, "2", "--actor-num-gpus-per-node", "2", "--int4-qat.group-size", "128"], {}, "one rank's share of"),
    (["--save", "s3://bucket/run"], {}, "this is an address"), (["--save", "/dev/null"], {}, "cannot be written"),
    ([], {"NCCL_CUMEM_ENABLE": "1", "NCCL_ALGO": "allreduce:tree,nvls;broadcast:ring"}, None),
    ([], {"NCCL_CUMEM_ENABLE": "true"}, "words switch nothing"), ([], {"NCCL_ALGO": "trees"}, "no such algorithm"),
    ([], {"NVTE_FLASH_ATTN": "false"}, "reads a number"), ([], {"NVTE_FLASH_ATTN": "0"}, None),
    ([], {"TORCH_DISTRIBUTED_DEBUG": "detail"}, None), ([], {"TORCH_DISTRIBUTED_DEBUG": "verbose"}, "no such level"),
], ids=str)
def test_shares_places_and_variables(flags, environment, words):
    found = outcome({"id": "one", "flags": flags, "env": environment})
    assert found.verdict == (REFUSED if words else ACCEPTED) and (words or "") in found.sentence, found


@pytest.mark.parametrize(("flags", "words"), [
    ([], "the folder of the model holds no weights. Fix: fetch its *.safetensors"),
    (["--debug-rollout-only"], "the folder of the model holds no weights"),
    (["--plan-without-weights"], None), (["--ref-load", str(TINY)], None),
])
def test_a_model_without_weights_where_a_run_begins_with_them(flags, words):
    files = {f"model/{name}": str(TINY / name) for name in ("config.json", "tokenizer.json", "tokenizer_config.json")}
    found = outcome({"id": "one", "flags": ["--hf-checkpoint", "{here}/model", *flags], "copies": files})
    assert found.verdict == (REFUSED if words else ACCEPTED) and (words or "") in found.sentence, found


@pytest.mark.parametrize(("name", "strange"), [
    ("experts.gate_proj.weight3", True), ("experts.w1.2.weight", True), ("experts.3.gate_proj.weight", False),
    ("experts.gate_up_proj", False), ("experts.down_proj_bias", False), ("shared_experts.gate_proj.weight", False),
])
def test_how_experts_are_named(name, strange, tmp_path):
    moe = TINY.parent / "tiny-qwen3-moe"
    files = {"model/config.json": (moe / "config.json").read_text(),
             "model/model.safetensors": tensors({f"model.layers.0.mlp.{name}": [96, 64]})}
    found = run(tmp_path, ["--hf-checkpoint", "{here}/model"], files, [("model", ("tokenizer.json",))])
    assert ("experts have other names than transformers gives them" in found.sentence) == strange, found
