"""Weights, config.json and the models beside the policy: what does not fit is refused before anything is loaded."""

import json
import math
import socket
from pathlib import Path

import pytest
from measure import ACCEPTED, REFUSED, outcome

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


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
WEIGHTS = [
    ({"use_sliding_window": True}, "use_sliding_window in config.json"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0, "factor": 2.0}}, "rope_type in config.json"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "factor of the rope"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 0.5}}, "factor of the rope"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, None),
    ({"rope_parameters": YARN}, None), ({"rope_parameters": YARN | {"beta_fast": 32, "beta_slow": 1}}, None),
    ({"rope_theta": 10000.0}, None), ({"rope_theta": 1e6}, "rope_theta in config.json"),
    ({"dtype": "torch.bfloat16"}, None),
    ({"layer_types": ["full-attention"] * 4}, "layer_types in config.json"),
]


@pytest.mark.parametrize(("constants", "words"), WEIGHTS, ids=lambda value: str(value)[:30])
def test_the_policys_folder(constants, words, tmp_path):
    files = {"model/config.json": CONFIG | constants}
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
    (OPD, {"adapter_config.json": ADAPTER}, "an adapter and no model"), (OPD, {"x": ""}, "no checkpoint of a run"),
    (PPO, {"config.json": CONFIG, "model.safetensors": tensors({"score.weight": [1, 128]})}, None),
    (["--ref-load", "{here}/other"], {"config.json": CONFIG | {"model_type": "qwen2"}}, "model_type (got qwen2"),
    (["--ref-load", "{here}/other"], {"config.json": CONFIG, "model.safetensors": ""}, "it is not whole"),
    (["--ref-load", "{here}/other"], {"config.json": CONFIG}, None),
]


@pytest.mark.parametrize(("flags", "files", "words"), OTHERS, ids=[str(number) for number in range(len(OTHERS))])
def test_models_beside_the_policy(flags, files, words, tmp_path):
    found = run(tmp_path, flags, {f"other/{name}": text for name, text in files.items()})
    assert found.verdict == (REFUSED if words else ACCEPTED) and (words or "") in found.sentence, found


APART = ["--engine", "sglang", "--weight-sync", "broadcast"]


@pytest.mark.parametrize(("flags", "environment", "words"), [
    (["--save", "s3://bucket/run"], {}, "this is an address"), (["--save", "/dev/null"], {}, "/dev/null is a file"),
    (APART, {"NCCL_CUMEM_ENABLE": "1"}, "NCCL_CUMEM_ENABLE=1"), (APART, {"NCCL_CUMEM_ENABLE": "0"}, None),
    ([], {"NCCL_CUMEM_ENABLE": "1"}, None),
], ids=str)
def test_places_and_variables(flags, environment, words):
    found = outcome({"id": "one", "flags": flags, "env": environment})
    assert found.verdict == (REFUSED if words else ACCEPTED) and (words or "") in found.sentence, found


@pytest.mark.parametrize(("flags", "words"), [
    ([], "the folder of the model holds no weights. Fix: fetch its *.safetensors"),
    (["--debug-rollout-only"], "the folder of the model holds no weights"),
    (["--debug-rollout-only", "--engine", "sglang", "--rollout-external", "--rollout-external-engine-addrs",
      "{server}"], None),
    (["--plan-without-weights"], None), (["--ref-load", str(TINY)], None),
])
def test_a_model_without_weights_where_a_run_begins_with_them(flags, words):
    files = {f"model/{name}": str(TINY / name) for name in ("config.json", "tokenizer.json", "tokenizer_config.json")}
    with socket.create_server(("127.0.0.1", 0)) as server:
        flags = [flag.replace("{server}", f"127.0.0.1:{server.getsockname()[1]}") for flag in flags]
        found = outcome({"id": "one", "flags": ["--hf-checkpoint", "{here}/model", *flags], "copies": files})
    assert found.verdict == (REFUSED if words else ACCEPTED) and (words or "") in found.sentence, found
