"""Bytes of a model's weights in bfloat16 and in int4, from shapes alone.

    python -m miles_int4_qat.sizes                       three known shapes
    python -m miles_int4_qat.sizes FOLDER ...            config.json of a Hugging Face directory

A model is made without storage (torch's meta device); GB are 10^9 bytes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_int4_qat.names import chosen
from miles_int4_qat.quantise import NIBBLES

KNOWN = {
    "70B (Llama-3-70B)": ("llama", dict(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, tie_word_embeddings=False)),
    "235B (Qwen3-235B-A22B)": ("qwen3_moe", dict(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=94, num_attention_heads=64,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536,
        decoder_sparse_step=1, tie_word_embeddings=False)),
    "671B (DeepSeek-V3)": ("deepseek_v3", dict(
        vocab_size=129280, hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=61,
        num_attention_heads=128, num_key_value_heads=128, n_shared_experts=1, n_routed_experts=256,
        num_experts_per_tok=8, first_k_dense_replace=3, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
        v_head_dim=128, qk_nope_head_dim=128, tie_word_embeddings=False)),
}  # fmt: skip
"""Shapes by their published config.json, without layers for multi-token prediction."""

_STACKED = re.compile(r"(\.experts)\.(gate_up|down)_proj$")
"""transformers keeps a mixture's matrices as one [experts, out, in]."""


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of a model's weights.

    Args:
        plain: in bfloat16.
        packed: with the targets in int4, by (targets, group size).
    """

    plain: int
    packed: dict[tuple[str, int], int]


def shapes(kind: str, fields: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Name on disk -> shape, of a model that transformers builds; experts under names of their own."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))
    by_name: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        if match := _STACKED.search(name):
            parts = match[2].split("_")
            experts, rows, width = parameter.shape
            for expert in range(experts):
                prefix = f"{name[: match.end(1)]}.{expert}"
                names = [f"{prefix}.{part}_proj.weight" for part in parts]
                by_name |= dict.fromkeys(names, (rows // len(parts), width))
        else:
            by_name[name] = tuple(parameter.shape)
    return by_name


def size(tensors: dict[str, tuple[int, ...]], groups: Sequence[int] = (32, 128)) -> Size:
    """Of tensors by name and shape; int4 with bfloat16 scales, and two int64 for the shape."""
    def count(shape: tuple[int, ...]) -> int:
        return shape[0] * (shape[1] if len(shape) > 1 else 1)

    packed = {}
    for targets in ("auto", "linears"):
        names = chosen(tensors, targets)
        for group in groups:
            packed[targets, group] = sum(
                count(shape) * 4 // NIBBLES + 2 * count(shape) // group + 16 if name in names else 2 * count(shape)
                for name, shape in tensors.items())
    return Size(sum(2 * count(shape) for shape in tensors.values()), packed)


def main(folders: list[str]) -> None:
    """A line of figures for each model."""
    import json

    models = {folder: json.loads(Path(folder, "config.json").read_text(encoding="utf-8")) for folder in folders}
    kinds = {name: (fields.pop("model_type"), fields) for name, fields in models.items()} or KNOWN
    for name, (kind, fields) in kinds.items():
        sizes = size(shapes(kind, fields))
        print(f"{name}: bf16 {sizes.plain / 1e9:.1f} GB")
        for (targets, group), packed in sizes.packed.items():
            print(f"  int4, targets {targets:<8} groups of {group:<4} {packed / 1e9:7.1f} GB  "
                  f"{sizes.plain / packed:.2f}x")


if __name__ == "__main__":
    main(sys.argv[1:])
