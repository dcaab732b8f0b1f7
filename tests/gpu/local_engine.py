"""The local engine on a GPU: speed beside transformers' generate, distance of its log-probs, repetition, whole runs.

    python tests/gpu/local_engine.py                        everything
    python tests/gpu/local_engine.py --parts speed runs     some of: speed, log-probs, families, contract, runs
    python tests/gpu/local_engine.py --tiny                 the same code on a CPU, with small shapes

Weights are random and made here. Speed: 64 requests of 64 tokens, 256 new ones each, in bf16, beside generate with the
same batch; the first rollout, which captures the graphs, is told apart. Log-probs: the mean distance to a float32
forward of the same weights, of the engine and of transformers' own bf16 forward. Families: every fast family and some
that go through transformers, in float32 against a full forward. Contract: what every engine has to keep, with aborts,
pauses, updates and released memory. Runs: examples/demo.toml on one GPU that engine and
trainer share, with and without --colocate. The exit status is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from demo import demo
from miles_local.engine import LocalEngine
from miles_testing.engines import engine_contract
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache

from miles_core.stages.rollout import Request, Response, SamplingParams

PARTS = ("speed", "log-probs", "families", "contract", "runs")
NO_IDS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
SHAPES = {
    "qwen3-0.6b": {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936},
    "smollm2-135m": {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
                     "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152},
}  # fmt: skip
SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 32, "intermediate_size": 256, "vocab_size": 512}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES = {
    "qwen3": {}, "gemma2": {"sliding_window": 16}, "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 16}, "qwen2": {}, "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "qwen3_next": {**EXPERTS, "shared_expert_intermediate_size": 64, "linear_num_key_heads": 2,
                   "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
                   "layer_types": ["linear_attention", "full_attention"]},
}  # fmt: skip
FASTER, NEARER, GAP = 5.0, 1.2, 0.02
"""Bars: tokens/s over transformers', distance over transformers' own, mean log-prob difference of a step of a run."""


def model_of(shape: dict, folder: Path, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """Write a checkpoint of random weights; returns transformers' model of it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{"max_position_embeddings": 2048, "initializer_range": 0.04,
                                     "tie_word_embeddings": True, **NO_IDS, **shape})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.update(**NO_IDS)
    model.save_pretrained(folder)
    return model


def prompts_of(count: int, length: int, vocab: int) -> torch.Tensor:
    """[count, length] random ids."""
    return torch.randint(0, vocab, (count, length), generator=torch.Generator().manual_seed(1))


async def rollouts(folder: Path, prompts: torch.Tensor, new: int, times: int, device: str, dtype: torch.dtype,
                   graphs: bool = True) -> tuple[list[list[Response]], list[float]]:
    """The same requests several times: answers and seconds."""
    engine = LocalEngine(folder, dtype=dtype, device=device, max_batch=len(prompts),
                         max_context=prompts.shape[1] + new + 1)
    await engine.start()
    if not graphs and (own := getattr(engine._decoder, "graphs", None)) is not None:
        own.failed = True
    answers, seconds = [], []
    for _ in range(times):
        begin = time.perf_counter()
        answers.append(await asyncio.gather(*(
            engine.generate(Request(f"{index}", tuple(ids), SamplingParams(max_new_tokens=new, ignore_eos=True),
                                    key=index))
            for index, ids in enumerate(prompts.tolist()))))  # fmt: skip
        seconds.append(time.perf_counter() - begin)
    failed = getattr(getattr(engine._decoder, "graphs", None), "failed", False)
    if graphs and failed:
        print("  graphs: capture failed, steps ran kernel by kernel")
    await engine.stop()
    return answers, seconds


def equal(one: Sequence[Response], other: Sequence[Response]) -> bool:
    """The same tokens with the same bits of their log-probs."""
    return all(a.output_ids.tolist() == b.output_ids.tolist() and (a.log_probs == b.log_probs).all()
               for a, b in zip(one, other, strict=True))


