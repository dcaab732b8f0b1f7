"""What servers, their checkpoint and the environment cannot do together; near each mistake, what is none."""

import json

import pytest

from tests.misconfigurations.measure import ROOT
from tests.unit.config.test_check_mistakes import CONFIG, EIGHT, SGLANG, TWO, told

MOE = json.loads((ROOT / "examples/arithmetic/tiny-qwen3-moe-128/config.json").read_text())
AWAY = ["--placement", "ray", "--ray-address", "10.0.0.1:6379", "--actor-num-nodes", "2"]
RUNNING = [*SGLANG, "--rollout-external", "--rollout-external-engine-addrs", "10.0.0.1:1", "10.0.0.1:2"]
QUANTISED = [*SGLANG, "--bf16", "--debug-rollout-only", "--hf-checkpoint", "{here}/model", "--sglang-quantization"]
EIGHTS = ["--plugin", "fp8", "--bf16", "--fp8-format", "e4m3", "--hf-checkpoint", "{here}/model", "--fp8-recipe"]


def near(flags, words, config=None, said=CONFIG, variables=EIGHT):
    """Refused with these words, or accepted without."""
    kind = "tiny-qwen3-moe-128" if said is MOE else "tiny-qwen3"
    case = {"flags": flags, "env": variables}
    if config is not None:
        whole = {key: value for key, value in {**said, **config}.items() if value is not None}
        case["flags"] = ["--plan-without-weights", *flags]
        case["files"] = {"model/config.json": json.dumps(whole)}
        case["copies"] = {f"model/{name}": f"examples/arithmetic/{kind}/{name}"
                          for name in ("tokenizer.json", "tokenizer_config.json")}
    told(case, words)


