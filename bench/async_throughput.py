"""What sampling ahead of training brings where answers differ a lot in length, and whether it prefers short ones.

    python bench/async_throughput.py                 five minutes; Markdown tables

The shipped loop with an engine and a trainer that sleep in threads of their own (bench/sleeping.py): lengths are
Pareto's, so that one answer of a batch takes as long as many. Each side is also run alone, in the same process:
sampling with nothing to wait for, and training with batches at hand; the slower of the two is what any schedule
is bound by. Then the lengths that were trained on, with all answers in flight decoding at once, are compared with
lengths that were only drawn (Kolmogorov and Smirnov). A buffer that takes what finishes first and drops the rest has
to fail.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent))

from miles_testing.distributions import kolmogorov_smirnov
from sleeping import tokens  # beside this file

from miles_core import build as built
from miles_core import rng
from miles_core.loop import train
from miles_core.plugins.plan import prepare
from miles_core.record.console import Console
from miles_core.record.directory import RunDirectory
from miles_core.record.journal import Journal
from miles_core.stages.buffer import Buffer, Taken

GROUPS, ANSWERS, MOST = 32, 2, 240
SCHEDULES = ((0, "started"), (1, "started"), (2, "started"), (2, "window"), (4, "started"), (4, "window"))
MODEL = Path(__file__).parents[1] / "examples/arithmetic"
FLAGS = [
    "--plugin", Path(__file__).with_name("sleeping.py"), "--engine", "sleeping", "--train-backend", "sleeping",
    "--hf-checkpoint", MODEL / "tiny-qwen3", "--prompt-data", MODEL / "train.jsonl", "--input-key", "prompt",
    "--label-key", "label", "--apply-chat-template", "--rm-type", "length", "--rollout-batch-size", GROUPS,
    "--n-samples-per-prompt", ANSWERS, "--rollout-max-response-len", MOST, "--use-dynamic-batch-size",
    "--max-tokens-per-gpu", "4096",
]  # fmt: skip


class FinishOrder(Buffer):
    """The control: takes what finished first, and drops what has not."""

    def _cut(self):
        done = [slot for slot in self._slots if slot.outcome is not None]
        if len(done) < self.batch_size:
            return None
        return Taken([slot.outcome for slot in done[: self.batch_size]]), done[self.batch_size :]

    async def take(self):
        before = self._slots
        taken = await super().take()
        for slot in set(before) - set(self._slots):
            slot.task.cancel()
        return taken


class Course:
    """One run: its seconds from the first request to the last step, and the lengths that it was trained on."""

    def __init__(self, rollouts: int, *argv: str, buffer: type[Buffer] = Buffer):
        self.seconds, self.lengths = 0.0, []
        with tempfile.TemporaryDirectory() as folder:
            plan = prepare(None, [*map(str, FLAGS), "--run-dir", folder, "--num-rollout", str(rollouts), *argv])
            built.Buffer, kept = buffer, built.Buffer
            try:
                asyncio.run(self._drive(plan))
            finally:
                built.Buffer = kept

    @property
    def rate(self) -> float:
        """Answers a second."""
        return len(self.lengths) / self.seconds

    async def _drive(self, plan) -> None:
        found = built.parts(plan)
        with open(os.devnull, "w") as silent:
            journal = Journal(RunDirectory(plan.config.checkpoint.run_dir).acquire(), Console(False, silent),
                              decode_piece=found.decode_piece)
            run = await built.build(plan, found, journal)
            finish = run.finish

            async def finished(batch) -> None:
                self.seconds = time.perf_counter() - begin
                self.lengths += [sample.response_length for sample in batch.samples]
                await finish(batch)

            run.finish, begin = finished, time.perf_counter()
            await train(run)
            await run.engine.stop()
            await run.trainer.close()


def alone(rollouts: int) -> tuple[float, float]:
    """Answers a second of each side by itself: sampling, training."""
    return (Course(rollouts, "--train-seconds", "0", "--max-lag", str(rollouts)).rate,
            Course(rollouts, "--token-seconds", "0", "--max-lag", str(rollouts)).rate)


def drawn(count: int) -> list[int]:
    """Lengths of prompts that no run comes to."""
    return [tokens(rng.key(42, "train", uid, index, 0), MOST)
            for uid in range(10**6, 10**6 + count // ANSWERS) for index in range(ANSWERS)]


def main() -> int:
    """Measure and print; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=40)
    rollouts = parser.parse_args().rollouts
    before = alone(rollouts)
    rates = {(lag, order): Course(rollouts, "--max-lag", str(lag), "--batch-order", order).rate
             for lag, order in SCHEDULES}
    after = alone(rollouts)
    sampling, training = (sum(pair) / 2 for pair in zip(before, after, strict=True))
    bound, reference = min(sampling, training), drawn(4096)
    print(f"sampling alone: {sampling:.0f} answers a second ({before[0]:.0f} before all else, {after[0]:.0f} after); "
          f"training alone: {training:.0f} ({before[1]:.0f}, {after[1]:.0f})\n")
    print("| max_lag | order | answers/s | of sync | of the bound |\n|---|---|---|---|---|")
    for (lag, order), rate in rates.items():
        print(f"| {lag} | {order} | {rate:.0f} | {rate / rates[SCHEDULES[0]]:.2f} | {rate / bound:.0%} |", flush=True)
    print("\n| batches of | mean length | longest | KS distance | p |\n|---|---|---|---|---|")
    chances = {}
    for order, buffer in (("started", Buffer), ("window", Buffer), ("finished first", FinishOrder)):
        flags = () if buffer is FinishOrder else ("--batch-order", order)
        lanes = str(2 * GROUPS * ANSWERS)
        quick = ("--max-lag", "1", "--lanes", lanes, "--train-seconds", "0.05")
        lengths = Course(rollouts, *quick, *flags, buffer=buffer).lengths
        distance, chances[order] = kolmogorov_smirnov(lengths, reference)
        print(f"| {order} | {sum(lengths) / len(lengths):.1f} | {max(lengths)} | {distance:.3f} | "
              f"{chances[order]:.2g} |", flush=True)
    best = max(rate for (lag, _), rate in rates.items() if lag == 4)
    good = (best >= 1.8 * rates[SCHEDULES[0]] and best >= 0.9 * bound and chances["finished first"] < 0.05
            and min(chances["started"], chances["window"]) > 0.05)
    print(f"\nmean length of {len(reference)} answers that were only drawn: {sum(reference) / len(reference):.1f}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
