"""A whole colocated step beside what its parts take alone: SGLang on its requests, and the optimizer step. One GPU.

    python tests/gpu/whole_step.py qwen3-0.6b moe-4b                    with plugin r3 where there are experts
    python tests/gpu/whole_step.py qwen3-0.6b --also=--deterministic-mode    the same run under further flags, too
    python tests/gpu/whole_step.py qwen3-0.6b --flags="--trainer fsdp" --also=--true-on-policy-mode --rollouts 20
    python tests/gpu/whole_step.py qwen3-0.6b --profile                 and where the GPU waits in its last step
    python tests/gpu/whole_step.py qwen3-0.6b --apart                   two GPUs, one for each side, with --max-lag 1
    python tests/gpu/whole_step.py moe-4b --tiny                        the same code on a CPU, with the local engine

Weights are random, of the shapes of trainer_speed.py; a coin is the reward, and every answer has --tokens tokens. Each
run's logs are printed where it fails or does not end within --seconds, with what its processes do then, by py-spy if
that is installed. Prints seconds of each part, their sum and the ratio; the exit status is 1 where a run fails.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from burst import ROLLOUT
from moe import DATA, SGLANG, ended, started
from traces import waiting
from trainer_speed import SHAPES

from miles_core.record.events import read

PROMPT = 12
"""Tokens of an average prompt of examples/demo.toml."""
UNSAVED = ["--load", "none", "--save", "none", "--save-interval", "none", "--save-hf", "none"]
APART = ["--rollout-num-gpus", 1, "--max-lag", 1, "--use-rollout-logprobs"]
SMALL = {"vocab_size": 264, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32,
         "num_key_value_heads": 1, "intermediate_size": 128}


def checkpoint(shape: str, folder: Path, tiny: bool) -> Path:
    """Random bfloat16 weights by Hugging Face's names, with the tokenizer of the examples."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if (folder / "config.json").is_file():
        return folder
    values = SHAPES[shape] | {"bos_token_id": None, "eos_token_id": 258, "pad_token_id": 256} | (SMALL if tiny else {})
    if tiny and "num_experts" in values:
        values |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = AutoConfig.for_model(**values)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "tiny-qwen3" / name, folder)
    torch.cuda.empty_cache()
    return folder


def run(folder: Path, model: Path, args: argparse.Namespace, words: list[str]) -> list[dict[str, float]]:
    """The metrics of every rollout; what failed is printed."""
    flags = [*UNSAVED, "--rm-weights", 1, "--hf-checkpoint", model, "--num-rollout", args.rollouts,
             "--skip-eval-before-train", "--eval-interval", 1000, "--eval-max-response-len", 4, "--lr", "1e-6",
             "--rollout-ignore-eos", "--rollout-max-response-len", args.tokens, "--n-samples-per-prompt", 8,
             "--rollout-batch-size", args.requests // 8, "--max-tokens-per-gpu", args.cap,
             "--plugin", "tests/gpu/burst.py", *words]
    if args.profile:
        flags += ["--use-pytorch-profiler", "--profile-target", "train_actor",
                  "--profile-step-start", args.rollouts - 1, "--profile-step-end", args.rollouts]
    if args.tiny:
        flags += ["--engine", "local"]
    else:
        flags += [*(flag for flag in SGLANG if not args.apart or flag != "--colocate"), *(APART if args.apart else []),
                  "--sglang-cuda-graph-max-bs", args.requests, "--sglang-mem-fraction-static", args.fraction]
    steps = ended(started(folder, list(map(str, flags)), recipe="examples/demo.toml"), folder,
                  time.monotonic() + args.seconds)
    for path in (folder / "profile").glob("*.json.gz"):
        print(*waiting(path), sep="\n", flush=True)
    syncs = [event for event in read(folder / "events.jsonl") if event["event"] == "weight_sync"] if steps else []
    print("the last syncs:", json.dumps(syncs[-2:]), flush=True)
    return steps


