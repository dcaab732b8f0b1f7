"""Whole runs on a CPU: trainer and engine agree where both round; and what the plan says of precision."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.plugins.plan import prepare
from miles_core.record.events import read

ROOT = Path(__file__).parents[3]
TINY = ROOT / "examples" / "arithmetic" / "tiny-qwen3-moe-128"
MILES = [sys.executable, "-c", "from miles_core.cli import main; main()"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A plain directory whose heads are whole blocks, and the same in FP8."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("checkpoints")
    plain, fp8 = folder / "plain", folder / "fp8"
    config = AutoConfig.from_pretrained(TINY)
    config.head_dim, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads = 128, 2, 2, 1
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(plain)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY / name, plain / name)
    subprocess.run([*MILES, "convert", "hf-to-fp8", plain, fp8], cwd=ROOT, check=True, capture_output=True)
    return plain, fp8


@pytest.fixture(scope="module")
def difference(tmp_path_factory):
    """Flags -> the mean |difference| of trainer's and engine's log-probs over two rollouts of examples/moe.toml."""

    def run(*flags):
        folder = tmp_path_factory.mktemp("run") / "run"
        words = ["run", "examples/moe.toml", "--no-live", "--run-dir", folder, "--num-rollout", 2,
                 "--rollout-batch-size", 8, "--engine-dtype", "float32", "--eval-interval", 100, *flags]
        done = subprocess.run([*MILES, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        found = [event["metrics"] for event in read(folder / "events.jsonl") if event["event"] == "metrics"]
        assert len(found) == 2
        return sum(one["train/train_rollout_logprob_abs_diff"] for one in found) / 2

    return run


@pytest.mark.slow
def test_log_probs_agree_as_far_as_both_sides_round_alike(checkpoints, difference):
    plain, fp8 = checkpoints
    same = difference("--hf-checkpoint", plain, "--plugin", "fp8", "--fp8.emulate", "weights")
    four_bits = difference("--hf-checkpoint", plain, "--fp8.recipe", "nvfp4", "--fp8.emulate", "weights",
                           "--plugin", "fp8")
    follows = difference("--hf-checkpoint", fp8, "--ref-load", plain, "--plugin", "fp8", "--fp8.emulate", "weights")
    engine_alone = difference("--hf-checkpoint", fp8, "--ref-load", plain)
    activations = difference("--hf-checkpoint", plain, "--plugin", "fp8")
    narrow = difference("--hf-checkpoint", TINY, "--plugin", "fp8")
    print(f"\nmean |difference| of log-probs: both weights {same:.1e}, by the checkpoint {follows:.1e}, engine alone "
          f"{engine_alone:.1e}, activations too {activations:.1e}, heads of half a block {narrow:.1e}")
    assert max(same, follows, four_bits) < 1e-6, "the engine holds to the bit what training multiplies with"
    assert engine_alone > 1e-3 and max(activations, narrow) < engine_alone / 100


def test_training_does_not_start_from_fp8(checkpoints, tmp_path):
    words = ["run", "examples/moe.toml", "--no-live", "--run-dir", tmp_path, "--hf-checkpoint", checkpoints[1]]
    done = subprocess.run([*MILES, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode != 0
    assert "training cannot start from quantised weights (got fp8). Fix: name the plain checkpoint with" in done.stderr


def rows(*flags):
    plan = prepare(ROOT / "examples" / "moe.toml", ["--hf-checkpoint", str(TINY), *map(str, flags)])
    text = plan.to_text().partition("\nprecision\n")[2].partition("\n\n")[0]
    assert "fp8" in {one.manifest.name for one in plan.selected} or not flags or "--sglang-kv-cache-dtype" in flags
    return {line[2:14].strip(): line[14:].removesuffix("  (plugin fp8)") for line in text.splitlines()}


SGLANG = ("--engine", "sglang", "--bf16")


def test_the_plan_tells_what_computes_in_what(checkpoints):
    assert rows() == {
        "trainer": "float32", "log-probs": "the trainer's forward, log-softmax in float32", "engine": "bfloat16",
        "KV cache": "float32, on a GPU the engine's dtype", "sync": "bfloat16"}
    unified = rows("--plugin", "fp8")
    assert unified["trainer"] == "float32; linear layers multiply in fp8 e4m3 (blockwise)"
    assert unified["log-probs"].endswith("log-softmax in float32; linear layers as in training, in fp8 e4m3")
    assert unified["engine"] == "fp8 weights as in training (e4m3 blockwise), read as bfloat16"
    assert unified["sync"] == "fp8 weights and their scales (e4m3 blockwise); other tensors in bfloat16"
    assert rows("--fp8-recipe", "mxfp8")["trainer"].endswith("in fp8 e4m3 (mxfp8)")
    inference = rows("--hf-checkpoint", checkpoints[1], "--ref-load", checkpoints[0], *SGLANG)
    assert inference == {
        "trainer": "bfloat16, float32 masters", "log-probs": "the trainer's forward, log-softmax in float32",
        "engine": "fp8 weights (config.json), bfloat16", "KV cache": "bfloat16",
        "sync": "fp8 weights and their scales; other tensors in bfloat16"}
    both = rows("--hf-checkpoint", checkpoints[1], "--ref-load", checkpoints[0], *SGLANG, "--fp8-format", "hybrid")
    assert both["trainer"] == "bfloat16, float32 masters; linear layers multiply in fp8 hybrid (blockwise)"
    assert both["engine"] == inference["engine"] and both["sync"] == inference["sync"]
    trained = rows("--plugin", "fp8", *SGLANG)
    assert trained["engine"] == trained["sync"] == "bfloat16", "the engine's checkpoint is plain"
    assert rows(*SGLANG, "--sglang-kv-cache-dtype", "fp8_e4m3")["KV cache"] == "fp8_e4m3"


def test_a_checkpoint_alone_brings_the_plugin_and_not_its_training(checkpoints):
    plan = prepare(ROOT / "examples" / "moe.toml", ["--hf-checkpoint", str(checkpoints[1]), "--ref-load",
                                                         str(checkpoints[0])])
    assert [one.origin for one in plan.selected if one.manifest.name == "fp8"] == ["config.json of the checkpoint: fp8"]
    assert "fp8" not in plan.config.surface("megatron")
    said = json.loads((checkpoints[1] / "config.json").read_text())["quantization_config"]
    assert said["weight_block_size"] == [128, 128]
