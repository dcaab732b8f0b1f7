"""Miles on a workload, step by step: the same protocol as trl_grpo.py.

The shipped loop runs; only the moment between a weight sync and the return of the buffer's room waits for a line on
standard input, so that a step is exactly one generation, one update and one sync, with nothing left running in between.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import TextIO

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent))

from metering import JsonLines, cpu_seconds, peak_rss_mib  # beside this file
from workloads import THRESHOLD, WORKLOADS, Workload

REWARD = '''
from miles_core import hookimpl


class Share:
    """The mean token id as a fraction of the vocabulary, or a verdict over it."""

    @hookimpl("reward", name="share")
    def share(self, sample):
        share = float(sample.tokens[-sample.response_length:].mean()) / {vocabulary}
        return float(share > {threshold}) if {verdict} else share
'''

MAX_TOKENS = {"large": 640, "small": 768}
"""Whole sequences of a micro-batch: 8 of large's 256, all of small's 16. README.md has the figures."""


def flags(workload: Workload, model: Path, folder: Path, arguments: argparse.Namespace) -> list[str]:
    """The run as a command line."""
    plugin = folder / "share.py"
    plugin.write_text(REWARD.format(vocabulary=workload.vocabulary, threshold=THRESHOLD, verdict=arguments.verdict))
    words = f"""--plugin {plugin} --hf-checkpoint {model} --prompt-data {model}/prompts.jsonl --input-key prompt
        --rm-type share --run-dir {folder}/run --num-rollout {arguments.warmup + arguments.steps}
        --rollout-batch-size {workload.prompts_per_step} --n-samples-per-prompt {workload.samples_per_prompt}
        --rollout-max-response-len {workload.response_tokens} --rollout-ignore-eos --no-bf16 --lr 1e-6
        --adam-beta2 0.999 --clip-grad 1.0 --use-dynamic-batch-size --max-tokens-per-gpu {arguments.max_tokens}
        --threads {arguments.threads} --engine-max-batch 256"""
    if arguments.beta:
        words += f" --use-kl-loss --kl-loss-coef {arguments.beta} --kl-loss-type k3"
    if arguments.skip_old:
        words += " --skip-actor-forward-only"
    if arguments.skip_zero:
        words += " --skip-zero-advantages"
    return words.split()


def prefill_alone() -> None:
    """Have the engine compute every request's prompt anew, as if nothing were shared."""
    from miles_local import batch

    def each(seqs):
        for seq in seqs:
            yield [seq.context], [seq]

    batch.Batch._join, batch._portions = lambda self, seqs: list(seqs), each


async def serve(arguments: argparse.Namespace, plan, lines: JsonLines, silent: TextIO) -> None:
    """Drive the shipped loop, one step per line of standard input; the console goes to `silent`."""
    import torch

    from miles_core.build import build, parts
    from miles_core.loop import train
    from miles_core.record.console import Console
    from miles_core.record.directory import RunDirectory
    from miles_core.record.journal import Journal

    torch.set_num_threads(arguments.threads)
    if not arguments.share_prefill:
        prefill_alone()
    found = parts(plan)
    journal = Journal(RunDirectory(plan.config.checkpoint.run_dir).acquire(), Console(False, silent),
                      decode_piece=found.decode_piece)
    run = await build(plan, found, journal)
    release, done, mark = run.buffer.release, 0, 0.0

    def gate() -> None:
        nonlocal done, mark
        done += 1
        now = cpu_seconds()
        if done == 1:
            gate.first = now
        if done > arguments.warmup:
            lines.write({"step": done - arguments.warmup, "cpu_s": now - mark, "peak_rss_mib": peak_rss_mib(),
                         "skipped": run.metrics.get("train/skipped_samples", 0.0),
                         **{key: round(value, 4) for key, value in run.metrics.items() if key.startswith("perf/")}})
        elif done == arguments.warmup:
            lines.write({"ready": True, "framework": "miles", "cpu_s_start_to_first_step": gate.first,
                         "config": vars(arguments)})
        if done >= arguments.warmup and not sys.stdin.readline():
            raise SystemExit
        mark = cpu_seconds()
        release()

    run.buffer.release = gate
    await train(run)


def main() -> None:
    """Parse, plan, serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, help="packed tokens per forward/backward (default: MAX_TOKENS)")
    parser.add_argument("--skip-old", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--verdict", action="store_true", help="rewards of 0 and 1 (workloads.reward)")
    parser.add_argument("--skip-zero", action=argparse.BooleanOptionalAction, default=True,
                        help="leave samples without advantage out of the step")
    parser.add_argument("--share-prefill", action=argparse.BooleanOptionalAction, default=True,
                        help="prefill a prompt once for its group")
    parser.add_argument("--interactive", action="store_true")
    arguments = parser.parse_args()
    arguments.max_tokens = arguments.max_tokens or MAX_TOKENS[arguments.workload]
    lines = JsonLines()
    from miles_core.plugins.plan import prepare

    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as silent:
        plan = prepare(None, flags(WORKLOADS[arguments.workload], arguments.model.resolve(), Path(folder), arguments))
        arguments.model = str(arguments.model)
        try:
            asyncio.run(serve(arguments, plan, lines, silent))
        except SystemExit:
            lines.write({"done": True, "peak_rss_mib": peak_rss_mib()})


if __name__ == "__main__":
    main()
