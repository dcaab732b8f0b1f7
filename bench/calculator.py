"""The calculator recipe over several seeds: greedy accuracy before and after, calls per sample, seconds of training.

    python plugins/miles-tools/examples/make_calculator.py      once
    python bench/calculator.py

Prints a Markdown table for docs/benchmarks.md. Training seconds are the wall time of all rollouts (sampling, tools,
scoring, log-probs, steps, syncs), without start-up and evaluations.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from miles_core.record.events import read

MILES = Path(sys.executable).with_name("miles")
RECIPE = Path("plugins/miles-tools/examples/calculator.toml")


def one(data: Path, seed: int) -> tuple[list[float], list[dict[str, float]]]:
    """(greedy accuracies, metrics of each rollout) of one run."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([MILES, "run", RECIPE, "--no-live", f"--hf-checkpoint={data}/warm", f"--seed={seed}",
                        f"--prompt-data={data}/train.jsonl", "--eval-prompt-data", "products", f"{data}/eval.jsonl",
                        f"--rollout-seed={seed}", f"--run-dir={folder}/run"], check=True, stdout=subprocess.DEVNULL)
        events = list(read(Path(folder) / "run" / "events.jsonl"))
    return ([event["metrics"]["eval/products"] for event in events if event["event"] == "eval"],
            [event["metrics"] for event in events if event["event"] == "metrics"])


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=Path("runs/calculator"))
    args = parser.parse_args()
    print("| seed | greedy before | after | sampled reward, first rollout | last | calls per sample, first | last | "
          "tool seconds per call | training s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for seed in range(args.seeds):
        accuracy, steps = one(args.data, seed)
        reward, calls = ([step[f"rollout/{name}"] for step in steps] for name in ("raw_reward", "tool_calls"))
        seconds = sum(step["rollout/tool_time"] for step in steps) / sum(calls)
        print(f"| {seed} | {accuracy[0]:.3f} | {accuracy[-1]:.3f} | {reward[0]:.3f} | {reward[-1]:.3f} | "
              f"{calls[0]:.2f} | {calls[-1]:.2f} | {seconds:.4f} | {sum(s['perf/step_time'] for s in steps):.0f} |",
              flush=True)


if __name__ == "__main__":
    main()
