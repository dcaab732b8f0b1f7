"""Seconds of TRL's GRPO steps on one GPU, for requests like those of tests/gpu/whole_step.py.

    python tests/gpu/whole_step.py qwen3-0.6b --folder /dev/shm/w              leaves the model in /dev/shm/w/qwen3-0.6b
    python bench/peers/trl_step.py --model /dev/shm/w/qwen3-0.6b               in TRL's environment (README.md)
    python bench/peers/trl_step.py --model ... --cache dynamic --weights float32
    python bench/peers/trl_step.py --model examples/arithmetic/tiny-qwen3 --requests 16 --tokens 8 --micro-batch 8

256 answers of exactly 1,024 tokens a step, eight to a prompt, one optimizer step for each generation, no pass for
old log-probs, no reference. Answers come from transformers' generate (TRL takes no SGLang): with a static cache it
compiles the decoding step and captures it, with a dynamic one it does not. Weights in bfloat16 are what TRL is fastest
with; Miles has masters in float32. Prints one line of JSON a step: seconds of generation and of the whole.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import grpo

PROMPTS = Path(__file__).parents[2] / "examples/arithmetic/train.jsonl"


def parse_args() -> argparse.Namespace:
    """Command line; nothing heavy has been imported yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=256, help="answers of a step")
    parser.add_argument("--tokens", type=int, default=1024, help="new tokens of each")
    parser.add_argument("--micro-batch", type=int, default=16, help="sequences per forward/backward")
    parser.add_argument("--steps", type=int, default=3, help="the first compiles")
    parser.add_argument("--cache", choices=("static", "dynamic"), default="static", help="of generate")
    parser.add_argument("--weights", choices=("bfloat16", "float32"), default="bfloat16")
    return parser.parse_args()


def trainer_of(args: argparse.Namespace, out: str):
    """TRL's trainer, with everything that is not the step itself switched off."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer

    config = grpo.config(
        out, samples=args.requests, micro_batch=args.micro_batch, cache=args.cache,
        model_init_kwargs={"dtype": args.weights}, bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(), num_generations=8, max_completion_length=args.tokens,
        generation_kwargs={"min_new_tokens": args.tokens}, loss_type="dapo", beta=0.0, max_steps=args.steps, seed=0,
    )  # fmt: skip
    with PROMPTS.open(encoding="utf-8") as lines:
        rows = [{"prompt": json.loads(line)["prompt"]} for line, _ in zip(lines, range(args.requests), strict=False)]
    draw = random.Random(0)

    def coin(completions, **_):
        return [float(draw.random() < 0.5) for _ in completions]

    return grpo.trainer_class(clock)(model=args.model, reward_funcs=coin, args=config,
                                     train_dataset=Dataset.from_list(rows),
                                     processing_class=AutoTokenizer.from_pretrained(args.model))


def clock() -> float:
    """Seconds, when the GPU is done."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def meter_of(trainer, args: argparse.Namespace):
    """A callback that prints each step."""
    from transformers import TrainerCallback

    class Meter(TrainerCallback):
        def on_train_begin(self, *_, **__) -> None:
            self.last = (clock(), 0.0, 0)

        def on_step_end(self, *_, **__) -> None:
            now = (clock(), trainer.generation_s, trainer.generated_tokens)
            whole, generation, tokens = (a - b for a, b in zip(now, self.last, strict=True))
            if tokens != args.requests * args.tokens:
                raise RuntimeError(f"a step has {tokens} tokens and not {args.requests * args.tokens}")
            print(json.dumps({"step_s": round(whole, 2), "generation_s": round(generation, 2),
                              "training_s": round(whole - generation, 2), "new_tokens_per_s": round(tokens / whole)}),
                  flush=True)
            self.last = now

    return Meter()


def main() -> None:
    args = parse_args()
    if args.requests % args.micro_batch or args.requests % 8:
        raise SystemExit(f"--requests {args.requests} is no multiple of 8 and of --micro-batch {args.micro_batch}")
    print(json.dumps({name: version(name) for name in ("trl", "transformers", "torch")} | vars(args)), flush=True)
    with tempfile.TemporaryDirectory() as out:
        trainer = trainer_of(args, out)
        trainer.add_callback(meter_of(trainer, args))
        trainer.train()


if __name__ == "__main__":
    main()
