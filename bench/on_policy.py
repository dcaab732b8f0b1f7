"""What --true-on-policy-mode costs: CPU seconds of a demo step with it, without it, and with attention by SDPA.

    python bench/on_policy.py --rounds 5             # a Markdown table

The engine's order of operations is the trainer's by default, so the flag itself adds a comparison of two arrays. `sdpa`
takes torch's fused attention in the trainer, as longer sequences do. A step is the difference between a run of 2 and
one of 12 rollouts of examples/demo.toml over 10: sampling, scoring, log-probs, training, sync; the ways take turns.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from miles_core.record.events import read

RUN = """
import sys
from miles_core.backends.megatron import attention
from miles_core.cli import main
if sys.argv.pop(1) == "sdpa":
    attention.EXACT_KEYS = 0
main()
"""
WAYS = {
    "true_on_policy_mode": ("exact", ["--true-on-policy-mode"]),
    "default": ("exact", ["--rollout-max-context-len", "256"]),
    "sdpa": ("sdpa", ["--rollout-max-context-len", "256"]),
}
SHORT, LONG = 2, 12


def cost(way: str, rollouts: int) -> tuple[float, float]:
    """CPU seconds of a run, and its largest difference of log-probs."""
    attention, flags = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", RUN, attention, "run", "examples/demo.toml", "--no-live",
                        "--run-dir", folder, "--num-rollout", str(rollouts), "--eval-interval", "1000",
                        "--skip-eval-before-train", "--save-interval", "1000", *flags],
                       check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        steps = [event["metrics"] for event in read(Path(folder) / "events.jsonl") if event["event"] == "metrics"]
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, max(step["train/train_rollout_logprob_abs_diff_max"] for step in steps)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    gaps = dict.fromkeys(WAYS, 0.0)
    for turn in range(rounds):
        for way in list(WAYS)[:: 1 if turn % 2 else -1]:
            (short, _), (long, gap) = cost(way, SHORT), cost(way, LONG)
            seconds[way].append((long - short) / (LONG - SHORT))
            gaps[way] = max(gaps[way], gap)
    base = statistics.median(seconds["sdpa"])
    print("| way | CPU s per step | of sdpa | largest difference of log-probs |\n|---|---|---|---|")
    for way, values in seconds.items():
        print(f"| {way} | {statistics.median(values):.3f} | {statistics.median(values) / base:.2f} | {gaps[way]:.1e} |")


if __name__ == "__main__":
    main()
