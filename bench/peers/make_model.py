"""Write the random-weight Qwen3 checkpoint, tokenizer and prompts of a workload.

    python make_model.py --workload large --out /tmp/large

The folder then holds an ordinary Hugging Face checkpoint (fp32) with a word-level tokenizer in which the text "t7"
is token 7, and `prompts.jsonl` with the fields `prompt` (text) and `prompt_ids`.  The same seed and library
versions give the same bytes; both sides of a comparison should read the same folder.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from workloads import PROMPT_BATCHES, WORKLOADS, Workload


def make_model(workload: Workload, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of the workload's shape with seeded random weights and untied embeddings."""
    config = Qwen3Config(
        vocab_size=workload.vocabulary,
        hidden_size=workload.hidden,
        num_hidden_layers=workload.layers,
        num_attention_heads=workload.heads,
        num_key_value_heads=workload.kv_heads,
        head_dim=workload.head_dim,
        intermediate_size=workload.intermediate,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).to(torch.float32)
    # Plain sampling: no top-k, top-p or penalty that one framework would apply and another would not.
    model.generation_config = GenerationConfig(do_sample=True, pad_token_id=0)
    return model


def make_tokenizer(workload: Workload) -> PreTrainedTokenizerFast:
    """A tokenizer of one word per id, "t0" to "t511", without an end token: every answer has full length."""
    words = {f"t{i}": i for i in range(workload.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", unk_token="t0", padding_side="left")


def make_prompts(workload: Workload, seed: int) -> list[dict]:
    """Prompts of equal length in random ids (never 0, the padding id)."""
    rng = random.Random(seed)
    rows = []
    for _ in range(workload.prompts_per_step * PROMPT_BATCHES):
        ids = [rng.randrange(1, workload.vocabulary) for _ in range(workload.prompt_tokens)]
        rows.append({"prompt": " ".join(f"t{i}" for i in ids), "prompt_ids": ids})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    args.out.mkdir(parents=True, exist_ok=True)
    model = make_model(workload, args.seed)
    model.save_pretrained(args.out)
    make_tokenizer(workload).save_pretrained(args.out)
    with open(args.out / "prompts.jsonl", "w") as stream:
        for row in make_prompts(workload, args.seed):
            stream.write(json.dumps(row) + "\n")
    print(json.dumps({"out": str(args.out), "parameters": sum(p.numel() for p in model.parameters())}))


if __name__ == "__main__":
    main()
