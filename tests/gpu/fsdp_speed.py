"""An optimizer step of the trainer fsdp beside one of Megatron's: tokens/s, MFU and peak memory on one GPU, bf16.

    python tests/gpu/fsdp_speed.py                       qwen3-0.6b, 1.7b and 4b, the last with recomputation
    python tests/gpu/fsdp_speed.py qwen3-0.6b --trainers fsdp --recompute no --attention sdpa
    python tests/gpu/fsdp_speed.py --tiny                the same code on a CPU

Shapes, packed batches and MFU are those of trainer_speed.py; weights are random, and each case runs in a process of its
own. Losses are the same up to what random weights make of them: about ln 151936 = 11.9 nats under the surrogate. Prints
a line for each case, then the ratio of the two trainers; the exit status is how many cases failed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path

from ranks import Case
from trainer_speed import PEAK, QWEN3, RUN, SHAPES, in_process, rollout

SHAPES = SHAPES | {"tiny": QWEN3 | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
                                    "intermediate_size": 64, "num_key_value_heads": 2, "tie_word_embeddings": True}}
AGAIN = {"megatron": "--recompute-granularity full", "fsdp": "--gradient-checkpointing"}
"""The flag by which each trainer computes layers again in the backward pass."""


def random_weights() -> None:
    """Have the trainer fsdp keep weights that were drawn where they train: there are no files. (Case does it for
    Megatron's.)"""
    import miles_fsdp.models
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    def drawn(folder: str, options, dtype, **_body: bool):
        attention = None if options.attn_implementation == "packed" else options.attn_implementation
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype,
                                                     attn_implementation=attention)
        return model.eval()

    miles_fsdp.models.read = drawn


def measure(shape: str, trainer: str, tokens: int, length: int, steps: int, flags: list[str], *, micro_batches: int,
            profile: bool) -> dict[str, object]:
    """One case, in this process. The first step pays for kernels that are chosen and compiled."""
    from miles_megatron import estimate
    from miles_megatron.architecture import architecture_of

    from miles_core.plugins.plan import prepare
    from miles_core.types import Rank

    folder, whole = Path(tempfile.mkdtemp()), tokens * micro_batches
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    (folder / "run.toml").write_text(RUN.format(folder=folder, tokens=tokens, length=length,
                                                groups=micro_batches * tokens // length // 2))
    plan = prepare(folder / "run.toml", ["--plan-without-weights", "--trainer", trainer, *flags])
    random_weights()
    case = Case(plan.selected, plan.config, Rank())
    figures = case.train(rollout(whole, length), steps, profile)[0]
    size = architecture_of(plan.config)
    once = estimate.flops(length, parameters=estimate.active_parameters(size), attention=size.attention)
    fastest = min(figures["seconds"]["step"][1:steps])
    case.trainer.close()
    return {"tokens_per_s": round(whole / fastest), "mfu": round(once * (whole // length) / fastest / PEAK, 4),
            "peak_gb": round(figures["peak"] / 1e9, 2), **figures}


def main() -> int:
    """Every case, and the ratios."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("shapes", nargs="*", default=["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"])
    arguments.add_argument("--trainers", nargs="+", default=["megatron", "fsdp"], choices=AGAIN)
    arguments.add_argument("--recompute", nargs="+", choices=("no", "full"), help="default: full for 4b, else no")
    arguments.add_argument("--attention", default="packed", help="--attn-implementation of fsdp")
    arguments.add_argument("--tokens", type=int, default=16384)
    arguments.add_argument("--length", type=int, default=2048)
    arguments.add_argument("--micro-batches", type=int, default=1)
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--profile", action="store_true")
    arguments.add_argument("--flags", default="", help="of miles run, for all cases")
    arguments.add_argument("--fsdp-flags", default="", help="of miles run, for the trainer fsdp alone")
    arguments.add_argument("--limit", type=float, default=300, help="seconds of one case")
    arguments.add_argument("--tiny", action="store_true")
    arguments.add_argument("--here", action="store_true")
    words = arguments.parse_args()
    if words.tiny:
        words.shapes, words.tokens, words.length, words.steps = ["tiny"], 256, 64, 2
    if words.here:
        print(json.dumps(measure(words.shapes[0], words.trainers[0], words.tokens, words.length, words.steps,
                                 shlex.split(words.flags), micro_batches=words.micro_batches, profile=words.profile)))
        return 0
    failed = 0
    for shape in words.shapes:
        for recompute in words.recompute or ["full" if shape.endswith("-4b") else "no"]:
            speeds = {}
            for trainer in words.trainers:
                flags = [words.flags, AGAIN[trainer] if recompute == "full" else "",
                         f"--attn-implementation {words.attention} {words.fsdp_flags}" if trainer == "fsdp" else ""]
                measured = in_process(__file__, [
                    "--here", shape, "--trainers", trainer, "--tokens", words.tokens, "--length", words.length,
                    "--steps", words.steps, "--micro-batches", words.micro_batches, f"--flags={' '.join(flags)}",
                    *(["--profile"] if words.profile else [])], words.limit)
                good = isinstance(measured, dict)
                failed += not good
                if good:
                    speeds[trainer] = measured["tokens_per_s"]
                print(f"{'ok  ' if good else 'FAIL'} {shape} {trainer}, recompute {recompute}: "
                      f"{json.dumps(measured) if good else measured}", flush=True)
            if len(speeds) == 2:
                print(f"     {shape}, recompute {recompute}: fsdp / megatron {speeds['fsdp'] / speeds['megatron']:.2f}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
