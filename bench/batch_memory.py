"""What a rollout with the routes of a mixture costs the ranks of a trainer: memory, and seconds of taking it.

    python bench/batch_memory.py                                  # DP 2 and 4, 48 layers x 8; a Markdown table in MB
    python bench/batch_memory.py --data 2 --samples 8 --tokens 64

Real trainers of a tiny model over gloo, the same rollout taken in two ways: "sent to each" pickles the batch into the
pipe of every rank; "shared" is what `miles run` does. Each rank then packs the micro-batches of its share,
which is all that a step reads of a batch, and the first gives the batch back. Memory is that of the rank with the most,
over what it had before the batch: private to it, and those pages of the shared memory that it has mapped.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.hosts import ProcessHost, RankGroup, meeting_folder
from miles_core.messages import Message, pickled
from miles_core.types import Batch, Group, Prompt, Rank, Sample, Status

LAYERS, TOPK = 48, 8
MB = 10**6
PLUGIN = '''"""A column of routes, which nothing replays."""

from miles_core import hookimpl
from miles_core.columns import Align, Column


class Routes:
    @hookimpl
    def columns(self):
        return [Column("routes", Align.PREDICTION, "int16", axes=("layer", "topk"), pad=-1, owner="routes")]
'''


class Copying(ProcessHost):
    """Everything through its own pipe, arrays as well."""

    def pack(self, args: tuple[object, ...]) -> Any:
        return args

    def _ask(self, method: str, args: Any) -> Any:
        return super()._ask(method, Message(args, lambda content, _: pickled(content, lambda one: True)))


class Trainer:
    """Lives in each rank."""

    def __init__(self, selected: Any, config: Any, rank: Rank):
        from miles_core.build import trainer_part

        self.rank, self.trainer = rank, trainer_part(selected, config, rank)
        self.trainer.load()

    def take_batch(self, batch: Batch) -> None:
        self.trainer.take_batch(batch)

    def read(self) -> None:
        """Pack the share of this rank, micro-batch after micro-batch."""
        from miles_megatron.microbatch import assemble

        for part in self.trainer.micro_batches(self.trainer.part(0)):
            assemble(self.trainer.columns, part)

    def end_batch(self) -> Batch | None:
        return self.trainer.end_batch()

    def begin(self) -> None:
        """What was left on the heap is not the next batch's; the high-water mark begins anew."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")

    def figures(self) -> dict[int, dict[str, float]]:
        """Bytes and CPU seconds of this process."""
        rollup = _fields("/proc/self/smaps_rollup")
        private = rollup["Private_Clean"] + rollup["Private_Dirty"]
        return {self.rank.index: {"private": private, "resident": rollup["Rss"], "shared": rollup["Rss"] - private,
                                  "peak": _fields("/proc/self/status")["VmHWM"], "cpu": time.process_time()}}


def _fields(path: str) -> dict[str, int]:
    """The sizes in a file of the kernel's, in bytes."""
    words = (line.split() for line in Path(path).read_text().splitlines() if line.endswith("kB"))
    return {one[0].rstrip(":"): 1024 * int(one[1]) for one in words}