def speed(name: str, model: PreTrainedModel, folder: Path, args: argparse.Namespace) -> bool:
    """Tokens per second of both; two rollouts of ours are equal."""
    count, length, new = (4, 8, 8) if args.tiny else (64, 64, 256)
    prompts = prompts_of(count, length, model.config.vocab_size)
    answers, seconds = asyncio.run(rollouts(folder, prompts, new, 3, args.device, torch.bfloat16))
    again, _ = asyncio.run(rollouts(folder, prompts, new, 1, args.device, torch.bfloat16))
    _, plain = asyncio.run(rollouts(folder, prompts, new, 2, args.device, torch.bfloat16, graphs=False))
    given = prompts.to(args.device)
    theirs = []
    for tokens in (4, new):
        begin = time.perf_counter()
        out = model.generate(given, attention_mask=torch.ones_like(given), do_sample=True, top_k=0, top_p=1.0,
                             temperature=1.0, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0)
        out.cpu()
        theirs.append(time.perf_counter() - begin)
    total = count * new
    ratio = theirs[1] / min(seconds[1:])
    repeats = equal(answers[0], answers[1]) and equal(answers[1], answers[2]) and equal(answers[0], again[0])
    print(f"{name}: {count} requests x {new} tokens, bf16: engine {total / min(seconds[1:]):,.0f} tokens/s "
          f"({total / seconds[0]:,.0f} in the first rollout, {total / min(plain):,.0f} without graphs), "
          f"generate {total / theirs[1]:,.0f}: {ratio:.1f} times; {min(seconds[1:]) / new * 1e3:.2f} ms a step; "
          f"{'equal' if repeats else 'UNEQUAL'} when repeated", flush=True)
    return repeats and (args.tiny or ratio >= FASTER)


@torch.inference_mode()
def scores(model: PreTrainedModel, prompts: torch.Tensor, answers: Sequence[Response]) -> list[torch.Tensor]:
    """Log-probs of every answer's tokens by full forwards, float32."""
    result = []
    for ids, answer in zip(prompts, answers, strict=True):
        whole = torch.cat((ids, torch.from_numpy(answer.output_ids).long())).to(model.device)
        logits = model(whole[None], use_cache=False).logits[0, len(ids) - 1 : -1].float()
        result.append(torch.log_softmax(logits, -1).gather(1, whole[len(ids):, None])[:, 0].cpu())
    return result


