"""Does speculation pay? Seconds of a rollout with and without drafts and partial rollout, at lengths with a long tail.

    python tests/gpu/speculation.py --model models/smollm2-135m-instruct          one GPU
    python tests/gpu/speculation.py --model examples/arithmetic/tiny-qwen3 --tiny    the same code on a CPU

A pretrained model answers instructions of many kinds until it says that it is done, or to --tokens.
Nothing is trained: the runs are of the engine and the loop (`--debug-rollout-only`). They start side by side and then
take turns. Prints seconds of each rollout, lengths, accepted drafts, and tokens/s; status 1 where a run fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from moe import SGLANG, in_turns

SUBJECTS = ["the sea", "a bicycle", "bread", "the moon", "trees", "a clock", "rain", "music", "an ant", "glass",
            "a letter", "winter", "salt", "a bridge", "the heart", "paper"]
TASKS = ["Write one word about {}.", "Write a short poem about {}.", "Explain {} to a child.",
         "List ten facts about {}, one a line.", "Write a long story about {} with a beginning, a middle and an end.",
         "Write {} three times.", "Write a Python function that prints {} in a loop, and explain each line.",
         "Is {} useful? Answer yes or no."]
NGRAM = ["--sglang-speculative-algorithm", "NGRAM", "--sglang-speculative-num-draft-tokens", "8"]
SHOWN = {"rollout s": "perf/rollout_time", "accepted": "rollout/spec_accept_rate",
         "tokens a step": "rollout/spec_accept_length", "mean length": "rollout/response_len/mean",
         "longest": "rollout/response_len/max", "cut": "rollout/truncated_ratio"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--groups", type=int, default=16, help="of eight answers, in a rollout")
    parser.add_argument("--rollouts", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--sides", nargs="*", help="names of the runs; all")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/miles-speculation"))
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    prompts = args.folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": task.format(subject), "label": "none"}) + "\n"
                               for subject in SUBJECTS for task in TASKS))
    common = ["--hf-checkpoint", args.model, "--prompt-data", prompts, "--num-rollout", args.rollouts,
              "--debug-rollout-only", "--skip-eval-before-train", "--eval-interval", 1000, "--rollout-shuffle",
              "--rollout-max-response-len", args.tokens, "--rollout-batch-size", args.groups,
              "--n-samples-per-prompt", 8, "--rm-weights", 1]
    if args.tiny:
        common += ["--engine", "local"]
    else:
        engine = [word for word in SGLANG if word != "--colocate"]
        common += [*engine, "--rollout-num-gpus", 1, "--sglang-mem-fraction-static", "0.7",
                   "--sglang-max-total-tokens", args.groups * 16 * args.tokens,
                   "--sglang-cuda-graph-max-bs", args.groups * 16]  # as many are in flight with over-sampling
    partial = ["--partial-rollout", "--over-sampling-batch-size", 2 * args.groups]
    sides = {"plain": [], "n-grams": NGRAM, "partial": partial, "partial, n-grams": [*partial, *NGRAM]}
    if args.tiny:
        sides = {name: words for name, words in sides.items() if "n-grams" not in name}
    runs = {name: (args.folder / name.replace(", ", "-"), [*map(str, [*common, *words])])
            for name, words in sides.items() if name in (args.sides or sides)}
    steps = in_turns(runs, args.seconds, recipes=dict.fromkeys(runs, "examples/demo.toml"))
    for name, each in steps.items():
        for title, key in SHOWN.items():
            print(f"{name:18} {title:14}", json.dumps([round(step[key], 3) for step in each if key in step]))
        timed = each[3:]
        if timed:
            seconds = sum(step["perf/step_time"] for step in timed)
            tokens = sum(step["rollout/response_len/mean"] for step in timed) * args.groups * 8
            print(f"{name:18} {seconds / len(timed):.2f} s a rollout, {tokens / seconds:.0f} tokens/s", flush=True)
    return int(not all(len(each) == args.rollouts for each in steps.values()))


if __name__ == "__main__":
    sys.exit(main())