def rollout(samples: int, tokens: int) -> Batch:
    """Groups of four answers of `tokens` tokens each, with routes."""
    draw = np.random.default_rng(0)

    def sample(prompt: Prompt, index: int) -> Sample:
        response = tokens - len(prompt.token_ids)
        return Sample(prompt, index, {
            "tokens": draw.integers(0, 256, tokens).astype(np.int32), "loss_mask": np.ones(response, np.uint8),
            "rollout_log_probs": -draw.random(response).astype(np.float32), "versions": np.ones(response, np.int32),
            "routes": draw.integers(0, 128, (tokens - 1, LAYERS, TOPK), np.int16),
        }, response, status=Status.COMPLETED, reward=float(index))  # fmt: skip

    prompts = [Prompt(uid, uid, "", tuple(range(8))) for uid in range(samples // 4)]
    return Batch(0, [Group(prompt, [sample(prompt, index) for index in range(4)]) for prompt in prompts])


async def measure(host: type[ProcessHost], plan: Any, data: int, batches: list[Batch]) -> dict[str, float]:
    """One way of sending, after a first batch for what is only done once."""
    meeting = meeting_folder()
    group = RankGroup("trainer", [
        host(f"trainer rank {i}", Trainer, plan.selected, plan.config, Rank(i, data, i, f"file://{meeting.name}/ranks"))
        for i in range(data)], meeting.cleanup)
    group.timeout = 600
    try:
        for batch in batches:
            await group.begin()
            before, driver, begin = await group.figures(), time.process_time(), time.perf_counter()
            await group.take_batch(batch)
            taken, after, driver = time.perf_counter() - begin, await group.figures(), time.process_time() - driver
            await group.read()
            read = await group.figures()
            begin = time.perf_counter()
            back = await group.end_batch()
            given = time.perf_counter() - begin
            if any(not np.array_equal(a.columns["routes"], b.columns["routes"])
                   for a, b in zip(batch.samples, back.samples, strict=True)):
                raise SystemExit("the batch that came back is not the one that was sent")
        return {"seconds": taken, "given": given,
                "cpu": driver + sum(after[i]["cpu"] - before[i]["cpu"] for i in before),
                "peak": max(read[i]["peak"] - before[i]["resident"] for i in before),
                **{f"{key} {when}": max(now[i][key] - before[i][key] for i in before)
                   for when, now in (("taken", after), ("read", read)) for key in ("private", "shared")}}
    finally:
        await group.close()


def plan_of(folder: Path, data: int, samples: int, tokens: int) -> Any:
    """A run of a tiny model with the column, on `data` ranks."""
    from miles_testing.tiny import tiny_checkpoint

    from miles_core.plugins.plan import prepare

    (folder / "routes.py").write_text(PLUGIN)
    model = tiny_checkpoint(folder / "model") if not (folder / "model").exists() else folder / "model"
    return prepare(None, [
        "--hf-checkpoint", str(model), "--prompt-data", "data/none.jsonl", "--num-rollout", "1",
        "--plugin", str(folder / "routes.py"), "--plugin", "grpo", "--rollout-batch-size", str(samples // 4),
        "--n-samples-per-prompt", "4", "--rollout-max-response-len", "64", "--no-bf16", "--use-dynamic-batch-size",
        "--max-tokens-per-gpu", str(2 * tokens), "--trainer-host", "process", "--actor-num-gpus-per-node", str(data),
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=int, nargs="*", default=[2, 4], help="Data-parallel ranks.")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048, help="Of each sample.")
    parsed = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    batch = rollout(parsed.samples, parsed.tokens)
    routes = sum(sample.columns["routes"].nbytes for sample in batch.samples)
    print(f"{parsed.samples} samples of {parsed.tokens} tokens, {LAYERS} layers x {TOPK}: {routes / MB:.0f} MB of it")
    heads = ("DP", "batch", "private, taken", "private, share packed", "shared and mapped", "peak", "take_batch, CPU s",
             "wall s", "end_batch, wall s")
    print(f"\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    with tempfile.TemporaryDirectory() as folder:
        for data in parsed.data:
            plan = plan_of(Path(folder), data, parsed.samples, parsed.tokens)
            for name, host in (("sent to each", Copying), ("shared", ProcessHost)):
                got = asyncio.run(measure(host, plan, data, [rollout(4 * data, 16), batch]))
                print(f"| {data} | {name} | {got['private taken'] / MB:.0f} | {got['private read'] / MB:.0f} | "
                      f"{got['shared read'] / MB:.0f} | {got['peak'] / MB:.0f} | {got['cpu']:.2f} | "
                      f"{got['seconds']:.2f} | {got['given']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