def distance(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Mean and largest absolute difference."""
    gaps = (torch.cat(list(one)) - torch.cat(list(other))).abs()
    return float(gaps.mean()), float(gaps.max())


def log_probs(name: str, model: PreTrainedModel, folder: Path, args: argparse.Namespace) -> bool:
    """bf16 is as near to float32 as transformers' bf16; float32 is transformers' float32."""
    count, length, new = (2, 8, 8) if args.tiny else (16, 64, 256)
    prompts = prompts_of(count, length, model.config.vocab_size)
    low = asyncio.run(rollouts(folder, prompts, new, 1, args.device, torch.bfloat16))[0][0]
    wide = asyncio.run(rollouts(folder, prompts, new, 1, args.device, torch.float32))[0][0]
    theirs = scores(model, prompts, low)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(args.device).eval()
    truth = scores(exact, prompts, low)
    mine, own = distance([torch.from_numpy(one.log_probs) for one in low], truth), distance(theirs, truth)
    full = distance([torch.from_numpy(one.log_probs) for one in wide], scores(exact, prompts, wide))
    print(f"{name}: distance of log-probs to float32, mean (largest): engine bf16 {mine[0]:.2e} ({mine[1]:.2e}), "
          f"transformers bf16 {own[0]:.2e} ({own[1]:.2e}), engine float32 {full[0]:.2e} ({full[1]:.2e})", flush=True)
    return mine[0] <= NEARER * own[0] and full[1] <= 1e-3


def families(folder: Path, args: argparse.Namespace) -> bool:
    """Every family decodes on the device, in float32 as a full forward says, in bf16 at all."""
    well = []
    for kind, more in list(FAMILIES.items())[: 2 if args.tiny else None]:
        if kind == "qwen3_next" and not hasattr(Cache, "get_conv_state"):
            print(f"{kind}: left out, this transformers keeps states elsewhere")
            continue
        shape = {"model_type": kind, **SMALL, **more}
        model = model_of(shape, folder / kind, args.device, torch.float32)
        prompts = prompts_of(5, 24, SMALL["vocab_size"])
        answers = asyncio.run(rollouts(folder / kind, prompts, 24, 1, args.device, torch.float32))[0][0]
        model.set_attn_implementation("eager")
        gap = distance([torch.from_numpy(one.log_probs) for one in answers], scores(model, prompts, answers))
        asyncio.run(rollouts(folder / kind, prompts, 24, 1, args.device, torch.bfloat16))
        print(f"{kind}: log-probs in float32 differ by at most {gap[1]:.1e}", flush=True)
        well.append(gap[1] <= 1e-3)
    return all(well)


def contract(folder: Path, args: argparse.Namespace) -> bool:
    """The kit for engines in bf16; then memory that is released, and an update that brings the weights again."""
    model = model_of({"model_type": "qwen3", **SMALL}, folder, args.device, torch.float32)

    def scaled(version: int) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor * (1 + 0.1 * version)) for name, tensor in model.named_parameters()]

    def made() -> LocalEngine:
        return LocalEngine(folder, dtype=torch.bfloat16, device=args.device, random_init=True)

    engine_contract(made, scaled, vocabulary=SMALL["vocab_size"], exact=False)

    async def handed_over() -> tuple[Response, Response, int]:
        engine, asked = made(), Request("one", (1, 2, 3), SamplingParams(max_new_tokens=16, ignore_eos=True), key=5)
        await engine.start()
        await engine.update_weights(scaled(1), 1)
        before = await engine.generate(asked)
        await engine.release(("kv_cache", "weights", "cuda_graph"))
        left = torch.cuda.memory_allocated() if args.device == "cuda" else 0
        await engine.occupy(("weights",))
        await engine.update_weights(scaled(1), 2)
        await engine.occupy(("kv_cache", "cuda_graph"))
        after = await engine.generate(asked)
        await engine.stop()
        return before, after, left

    before, after, left = asyncio.run(handed_over())
    again = equal([before], [after])
    print(f"contract: kept; released, {left / 2**20:.0f} MiB stay allocated, the answer afterwards is "
          f"{'equal' if again else 'UNEQUAL'}", flush=True)
    return again


def run(name: str, folder: Path, flags: Sequence[str]) -> bool:
    """examples/demo.toml with these flags; whether it went well."""
    begin = time.perf_counter()
    outcome = demo(name, folder, ["--engine", "local", *flags], 300)
    seconds = time.perf_counter() - begin
    if outcome is None:
        return False
    events, printed = outcome
    steps = [event["metrics"] for event in events if event["event"] == "metrics"]
    accuracy = [round(event["metrics"]["eval/sums"], 3) for event in events if event["event"] == "eval"]
    gaps = [step["train/train_rollout_logprob_abs_diff"] for step in steps]
    lines = [line for line in printed.splitlines() if "engine local" in line or "graphs" in line]
    warm = steps[1:] or steps
    mean = {key: sum(step[f"perf/{key}_time"] for step in warm) / len(warm)
            for key in ("rollout", "step") if f"perf/{key}_time" in steps[-1]}
    print(f"{name}: {len(steps)} rollouts in {seconds:.0f} s {({k: round(v, 2) for k, v in mean.items()})}; "
          f"accuracy {accuracy}; mean log-prob difference {min(gaps):.1e} to {max(gaps):.1e}; {lines[:3]}", flush=True)
    return max(gaps) <= GAP and accuracy[-1] >= accuracy[0]


def went_well(check: Callable[..., bool], *args: object) -> bool:
    """Whether it did; one that fails is printed and keeps nobody else from running."""
    try:
        return check(*args)
    except Exception:  # noqa: BLE001
        traceback.print_exc(file=sys.stdout)
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="on a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = parser.parse_args()
    args.device = "cpu" if args.tiny else "cuda"
    well: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in args.shapes if {"speed", "log-probs"} & {*args.parts} else ():
            shape = {**SHAPES[name], **(SMALL if args.tiny else {})}
            model = model_of(shape, folder / name, args.device, torch.bfloat16)
            for part, check in (("speed", speed), ("log-probs", log_probs)):
                if part in args.parts:
                    well[f"{name} {part}"] = went_well(check, name, model, folder / name, args)
            del model
        if "families" in args.parts:
            well["families"] = went_well(families, folder, args)
        if "contract" in args.parts:
            well["contract"] = went_well(contract, folder / "contract", args)
        if "runs" in args.parts:
            flags = ["--num-rollout", "1"] if args.tiny else ["--bf16"]
            for name, more in (("shared GPU", []), ("taking turns", ["--colocate"])):
                words = ["--engine-device", args.device, *flags, *more]
                well[name] = went_well(run, name, folder / name.replace(" ", "-"), words)
    print({name: "well" if good else "NOT WELL" for name, good in well.items()})
    return 0 if all(well.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
