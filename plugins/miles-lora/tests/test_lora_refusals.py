"""What a plan knows of adapters and of servers that should hold them, before any of them starts."""

from __future__ import annotations

import json

import pytest

from miles_core.errors import ConfigError

ALONE = ("--engine", "sglang", "--weight-sync", "adapter", "--bf16")
MERGED = ("--engine", "sglang", "--bf16")
RANK = ("--lora-rank", 4)
QKV = ("--target-modules", "q_proj,k_proj,v_proj")


@pytest.mark.parametrize(("flags", "words"), [
    ((*ALONE, "--sglang-max-lora-rank", 2), r"smaller rank than --lora-rank \(got 4\)"),
    ((*ALONE, "--sglang-max-lora-rank", 8), None),
    ((*MERGED, "--sglang-max-lora-rank", 8), "get merged weights and hold no adapter.*add --weight-sync adapter"),
    ((*MERGED, "--sglang-enable-lora"), "get merged weights and hold no adapter"),
    ((*MERGED, "--sglang-lora-target-modules", "all"), "get merged weights and hold no adapter"),
    ((*ALONE, "--sglang-lora-target-modules", "qkv_proj"), "servers apply no adapters on o_proj"),
    ((*ALONE, *QKV, "--sglang-lora-target-modules", "down_proj"), "no adapters on q_proj, k_proj and v_proj"),
    ((*ALONE, *QKV, "--sglang-lora-target-modules", "qkv_proj"), None),
    ((*ALONE, "--sglang-lora-target-modules", "all"), None),
    ((*ALONE, "--sglang-lora-target-modules", "all", "q_proj"), "no other name beside it"),
    ((*ALONE, "--exclude-modules", "down_proj", "--sglang-lora-target-modules", "q_proj", "o_proj", "gate_proj"), None),
    ((*ALONE, "--target-modules", "q_proj"), "as one layer, and takes adapters of all or none"),
    ((*MERGED, "--target-modules", "q_proj"), None),
    ((*ALONE, "--exclude-modules", "up_proj"), "adapters of both or none"),
    ((*ALONE, "--exclude-modules", "gate_proj,up_proj"), None),
    ((*ALONE, "--sglang-max-loaded-loras", 1), "room for both"), ((*ALONE, "--sglang-max-loaded-loras", 2), None),
    ((*ALONE, "--sglang-speculative-algorithm", "EAGLE"), "n-grams alone"),
    ((*MERGED, "--sglang-speculative-algorithm", "EAGLE"), None),
    ((*ALONE, "--pause-generation-mode", "in_place"), "no new adapter while requests still use the old one"),
    (("--lora-rank", 0), "adapters of no rank"), (("--lora-alpha", 0), "adapters should count"),
    (("--lora-dropout", 0.1), "another policy would train"), (("--lora-type", "lora"), "have adapters of their own"),
], ids=str)
def test_servers_that_hold_adapters(checkpoint, plan, flags, words):
    if words is None:
        plan(checkpoint("dense"), *RANK, *flags)
    else:
        with pytest.raises(ConfigError, match=words):
            plan(checkpoint("dense"), *RANK, *flags)


def test_experts_have_none_on_servers(checkpoint, plan):
    with pytest.raises(ConfigError, match="no new weights for experts that may have adapters"):
        plan(checkpoint("moe"), *RANK, *ALONE)
    plan(checkpoint("moe"), *RANK, *ALONE, "--exclude-modules", "gate_proj,up_proj,down_proj")


@pytest.mark.parametrize(("change", "words"), [
    ({"init_lora_weights": "pissa_niter_16"}, "changes the base"), ({"init_lora_weights": "gaussian"}, None),
    ({"lora_bias": True}, "adapters with biases"), ({"lora_bias": False}, None), ({"lora_alpha": "16"}, "is a number"),
    ({"target_parameters": ["mlp.experts.down_proj"]}, "on parameters that are no layers"),
    ({"trainable_token_indices": [1]}, "embeddings of tokens"), ({"layer_replication": [[0, 2]]}, "on repeated ones"),
    ({"trainable_token_indices": None, "layer_replication": None, "target_parameters": None}, None),
], ids=str)
def test_adapters_that_are_not_trained_here(checkpoint, adapter, plan, tmp_path, change, words):
    source = adapter("dense")
    for file in source.iterdir():
        (tmp_path / file.name).symlink_to(file)
    said = json.loads((source / "adapter_config.json").read_text()) | change
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    flags = ("--lora-adapter-path", tmp_path, "--lora-alpha", said["lora_alpha"])
    if words is None:
        plan(checkpoint("dense"), *flags)
    else:
        with pytest.raises(ConfigError, match=words):
            plan(checkpoint("dense"), *flags)
