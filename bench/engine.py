"""The local engine alone: CPU seconds of one rollout, with and without what it shares, on one thread and on two.

    python bench/engine.py                           # demo, large and small; Markdown tables
    python bench/engine.py --workloads demo --rounds 9
    python bench/engine.py --steps                   # decode steps of several sizes, on one thread and on two
    python bench/engine.py --paths models/smollm2-135m-instruct   # the fast path beside transformers

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
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from miles_local import batch, decode, engine
from miles_local.batch import SequenceState
from miles_local.engine import LocalEngine
from miles_local.modules import ModuleDecoder
from miles_local.weights import ModelShape
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

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
    batch.Batch._join = JOIN if way == "shared" else lambda self, seqs: seqs
    batch._portions = PORTIONS if way != "alone" else each
    engine.SMALL_LAYER = SMALL if threads == 1 else 0
    torch.set_num_threads(threads)


def each(seqs: list[SequenceState]) -> Iterator[tuple[list[tuple[int, ...]], list[SequenceState]]]:
    """What batch._portions gives when no two contexts are taken for one."""
    most = batch.PREFILL_TOKENS // batch.round_up(max((len(seq.context) for seq in seqs), default=1))
    for start in range(0, len(seqs), most):
        portion = seqs[start : start + most]
        yield [seq.context for seq in portion], portion


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


def steps(rows: int = 64, width: int = 64, seconds: float = 1.0) -> None:
    """Print the least wall milliseconds of a decode step by the size of a layer, on one thread and on two."""
    print(f"| weights of a layer | one thread, ms | two threads, ms | speed-up |  ({rows} rows)\n|---|---|---|---|")
    for hidden, heads, groups, dim, ffn in ((128, 4, 2, 32, 384), (256, 8, 4, 32, 768), (384, 8, 4, 48, 1152),
                                            (512, 8, 4, 64, 1536), (1024, 16, 8, 128, 3072)):
        shape = ModelShape(
            hidden=hidden, layers=4, heads=heads, kv_heads=groups, head_dim=dim, intermediate=ffn, vocab=512, eps=1e-6,
            tied=True, context=256, experts=0, topk=0, expert_intermediate=0, renormalise=False, sparse=frozenset(),
            qk_norm=True, qkv_bias=False, o_bias=False, mlp_bias=False, windows=(None,) * 4,
            inverse_frequencies=(1.0,) * (dim // 2), rope_scale=1.0, eos=frozenset(), init_std=0.02,
        )  # fmt: skip
        decoder = decode.Decoder(shape, 256, torch.float32)
        weights, cache, found = decoder.random(), decode.Cache(rows), []
        with torch.inference_mode():
            filled = decoder.prefill(weights, [tuple(range(width))])
            cache.reserve(rows, width + 1)
            cache.put(torch.arange(rows), torch.zeros(rows, dtype=torch.int64), filled)
            tokens, positions = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), width)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                marks = [time.perf_counter()]
                while marks[-1] - marks[0] < seconds:
                    decoder.step(weights, cache, tokens, positions)
                    marks.append(time.perf_counter())
                found.append(min(after - before for before, after in itertools.pairwise(marks)) * 1e3)
        one, two = found
        print(f"| {shape.layer_weights / 1e6:.2f} million | {one:.2f} | {two:.2f} | {one / two:.2f} |", flush=True)


async def greedy(folder: Path, dtype: torch.dtype, module: bool, prompts: list[list[int]], new: int):
    """The engine's ids and its CPU seconds, through its transformers module or as it would choose."""
    local = LocalEngine(folder, dtype=dtype)
    if module:
        local._decoder = ModuleDecoder(folder, dtype)
    await local.start()
    sampling = SamplingParams(max_new_tokens=new, min_new_tokens=new, temperature=0.0)
    begin = cpu_seconds()
    answers = await asyncio.gather(*(local.generate(Request(str(i), tuple(ids), sampling, key=i))
                                     for i, ids in enumerate(prompts)))
    seconds = cpu_seconds() - begin
    await local.stop()
    return [answer.output_ids.tolist() for answer in answers], seconds


@torch.inference_mode()
def generated(model, prompts: list[list[int]], new: int):
    """transformers' own, padded to the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(one)) + one for one in prompts])
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])
    begin = cpu_seconds()
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)
    return out[:, width:].tolist(), cpu_seconds() - begin


def taking_turns(folder: Path, dtype: torch.dtype, prompts: list[list[int]], new: int, rounds: int):
    """By way: [rounds] CPU seconds, and the ids."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ways = {"fast": lambda: asyncio.run(greedy(folder, dtype, False, prompts, new)),
            "module": lambda: asyncio.run(greedy(folder, dtype, True, prompts, new)),
            "generate": lambda: generated(model, prompts, new)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    ids = {}
    for round_ in range(rounds + 1):
        for name, way in ways.items():
            ids[name], took = way()
            if round_:  # the first one warms up
                seconds[name].append(took)
    return seconds, ids


def paths(folder: Path, rounds: int, new: int = 16) -> None:
    """Print greedy tokens per CPU second of the fast path, of the module and of transformers' generate."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True,
                                           tokenize=False) for text in QUESTIONS]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    print("| dtype | prompts | fast path | module | generate | fast / module | fast / generate |")
    print("|---|---|---|---|---|---|---|")
    same = []
    for dtype, count in itertools.product((torch.float32, torch.bfloat16), (1, len(prompts))):
        seconds, ids = taking_turns(folder, dtype, prompts[:count], new, rounds)
        fast, module, theirs = (count * new / statistics.median(seconds[name]) for name in seconds)
        same.append(sum(a == b for a, b in zip(ids["fast"], ids["generate"], strict=True)))
        print(f"| {str(dtype)[6:]} | {count} | {fast:.1f} | {module:.1f} | {theirs:.1f} | {fast / module:.2f} | "
              f"{fast / theirs:.2f} |", flush=True)
    print("answers of the fast path that are generate's, by row:", *same)


QUESTIONS = ("What is the capital of France?", "Write a haiku about rain.", "Why is the sky blue?", "Count to ten.",
             "Name three rivers of South America and one thing that each of them is known for.",
             "What is 12 times 12?", "Explain recursion to a child.", "Who wrote Hamlet, and when?")
JOIN, PORTIONS, SMALL = batch.Batch._join, batch._portions, engine.SMALL_LAYER


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workloads", nargs="+", default=["demo", "large", "small"])
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--paths", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.paths:
        return paths(arguments.paths, arguments.rounds)
    if arguments.steps:
        return steps()
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
