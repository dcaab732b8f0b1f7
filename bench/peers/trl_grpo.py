"""Run TRL's GRPOTrainer on a workload and report what it costs on a CPU.

    python make_model.py --workload large --out /tmp/large
    python trl_grpo.py --workload large --model /tmp/large --steps 7       # one JSON line at the end
    python trl_grpo.py --workload large --model /tmp/large --interactive   # one step per line read on stdin

Interactive mode prints `{"ready": true, ...}` after the warm-up, then performs exactly one optimizer step (one
generation of the whole batch, one update) for each line it reads and answers with one JSON line; an end of input
stops it with a `{"done": true, ...}` line.  Two frameworks driven this way can be alternated step by step.
A step is measured from one boundary of the trainer to the next, so everything TRL does for it is counted; the
time spent waiting for a line is not.  CPU seconds are those of the process tree, which here is one process.

Every step trains once on fresh samples: `steps_per_generation` equals the number of gradient-accumulation
micro-batches, so that the batch is generated in one call, and `num_iterations` is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import grpo
from metering import JsonLines, cpu_seconds, peak_rss_mib
from workloads import PROMPT_BATCHES, WORKLOADS, Workload, reward


def parse_args() -> argparse.Namespace:
    """Command line; nothing heavy has been imported yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--model", required=True, help="folder written by make_model.py")
    parser.add_argument("--steps", type=int, default=7, help="measured steps (not with --interactive)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the first measured one")
    parser.add_argument("--interactive", action="store_true", help="one step for each line read on stdin")
    parser.add_argument("--micro-batch", type=int, help="sequences per forward/backward (default: MICRO_BATCH)")
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the KL term; above 0 adds a reference model")
    parser.add_argument("--loss-type", default="dapo", help="TRL's loss_type (dapo: mean over the batch's tokens)")
    parser.add_argument("--verdict", action="store_true", help="rewards of 0 and 1 (workloads.reward)")
    parser.add_argument("--cache", choices=("dynamic", "static"), help="key-value cache of generate (default: CACHE)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


MICRO_BATCH = {"large": 32, "small": 16}
CACHE = {"large": "static", "small": "dynamic"}
"""The settings that cost TRL the fewest CPU seconds a step among those tried; README.md has the figures."""


def build_trainer(args: argparse.Namespace, workload: Workload, micro_batch: int, cache: str, out: str):
    """The trainer, with everything that is not the step itself switched off."""
    import torch

    torch.set_num_threads(args.threads)
    from datasets import Dataset
    from transformers import AutoTokenizer

    def mean_id_reward(completion_ids, **_):
        return [reward(ids, workload.vocabulary, args.verdict) for ids in completion_ids]

    config = grpo.config(
        out, samples=workload.samples_per_step, micro_batch=micro_batch, cache=cache,
        model_init_kwargs={"dtype": "float32"}, use_cpu=True, bf16=False,
        num_generations=workload.samples_per_prompt, max_completion_length=workload.response_tokens,
        loss_type=args.loss_type, beta=args.beta, seed=args.seed,
        max_steps=10**6 if args.interactive else args.warmup + args.steps,
        logging_nan_inf_filter=False, dataloader_num_workers=0, dataloader_pin_memory=False,
    )  # fmt: skip
    with open(Path(args.model) / "prompts.jsonl") as lines:
        rows = [json.loads(line) for line in lines]
    assert len(rows) == workload.prompts_per_step * PROMPT_BATCHES, "the prompts are those of another workload"
    prompts = Dataset.from_list([{"prompt": row["prompt"]} for row in rows])
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    # TRL wants an end token. Its id is one past the model's vocabulary, so it is never sampled.
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    return grpo.trainer_class(cpu_seconds)(model=args.model, reward_funcs=mean_id_reward, args=config,
                                           train_dataset=prompts, processing_class=tokenizer)


def wait(args: argparse.Namespace, channel: JsonLines, state, control, ready: dict) -> None:
    """At a boundary of an interactive run: announce the end of the warmup, and wait for a line of standard input."""
    if not args.interactive or state.global_step < args.warmup:
        return
    if state.global_step == args.warmup:
        channel.write(ready)
    if not sys.stdin.readline():
        control.should_training_stop = True


def make_meter(args: argparse.Namespace, workload: Workload, channel: JsonLines, header: dict):
    """A callback that measures each step between trainer boundaries and, interactively, waits at each of them."""
    from transformers import TrainerCallback

    class Meter(TrainerCallback):
        """Reads its trainer's counters at the end of every step."""

        def __init__(self) -> None:
            self.trainer = None
            self.steps: list[dict] = []
            self.start: dict = {}

        def _mark(self) -> None:
            self._at = (
                cpu_seconds(), self.trainer.generation_s, self.trainer.generations, self.trainer.generated_tokens
            )  # fmt: skip

        def on_train_begin(self, *_, **__) -> None:
            self.start["cpu_s_until_training"] = round(cpu_seconds(), 3)
            self._mark()

        def on_step_end(self, _, state, control, **__):
            cpu, *before = self._at
            cpu = cpu_seconds() - cpu
            after = (self.trainer.generation_s, self.trainer.generations, self.trainer.generated_tokens)
            generation, generations, tokens = (a - b for a, b in zip(after, before, strict=True))
            if (generations, tokens) != (1, workload.response_tokens_per_step):
                raise RuntimeError(f"a step made {generations} generations of {tokens} tokens in all")
            step = {
                "step": state.global_step, "cpu_s": round(cpu, 4), "generation_cpu_s": round(generation, 4),
                "training_cpu_s": round(cpu - generation, 4), "peak_rss_mib": peak_rss_mib(),
            }  # fmt: skip
            if state.global_step == 1:
                self.start["cpu_s_start_to_first_step"] = round(cpu_seconds(), 3)
            if state.global_step <= args.warmup:
                self.start.setdefault("warmup_cpu_s", []).append(step["cpu_s"])
            else:
                self.steps.append(step)
                if args.interactive:
                    channel.write(step)
            ready = {"ready": True, **header, **self.start, "peak_rss_mib": step["peak_rss_mib"]}
            wait(args, channel, state, control, ready)
            self._mark()
            return control

    return Meter()


def main() -> None:
    args = parse_args()
    channel = JsonLines()
    # Threads that spin while they wait would charge a busy machine's load to this process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    workload = WORKLOADS[args.workload]
    micro_batch = args.micro_batch or MICRO_BATCH[args.workload]
    cache = args.cache or CACHE[args.workload]
    if workload.samples_per_step % micro_batch:
        raise SystemExit(f"--micro-batch {micro_batch} does not divide {workload.samples_per_step} samples")
    if args.warmup < 1:
        raise SystemExit("--warmup must be at least 1")
    names = ("trl", "transformers", "torch", "accelerate", "datasets")
    header = {
        "framework": "trl", "workload": args.workload, "micro_batch": micro_batch, "threads": args.threads,
        "beta": args.beta, "loss_type": args.loss_type, "cache": cache, "seed": args.seed,
        "versions": {name: version(name) for name in names},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as out:
        trainer = build_trainer(args, workload, micro_batch, cache, out)
        meter = make_meter(args, workload, channel, header)
        meter.trainer = trainer
        trainer.add_callback(meter)
        trainer.train()
    summary = {"peak_rss_mib": peak_rss_mib(), "cpu_s_total": round(cpu_seconds(), 3)}
    if meter.steps:
        for key in ("cpu_s", "generation_cpu_s", "training_cpu_s"):
            summary[f"median_{key}"] = round(statistics.median(step[key] for step in meter.steps), 4)
    channel.write({"done": True, **header, **meter.start, "steps": meter.steps, **summary})


if __name__ == "__main__":
    main()