def step_alone(shape: str, args: argparse.Namespace) -> float:
    """Seconds of an optimizer step on as many samples of the same length as a rollout has, by trainer_speed.py."""
    done = subprocess.run([sys.executable, Path(__file__).with_name("trainer_speed.py"), "--here", shape,
                           "--tokens", str(args.cap), "--length", str(args.tokens + PROMPT), "--prompt", str(PROMPT),
                           "--steps", "4", "--samples", str(args.requests)],
                          capture_output=True, text=True, timeout=args.seconds)
    if done.returncode:
        raise RuntimeError(done.stdout[-1000:] + done.stderr[-3000:])
    warm = json.loads(done.stdout.splitlines()[-1])["seconds"]["step"][1:]
    return sum(warm) / len(warm)


def shown(name: str, steps: list[dict[str, float]], tokens: int) -> dict[str, float]:
    """Means over the rollouts after the third, in which burst.py asks the engine."""
    late = steps[ROLLOUT:] or steps[-1:]
    names = sorted({key for step in late for key in step if key.startswith(("perf/", "train/train_rollout"))})
    means = {key: round(sum(step.get(key, 0.0) for step in late) / len(late), 4) for key in names}
    print(name, json.dumps(means), flush=True)
    print(name, "every step, rollout s:", [(round(step["perf/step_time"], 2), round(step["perf/rollout_time"], 2))
                                           for step in steps], flush=True)
    print(f"{name}: {tokens / means['perf/step_time']:.0f} new tokens/s through the whole step", flush=True)
    return means


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["qwen3-0.6b"], choices=[*SHAPES, []])
    parser.add_argument("--tokens", type=int, default=1024, help="new tokens of each answer")
    parser.add_argument("--requests", type=int, default=256, help="answers of a rollout")
    parser.add_argument("--cap", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--rollouts", type=int, default=5)
    parser.add_argument("--fraction", default="0.5", help="of the GPU's memory, for the server")
    parser.add_argument("--flags", default="", help='of all runs: --flags="--trainer fsdp"')
    parser.add_argument("--also", action="append", default=[], help="of one more run: --also=--deterministic-mode")
    parser.add_argument("--seconds", type=float, default=400, help="of each run and server")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/miles-whole-step"))
    parser.add_argument("--alone", action=argparse.BooleanOptionalAction, default=True, help="measure the parts, too")
    parser.add_argument("--profile", action="store_true", help="where the GPU waits in the last rollout's step")
    parser.add_argument("--apart", action="store_true", help="a GPU for each side, and sampling ahead of training")
    parser.add_argument("--tiny", action="store_true")
    args, failed = parser.parse_args(), 0
    args.folder.mkdir(parents=True, exist_ok=True)
    for shape in args.shapes:
        model = checkpoint(shape, args.folder / shape, args.tiny)
        more = [*shlex.split(args.flags), *(["--plugin", "r3"] if "num_experts" in SHAPES[shape] else [])]
        means = []
        for number, flags in enumerate(["", *args.also]):
            name = f"{shape}{flags and ' ' + flags}"
            steps = run(args.folder / f"run-{shape}-{number}", model, args, [*more, *shlex.split(flags)])
            failed |= len(steps) < args.rollouts
            steps = steps[:-1] if args.profile else steps  # a trace takes time
            means += [shown(name, steps, args.requests * args.tokens)] if steps else []
        for one in means[1:]:
            print(f"{shape}: a step takes {one['perf/step_time'] / means[0]['perf/step_time']:.3f} of the first's")
        alone = args.folder / f"run-{shape}-0/burst.json"
        if args.alone and means and alone.is_file():
            burst, step = json.loads(alone.read_text()), step_alone(shape, args)
            engine = burst["seconds"]
            whole, rollout = means[0]["perf/step_time"], means[0]["perf/rollout_time"]
            if "without_routes" in burst:
                print(f"{shape}: engine alone, asked for no routes {burst['without_routes']:.2f} s")
            print(f"{shape}: engine alone {engine:.2f} s, optimizer step alone {step:.2f} s; whole step {whole:.2f} s, "
                  f"{whole / (engine + step):.3f} of their sum, {whole / max(engine, step):.3f} of the slower; "
                  f"rollout {rollout:.2f} s, {rollout / engine:.3f} of the engine alone", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
