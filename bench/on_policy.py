"""What --true-on-policy-mode costs: CPU seconds of a demo step with it, without it, and with attention by SDPA.

    python bench/on_policy.py --rounds 8             # a Markdown table

By default the trainer has the engine's order of operations where that is cheap, with the flag everywhere, and
compares. `sdpa` takes torch's fused attention in the trainer, as longer sequences do by default. One run of
examples/demo.toml, or of another run file, whose rollouts take the three ways in turn: sampling, scoring, log-probs,
training and sync of each are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent / "peers"))

from metering import cpu_seconds  # beside peers' other files
from miles_megatron import attention, forward_backward, on_policy, step

from miles_core.build import build, parts
from miles_core.loop import train
from miles_core.plugins.plan import Plan, prepare
from miles_core.record.console import Console
from miles_core.record.directory import RunDirectory
from miles_core.record.journal import Journal

WAYS = {"true_on_policy_mode": (attention.EXACT_KEYS, step.check_equal, on_policy.engine_order),
        "default": (attention.EXACT_KEYS, lambda *_: None, nullcontext),
        "sdpa": (0, lambda *_: None, nullcontext)}  # fmt: skip


class Meter:
    """Counts each rollout, from one return of the buffer's room to the next, and sets the way of the one to come."""

    def __init__(self, run):
        self.run, self._release, self.mark = run, run.buffer.release, 0.0
        self.seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        self.gaps = dict.fromkeys(WAYS, 0.0)
        self.order: list[str] = []
        self._next()
        run.buffer.release = self

    def __call__(self) -> None:
        """Stands in for the buffer's release: all is synced, and nothing samples."""
        now = cpu_seconds()
        self.seconds[self.way].append(now - self.mark)
        gap = self.run.metrics["train/train_rollout_logprob_abs_diff_max"]
        self.gaps[self.way] = max(self.gaps[self.way], gap)
        self._next()
        self.mark = cpu_seconds()
        self._release()

    def _next(self) -> None:
        self.order = self.order or [*WAYS, *reversed(WAYS)]
        self.way = self.order.pop(0)
        attention.EXACT_KEYS, step.check_equal, forward_backward.engine_order = WAYS[self.way]


async def measure(plan: Plan) -> Meter:
    """Drive the shipped loop."""
    found = parts(plan)
    with open(os.devnull, "w") as silent:
        journal = Journal(RunDirectory(plan.config.checkpoint.run_dir).acquire(), Console(False, silent),
                          decode_piece=found.decode_piece)
        run = await build(plan, found, journal)
        meter = Meter(run)
        await train(run)
    return meter


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="of six rollouts; the first warms up")
    parser.add_argument("--recipe", type=Path, default=Path("examples/demo.toml"))
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="for the run; come last")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = prepare(args.recipe, [
            "--run-dir", folder, "--num-rollout", str(6 * (args.rounds + 1)), "--true-on-policy-mode",
            "--eval-interval", "1000", "--skip-eval-before-train", "--save-interval", "1000", *args.flags,
        ])  # fmt: skip
        meter = asyncio.run(measure(plan))
    medians = {way: statistics.median(seconds[2:]) for way, seconds in meter.seconds.items()}
    print("| way | CPU s per step | of sdpa | largest difference of log-probs |\n|---|---|---|---|")
    for way, median in medians.items():
        print(f"| {way} | {median:.3f} | {median / medians['sdpa']:.2f} | {meter.gaps[way]:.1e} |")


if __name__ == "__main__":
    main()
