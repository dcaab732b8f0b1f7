"""The local engine alone: CPU seconds of one rollout, with and without what it shares, on one thread and on two.

    python bench/engine.py                           # demo, large and small; Markdown tables
    python bench/engine.py --workloads demo --rounds 9

A rollout is all requests of one training step at once: the demo's 64 prompts x 8 answers (examples/demo.toml), the
workloads of bench/peers with random weights. Prompts are prefilled

    alone      for every request anew, as if nothing were shared
    together   once for the requests that are admitted in one go
    shared     as the engine does it: those that come later copy the keys and values of a running twin as well

The ways take turns, round by round; a figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config

from miles_core.backends.local import LocalEngine, batch, engine
from miles_core.backends.local.batch import Flight
from miles_core.stages.rollout import Request, SamplingParams

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent / "peers"))

from metering import cpu_seconds  # noqa: E402 - beside peers' other files
from workloads import WORKLOADS  # noqa: E402

WAYS = ("alone", "together", "shared")


@dataclass(frozen=True)
class Rollout:
    """What one step samples: a checkpoint, prompts, answers per prompt, how they are drawn."""

    folder: Path
    prompts: list[tuple[int, ...]]
    samples: int
    sampling: SamplingParams
    random_init: bool = False


def demo() -> Rollout:
    """The first 64 prompts of the demo."""
    folder = ROOT / "examples/arithmetic/tiny-qwen3"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with open(ROOT / "examples/arithmetic/train.jsonl") as lines:
        chats = [json.loads(line)["prompt"] for _, line in zip(range(64), lines)]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    prompts = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    return Rollout(folder, prompts, 8, SamplingParams(max_new_tokens=8))


def peer(name: str, folder: Path) -> Rollout:
    """A workload of bench/peers, with random weights and prompts of its length."""
    w = WORKLOADS[name]
    Qwen3Config(
        hidden_size=w.hidden, num_hidden_layers=w.layers, num_attention_heads=w.heads, head_dim=w.head_dim,
        num_key_value_heads=w.kv_heads, intermediate_size=w.intermediate, vocab_size=w.vocabulary,
        max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=None,
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    ids = torch.randint(0, w.vocabulary, (w.prompts_per_step, w.prompt_tokens))
    sampling = SamplingParams(max_new_tokens=w.response_tokens, ignore_eos=True)
    return Rollout(folder, [tuple(row) for row in ids.tolist()], w.samples_per_prompt, sampling, random_init=True)


def arrange(way: str, threads: int) -> None:
    """Make the engine share as much as `way` says, and decode on this many threads."""
    batch.Batch._join = JOIN if way == "shared" else lambda self, flights: flights
    batch._portions = PORTIONS if way != "alone" else each
    engine.SMALL_LAYER = 1 << 20 if threads == 1 else 0
    torch.set_num_threads(threads)


def each(flights: list[Flight]) -> Iterator[tuple[list[tuple[int, ...]], list[Flight]]]:
    """What batch._portions gives when no two contexts are taken for one."""
    most = batch.PREFILL_TOKENS // batch.round_up(max((len(flight.context) for flight in flights), default=1))
    for start in range(0, len(flights), most):
        portion = flights[start : start + most]
        yield [flight.context for flight in portion], portion


async def measure(rollout: Rollout, settings: list[tuple[str, int]], rounds: int) -> dict[tuple[str, int], float]:
    """Median CPU seconds of the rollout under each setting."""
    seconds: dict[tuple[str, int], list[float]] = {setting: [] for setting in settings}
    for round_ in range(rounds + 1):
        for setting in settings[:: 1 if round_ % 2 else -1]:
            arrange(*setting)
            local = LocalEngine(rollout.folder, random_init=rollout.random_init)
            await local.start()
            begin = cpu_seconds()
            await asyncio.gather(*(
                local.generate(Request(f"{index}-{sample}", prompt, rollout.sampling, key=1000 * index + sample))
                for index, prompt in enumerate(rollout.prompts) for sample in range(rollout.samples)
            ))  # fmt: skip
            if round_:  # the first one warms up
                seconds[setting].append(cpu_seconds() - begin)
            await local.stop()
    return {setting: statistics.median(values) for setting, values in seconds.items()}


JOIN, PORTIONS = batch.Batch._join, batch._portions


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workloads", nargs="+", default=["demo", "large", "small"])
    arguments = parser.parse_args()
    settings = [*((way, 1) for way in WAYS), ("shared", 2)]
    print("| rollout | requests | alone | together | shared | shared / alone | shared, two threads |")
    print("|---|---|---|---|---|---|---|")
    for name in arguments.workloads:
        with tempfile.TemporaryDirectory() as folder:
            rollout = demo() if name == "demo" else peer(name, Path(folder))
            found = asyncio.run(measure(rollout, settings, arguments.rounds))
        ratio = found["shared", 1] / found["alone", 1]
        print(f"| {name} | {len(rollout.prompts)} x {rollout.samples} | "
              + " | ".join(f"{found[way, 1]:.3f}" for way in WAYS)
              + f" | {ratio:.2f} | {found['shared', 2]:.3f} |", flush=True)


if __name__ == "__main__":
    main()
