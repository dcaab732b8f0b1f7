"""The demo over several seeds: greedy accuracy before and after, and the seconds spent on training.

    python bench/demo_seeds.py                       five seeds of the dense model, one of the mixture of experts

Prints a Markdown table for docs/benchmarks.md. Training seconds are the wall time of all rollouts (sampling, scoring,
log-probs, steps, syncs), without start-up and evaluations.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from miles_core.record.events import read

MILES = Path(sys.executable).with_name("miles")


def one(model: str, seed: int) -> tuple[list[float], list[float], float, float]:
    """(accuracies, format validities, training seconds, largest log-prob difference) of one run."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([MILES, "run", "examples/demo.toml", "--no-live", f"--hf-checkpoint=examples/arithmetic/{model}",
                        f"--seed={seed}", f"--rollout-seed={seed}", f"--run-dir={folder}/run"], check=True,
                       stdout=subprocess.DEVNULL)
        events = list(read(Path(folder) / "run" / "events.jsonl"))
    evals = [event["metrics"] for event in events if event["event"] == "eval"]
    steps = [event["metrics"] for event in events if event["event"] == "metrics"]
    return ([e["eval/sums"] for e in evals], [e["eval/sums/reward/format"] for e in evals],
            sum(step["perf/step_time"] for step in steps),
            max(step["train/train_rollout_logprob_abs_diff_max"] for step in steps))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    count = parser.parse_args().seeds
    print("| model | seed | greedy before | after | gain | lowest format validity | training s | log-prob diff max |")
    print("|---|---|---|---|---|---|---|---|")
    worst = {"tiny-qwen3": 1.0, "tiny-qwen3-moe": 1.0}
    for model, seeds in (("tiny-qwen3", range(count)), ("tiny-qwen3-moe", range(1))):
        for seed in seeds:
            accuracy, valid, seconds, gap = one(model, seed)
            gain = accuracy[-1] - accuracy[0]
            worst[model] = min(worst[model], gain if seconds <= 90 else 0.0)
            print(f"| {model} | {seed} | {accuracy[0]:.3f} | {accuracy[-1]:.3f} | {gain:+.3f} | {min(valid):.3f} | "
                  f"{seconds:.1f} | {gap:.1e} |", flush=True)
    met = worst["tiny-qwen3"] >= 0.20 and worst["tiny-qwen3-moe"] >= 0.10
    print(f"\n{'met' if met else 'NOT met'}: dense >= +0.20 for every seed, mixture of experts >= +0.10, "
          "within 90 s of training")
    raise SystemExit(not met)


if __name__ == "__main__":
    main()
