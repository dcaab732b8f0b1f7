"""What is refused of adapters, and of servers that should hold them, before any of them starts."""

from __future__ import annotations

import json

import pytest
from miles_lora import peft

from miles_core.errors import CheckpointError, ConfigError
from miles_core.plugins import bind

ALONE = ("--engine", "sglang", "--weight-sync", "adapter", "--bf16")
MERGED = ("--engine", "sglang", "--bf16")
RANK = ("--lora-rank", 4)


@pytest.mark.parametrize(("flags", "who"), [
    ((*ALONE, "--sglang-max-lora-rank", 2), "--sglang-max-lora-rank"), ((*ALONE, "--sglang-max-lora-rank", 8), None),
    ((*MERGED, "--sglang-max-lora-rank", 8), None), ((*MERGED, "--sglang-enable-lora"), "--weight-sync"),
    ((*ALONE, "--pause-generation-mode", "in_place"), "--pause-generation-mode"), (MERGED, None), (ALONE, None),
    (("--lora-rank", 0), "--lora-rank"), (("--lora-alpha", 0), "--lora-alpha"), ((), None),
    (("--target-modules", "decoder.layers.0.self_attention.linear_proj"), "--target-modules"),
    (("--exclude-modules", "decoder.layers.0.self_attention.linear_proj"), "--exclude-modules"),
    (("--target-modules", "decoder.layers.*.self_attention.linear_proj"), None),
    (("--lora-dropout", 0.1), "--lora-dropout"), (("--lora-type", "lora"), "--lora-type"),
], ids=str)
def test_servers_that_hold_adapters(checkpoint, plan, flags, who):
    if who is None:
        made = plan(checkpoint("dense"), *RANK, *flags)
        bind.bind(made.selected, made.config, "driver")
    else:
        with pytest.raises(ConfigError) as caught:
            plan(checkpoint("dense"), *RANK, *flags)
        assert who in caught.value.who


@pytest.mark.parametrize(("change", "good"), [
    ({"init_lora_weights": "pissa_niter_16"}, False), ({"init_lora_weights": "gaussian"}, True),
    ({"bias": "all"}, False), ({"target_parameters": ["mlp.experts.down_proj"]}, False),
    ({"trainable_token_indices": [1]}, False), ({"layer_replication": [[0, 2]]}, False),
    ({"trainable_token_indices": None, "layer_replication": None, "target_parameters": None}, True),
], ids=str)
def test_adapters_that_are_not_trained_here(adapter, tmp_path, change, good):
    said = json.loads((adapter("dense") / "adapter_config.json").read_text()) | change
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    if good:
        assert peft.read(tmp_path) == peft.read(adapter("dense"))
    else:
        with pytest.raises(CheckpointError) as caught:
            peft.read(tmp_path)
        assert "adapter_config.json" in caught.value.who