@pytest.mark.parametrize(("flags", "words"), [
    ([*RUNNING, "--rollout-num-gpus", "4"], "as many servers have to be named as there are engines (got addresses: 2"),
    ([*RUNNING, "--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "4"], None),
    ([*SGLANG, "--sglang-max-lora-rank", "8"], "no effect on servers without adapters"),
    ([*SGLANG, "--sglang-lora-paths", "mine=/x"], "an adapter that no request of the run names"),
    ([*SGLANG, "--sglang-lora-target-modules", "q_proj,k_proj"], "no effect on servers without adapters"),
    ([*SGLANG, "--sglang-delete-ckpt-after-loading"], "would delete the checkpoint"),
    ([*SGLANG, "--sglang-tool-call-parser", "llama3_json"], "no parser of tool calls of this name"),
    ([*SGLANG, "--sglang-tool-call-parser", "qwen3"], "no parser of tool calls of this name"),
    ([*SGLANG, "--sglang-reasoning-parser", "deepseek_r1"], "no parser of reasoning of this name"),
    ([*SGLANG, "--sglang-reasoning-parser", "deepseek-r1"], None),
    ([*SGLANG, "--sglang-tool-call-parser", "qwen3_coder"], None),
    ([*SGLANG, "--sglang-log-requests-level", "9"], "log_requests_level should lie in [0, 3]"),
    ([*SGLANG, "--router-prometheus-port", "3000", "--sglang-router-port", "3000"], "Prometheus at one port"),
    (["--placement", "ray", "--ray-address", "10.0.0.1:10001"], "10001 is the port of Ray's client server"),
    (["--placement", "ray", "--ray-address", "ray://10.0.0.1:10001"], None),
    (["--placement", "ray", "--ray-address", "<head>:6379"], "no address of a Ray cluster"),
    (["--system-prompt", "You are"], "Fix: write it into the rows"),
], ids=str)
def test_flags_of_servers(flags, words):
    near(flags, words)


@pytest.mark.parametrize(("method", "given", "words"), [
    ("fp8", "gguf", "config.json says that the weights are fp8"), ("fp8", "fp8", None), ("fp8", "nvfp4_online", None),
    ("gptq", "awq", "the weights are gptq"), ("gptq", "gptq_marlin", None), ("awq", "moe_wna16", None),
    ("compressed-tensors", "fp8", "are compressed-tensors"), ("compressed-tensors", "w8a8_int8", None),
    ("modelopt", "fp8", "ModelOpt quantised"), ("modelopt", "modelopt_fp4", None),
    ("mxfp8", "fp8", "in another way than the flag"), ("mxfp8", "mxfp8", None), ("mxfp8", "unquant", None),
])
def test_what_a_flag_and_config_json_call_the_weights(method, given, words):
    said = {"quantization_config": {"quant_method": method, "weight_block_size": [64, 64]}}
    near([*QUANTISED, given], words, said, MOE)


@pytest.mark.parametrize(("flags", "change", "words"), [
    ([*SGLANG, "--bf16"], {"architectures": None}, "names no architectures"), ([], {"architectures": None}, None),
    ([*SGLANG, "--debug-rollout-only", "--engine-dtype", "float32"],
     {"quantization_config": {"quant_method": "gptq"}}, "in 16 bits alone (got gptq)"),
    ([*SGLANG, "--debug-rollout-only"], {"quantization_config": {"quant_method": "gptq"}}, "the trainer's float32"),
    ([*SGLANG, "--debug-rollout-only", "--bf16"], {"quantization_config": {"bits": 4}}, "not say by which method"),
], ids=str)
def test_config_json_of_servers(flags, change, words):
    near([*flags, "--hf-checkpoint", "{here}/model"], words, change)


@pytest.mark.parametrize(("flags", "change", "words"), [
    (["tensorwise"], {"intermediate_size": 72}, "intermediate_size cannot be multiplied: products in FP8"),
    (["tensorwise", "--transformer-impl", "local"], {"intermediate_size": 72}, None),
    (["tensorwise"], {"intermediate_size": 144}, None),
    (["tensorwise", *TWO, "--tensor-model-parallel-size", "2"], {"intermediate_size": 144}, "(got 72)"),
    (["mxfp8"], {"intermediate_size": 144}, "mxfp8 scales blocks of 32"),
    (["tensorwise"], {"hidden_size": 72, "head_dim": 16}, "hidden_size cannot be multiplied"),
], ids=str)
def test_widths_of_products_in_fp8(flags, change, words):
    near([*EIGHTS, *flags], words, change)


@pytest.mark.parametrize(("flags", "variables", "words"), [
    ([], {"GLOO_SOCKET_IFNAME": "^lo,docker"}, "GLOO_SOCKET_IFNAME: ^ and = are NCCL's notation"),
    (TWO, {"GLOO_SOCKET_IFNAME": "l"}, "no such network interface"), (TWO, {"NCCL_SOCKET_IFNAME": "l"}, None),
    (TWO, {"GLOO_SOCKET_IFNAME": "lo,bond77"}, "no such network interface"),
    (TWO, {"NCCL_SOCKET_IFNAME": "bond77,lo"}, None), (TWO, {"NCCL_SOCKET_IFNAME": "=lo"}, None),
    (TWO, {"NCCL_SOCKET_IFNAME": "=l"}, "no such network interface"), (TWO, {"NCCL_SOCKET_IFNAME": ""}, None),
    (AWAY, {"NCCL_SOCKET_IFNAME": "lo"}, "lo ends at its own machine"),
    (AWAY, {"NCCL_SOCKET_IFNAME": "eth0", "RAY_ADDRESS": "http://10.0.0.1:8265"}, None),
    (["--placement", "ray"], {"RAY_ADDRESS": "http://127.0.0.1:8265"}, "RAY_ADDRESS is no address of a Ray cluster"),
    (["--placement", "ray"], {"RAY_ADDRESS": "ray://10.0.0.1:6379"}, "RAY_ADDRESS is no address of a Ray cluster"),
    ([], {f"NVTE_{kind}_ATTN": "0" for kind in ("FLASH", "FUSED", "UNFUSED")}, "all are switched off"),
    ([], {"NVTE_FLASH_ATTN": "0"}, None),
    ([], {"NCCL_IB_TIMEOUT": "22s"}, "NCCL_IB_TIMEOUT: NCCL reads a number"), ([], {"NCCL_IB_TIMEOUT": "22"}, None),
], ids=str)
def test_variables(flags, variables, words):
    near(flags, words, variables=variables)
