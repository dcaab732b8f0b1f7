"""A tiny random Qwen3 with a tokenizer of bytes, and sums to train on: made in milliseconds, without torch."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CONSTANTS = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 264, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
    "attention_bias": False, "tie_word_embeddings": True, "eos_token_id": 258, "pad_token_id": 256, "dtype": "float32",
}  # fmt: skip
EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
           "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 1,
           "mlp_only_layers": []}
TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SPREAD = 0.3
"""Of the weights: enough for answers to differ."""


TOY = '''"""What a toy run falls back on: a scorer that random weights can earn, and an estimator."""

from miles_core import hookimpl


class Toy:
    """The share of even tokens, and rewards less their group's mean."""

    @hookimpl(name="toy")
    def reward(self, sample):
        ids = sample.tokens[-sample.response_length:]
        return float((ids % 2 == 0).mean())

    @hookimpl(name="toy")
    def advantage(self, batch):
        means = {id(s): sum(x.reward for x in g.samples) / len(g.samples) for g in batch.groups for s in g.samples}
        return [sample.reward - means[id(sample)] for sample in batch.samples]
'''


def tiny_checkpoint(folder: Path | None = None, *, experts: bool = False) -> Path:
    """Write a Hugging Face directory and, beside its files, train.jsonl.

    Args:
        folder: where; by default one of this process that goes with it, made once.
        experts: a mixture of four experts in place of a dense model.
    """
    if folder is None:
        return _shared(experts)
    import numpy as np
    from safetensors.numpy import save_file

    config = CONSTANTS | (EXPERTS if experts else {})
    draw = np.random.default_rng(0)
    shapes = _shapes(config, experts)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ones(shape, np.float32) if "norm" in name else
               draw.normal(0, SPREAD, shape).astype(np.float32) for name, shape in shapes.items()},
              folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    _tokenizer(folder)
    rows = [{"prompt": [{"role": "user", "content": f"{a}+{b}="}], "label": str(a + b)}
            for a in range(8) for b in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run_file(path: Path, plugins: Sequence[str], tables: Mapping[str, Mapping[str, object]],
             options: Mapping[str, object], table: str = "", checkpoint: Path | None = None) -> Path:
    """Write a run file of a tiny run; beside it toy.py, whose scorer and estimator count unless the run names others.

    Args:
        tables: of the run file, beside what every tiny run has.
        options: what counts in the end: keys of `table`, and with dots of others.
    """
    model = checkpoint or tiny_checkpoint()
    base: dict[str, dict[str, object]] = {
        "checkpoint": {"hf_checkpoint": str(model), "run_dir": str(path.parent / "run")},
        "rollout": {"prompt_data": str(model / "train.jsonl"), "input_key": "prompt", "label_key": "label",
                    "apply_chat_template": True, "num_rollout": 1, "rollout_batch_size": 2, "n_samples_per_prompt": 2,
                    "engine": "local", "rollout_max_response_len": 8, "rollout_max_context_len": 64,
                    "rm_type": ["toy"]},
        "algorithm": {"advantage_estimator": "toy"},
        "perf": {"bf16": False, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 256},
    }  # fmt: skip
    for name, values in tables.items():
        base.setdefault(name, {}).update(values)
    for key, value in options.items():
        where, _, name = key.rpartition(".")
        base.setdefault(where or table, {})[name] = value
    (path.parent / "toy.py").write_text(TOY, encoding="utf-8")
    lines = [f"plugins = {json.dumps([*plugins, './toy.py'])}"]
    for name, values in base.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@functools.cache
def _shared(experts: bool) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="miles-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return tiny_checkpoint(folder / "model", experts=experts)


def _shapes(config: dict[str, Any], experts: bool) -> dict[str, tuple[int, ...]]:
    wide, head = config["hidden_size"], config["head_dim"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], wide),
                                         "model.norm.weight": (wide,)}
    for layer in range(config["num_hidden_layers"]):
        own = {"input_layernorm": (wide,), "post_attention_layernorm": (wide,),
               "self_attn.q_proj": (queries, wide), "self_attn.k_proj": (keys, wide), "self_attn.v_proj": (keys, wide),
               "self_attn.o_proj": (wide, queries), "self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
        inner = config["moe_intermediate_size" if experts else "intermediate_size"]
        parts = [f"mlp.experts.{i}" for i in range(config["num_experts"])] if experts else ["mlp"]
        for part in parts:
            own |= {f"{part}.gate_proj": (inner, wide), f"{part}.up_proj": (inner, wide),
                    f"{part}.down_proj": (wide, inner)}
        own |= {"mlp.gate": (config["num_experts"], wide)} if experts else {}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    return shapes


def _tokenizer(folder: Path) -> None:
    """A token for each byte, then special ones: 256 pads, 257 and 258 begin and end a message."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    spellings = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(spellings)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False, "model_max_length": 128}))
