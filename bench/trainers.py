"""The trainers megatron and fsdp beside one another on a CPU: scoring and steps of the same batches, in turn.

    python bench/trainers.py --rounds 3

Each measurement is a process of its own with one thread. Tokens per CPU second count scoring and steps together; memory
is the largest resident size of the process, its imports included.
"""

from __future__ import annotations

import argparse
import copy
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAINERS = ("megatron", "fsdp")
SIZES = dict(vocab_size=8192, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=8,
             num_key_value_heads=4, head_dim=32, max_position_embeddings=512, eos_token_id=258, pad_token_id=256)


def one(trainer: str, folder: Path) -> tuple[float, float]:
    """Tokens per CPU second and MiB, in this process."""
    import torch
    from miles_megatron.testing.ranks import batches
    from miles_testing.tiny import run_file

    from miles_core.build import trainer_part, with_context
    from miles_core.plugins.plan import prepare
    from miles_core.types import Rank

    torch.set_num_threads(1)
    tables = {"rollout": {"rollout_batch_size": 16, "n_samples_per_prompt": 4, "rollout_max_context_len": 128},
              "perf": {"trainer": trainer, "threads": 1, "max_tokens_per_gpu": 512}}
    plan = prepare(run_file(folder / f"{trainer}.toml", [], tables, {}, checkpoint=folder / "model"))
    part = trainer_part(plan.selected, with_context(plan.config), Rank())
    part.load()
    first, *others = batches(3, groups=16, vocab=SIZES["vocab_size"])
    for batch in (first, *copy.deepcopy(others)):  # the first warms up
        if batch.rollout_id == 1:
            begin = time.process_time()
        part.take_batch(batch)
        part.score()
        part.advantage()
        part.step(0)
        part.end_batch()
    seconds, tokens = time.process_time() - begin, sum(s.length for batch in others for s in batch.samples)
    part.close()
    return tokens / seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("TRAINER", "FOLDER"))
    args = parser.parse_args()
    if args.one:
        print(*one(args.one[0], Path(args.one[1])))
        return
    from miles_testing import tiny_checkpoint
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with tempfile.TemporaryDirectory() as name:
        tiny_checkpoint(Path(name, "model"))  # for tokenizer and prompts
        Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)).save_pretrained(Path(name, "model"))
        found: dict[str, list[tuple[float, float]]] = {trainer: [] for trainer in TRAINERS}
        for _ in range(args.rounds):
            for trainer in TRAINERS:
                command = [sys.executable, __file__, "--one", trainer, name]
                words = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout.split()
                found[trainer].append((float(words[-2]), float(words[-1])))
    for trainer, rows in found.items():
        speed, memory = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| {trainer} | {speed:.0f} | {memory:.0f} |")


if __name__ == "__main__":
    main()
