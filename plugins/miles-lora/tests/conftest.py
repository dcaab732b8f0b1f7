"""Tiny checkpoints, PEFT directories for them, and plans of runs on them."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file

from miles_core.plugins.plan import prepare

SIZES = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=128, eos_token_id=258, pad_token_id=256,
             tie_word_embeddings=False, attn_implementation="eager")
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True,
               decoder_sparse_step=1)
PACKED = dict(num_experts=4, top_k_experts=2, moe_intermediate_size=24, enable_moe_block=True, sliding_window=16,
              layer_types=["sliding_attention", "full_attention"] * 2, global_head_dim=16, attention_k_eq_v=True,
              num_global_key_value_heads=1, hidden_size_per_layer_input=0, rms_norm_eps=1.0, tie_word_embeddings=True)
"""A mixture that keeps all experts of a layer in one tensor."""
DELTA = dict(layer_types=["linear_attention", "full_attention"] * 2, linear_key_head_dim=8, linear_value_head_dim=12,
             linear_num_key_heads=2, linear_num_value_heads=4, num_experts=4, num_experts_per_tok=2,
             moe_intermediate_size=24, shared_expert_intermediate_size=24)
"""Gated delta nets, whose layers are several stacked, and an expert that every token passes."""
RANK, ALPHA = 4, 12

RUN = ("--prompt-data", "x/no.jsonl", "--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
       "--rollout-max-response-len", "41", "--no-bf16", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "96",
       "--trainer-host", "process", "--disable-rewards-normalization", "--advantage-estimator", "grpo",
       "--lr", "1e-2")  # fmt: skip
LATENT = dict(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16,
              num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
              moe_intermediate_size=24, first_k_dense_replace=1)
"""Latent attention, two of whose layers every tensor-parallel rank has whole."""


def config_of(kind):
    from transformers import AutoConfig

    if kind == "sees":
        return AutoConfig.for_model("gemma3", text_config={**SIZES, "sliding_window": 16}, vision_config=dict(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28,
            patch_size=14), mm_tokens_per_image=4, boi_token_index=261, eoi_token_index=262, image_token_index=263)
    more = {"dense": ("qwen3", {}), "moe": ("qwen3_moe", EXPERTS), "tied": ("qwen3", {"tie_word_embeddings": True}),
            "fused": ("glm4", {"partial_rotary_factor": 0.5}), "packed": ("gemma4_text", PACKED),
            "delta": ("qwen3_5_moe_text", DELTA), "latent": ("deepseek_v3", LATENT)}
    model_type, extra = more[kind]
    return AutoConfig.for_model(model_type, **{**SIZES, **extra})


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """kind -> a Hugging Face directory."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    made = {}

    def make(kind="dense"):
        if kind not in made:
            folder = made[kind] = tmp_path_factory.mktemp(kind) / "base"
            torch.manual_seed(0)
            auto = AutoModelForImageTextToText if kind == "sees" else AutoModelForCausalLM
            model = auto.from_config(config_of(kind))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3 if parameter.dim() > 1 else 1)
            model.save_pretrained(folder)
        return made[kind]

    return make


@pytest.fixture(scope="session")
def adapter(checkpoint, tmp_path_factory):
    """(kind, modules=None, shared=False) -> a PEFT directory whose A and B are random; as SGLang has it of experts that
    share A of gate and up and B of down."""
    from miles_lora import peft
    from miles_lora.targets import LINEAR, last, names_of

    made = {}

    def make(kind="dense", modules=None, shared=False):
        key = kind, modules, shared
        if key not in made:
            draw, tensors = torch.Generator().manual_seed(1), {}
            for name, weight in load_file(checkpoint(kind) / "model.safetensors").items():
                if ".layers." in name and weight.dim() == 2 and LINEAR.search(last(name)) and (
                        modules is None or last(name) in modules):
                    first, second = names_of(name)
                    tensors[first] = torch.randn(RANK, weight.shape[1], generator=draw) * weight.shape[1] ** -0.5
                    tensors[second] = torch.randn(len(weight), RANK, generator=draw) * 0.05
            if shared:
                tensors = stacked(tensors)
            made[key] = tmp_path_factory.mktemp("peft") / "adapter"
            peft.write(made[key], peft.Shape(RANK, ALPHA), tensors, str(checkpoint(kind)))
        return made[key]

    return make


def stacked(tensors):
    """Adapters of each expert by itself -> [experts, ...] of a layer, and [1, ...], the first's, of what they share."""
    groups = {}
    for name, tensor in tensors.items():
        stem, expert, end = re.fullmatch(r"(.*?)(?:(?<=\.experts)\.(\d+))?(\.[^.]*\.lora_.\.weight)", name).groups()
        groups.setdefault(stem + end, []).append(tensor if expert is None else tensor[None])
    outer = re.compile(r"\.experts\.(?:down_proj\.lora_B|(?:gate|up)_proj\.lora_A)\.")
    return {name: torch.cat(each[:1] if outer.search(name) else each) for name, each in groups.items()}


@pytest.fixture(scope="session")
def plan():
    """(folder, *flags) -> the plan of a run on it."""
    return lambda folder, *flags: prepare(None, ["--hf-checkpoint", str(folder), *RUN, *map(str, flags)])


@pytest.fixture
def merged(checkpoint, adapter, convert, tmp_path):
    """kind -> a directory of the base with the random adapters merged into it."""
    def make(kind="dense"):
        out = tmp_path / f"merged-{kind}"
        convert("merge-lora", checkpoint(kind), out, "--lora-adapter-path", adapter(kind))
        return out

    return make


@pytest.fixture
def export():
    """(plan, folder): what the trainer of a plan writes with --save-hf."""
    def write(plan, folder):
        from miles_megatron import cpu

        from miles_core.build import trainer_part
        from miles_core.types import Rank

        trainer = trainer_part(plan.selected, plan.config, Rank())
        try:
            trainer.load()
            trainer.export(folder)
        finally:
            cpu.leave()

    return write
