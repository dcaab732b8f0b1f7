"""A model of 30B parameters on all GPUs of a host: its trainer in several layouts, and whole steps beside the engine.

    python tests/gpu/large.py layouts                              every layout of LAYOUTS, one after another
    python tests/gpu/large.py layouts --only ep --layers 16 --profile
    python tests/gpu/large.py model --fp8                          random weights into --folder, and again in FP8
    python tests/gpu/large.py whole --layout ep                   colocated with SGLang, with plugin r3
    python tests/gpu/large.py whole --layout ep --fp8             and both sides in FP8
    python tests/gpu/large.py layouts --tiny                       the same code on a CPU; whole: with the local engine

The shape is Qwen3-30B-A3B's. layouts prints of each tokens/s of a GPU, seconds, and the fullest GPU's memory as
predicted and as torch counted it; with --profile where the first rank's time goes. whole makes the model if it is not
there; the reward is a coin, and every answer has --tokens tokens. It prints every step, means after the third, and what
the server takes for the same requests alone. The exit status is 1 where something fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path

import torch
from moe import SGLANG, checkpoint, converted, ended, started
from ranks import trained
from trainer_speed import PEAK, RUN, SHAPES, in_process, rollout
from whole_step import SMALL, UNSAVED, shown

FULL = "--recompute-granularity full"
LAYOUTS = {
    "ep": FULL + " --expert-model-parallel-size {gpus}",
    "ep-block": FULL + " --recompute-method block --recompute-num-layers {most} --expert-model-parallel-size {gpus}",
    "ep-kept": "--expert-model-parallel-size {gpus}",
    "tp2-ep": FULL + " --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size {gpus} "
              "--expert-tensor-parallel-size 1",
    "pp2-ep": FULL + " --pipeline-model-parallel-size 2 --expert-model-parallel-size {half}",
}
"""Flags of each; `ep-block` computes three layers of four again, `ep-kept` none."""
MOMENTS = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
TINY = SMALL | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hidden_layers": 4,
                "num_key_value_heads": 2}


def shape_of(args: argparse.Namespace) -> dict:
    """The model's config.json."""
    shape = SHAPES["qwen3-30b-a3b"] | {"bos_token_id": None, "eos_token_id": 258, "pad_token_id": 256}
    layers = {"num_hidden_layers": args.layers} if args.layers else {}
    return shape | (TINY if args.tiny else {}) | layers


def flags_of(layout: str, args: argparse.Namespace) -> list[str]:
    """A layout's flags of miles run; a CPU has no kernels for moments of 16 bits."""
    sizes = {"gpus": args.gpus, "half": args.gpus // 2, "most": 3 * shape_of(args)["num_hidden_layers"] // 4}
    text = f"--actor-num-gpus-per-node {args.gpus} --lr 1e-6 {LAYOUTS[layout].format(**sizes)}"
    return [*text.split(), *(() if args.tiny else MOMENTS.split()), *shlex.split(args.flags)]


def layout_here(name: str, args: argparse.Namespace) -> dict[str, object]:
    """The trainer's speed and memory in one layout."""
    from miles_megatron import estimate
    from miles_megatron.layout import layout_of

    from miles_core.plugins.plan import prepare

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape_of(args)))
        Path(folder, "run.toml").write_text(RUN.format(
            folder=folder, tokens=args.cap, length=args.length,
            groups=args.micro_batches * args.gpus * args.cap // args.length // 2))
        plan = prepare(Path(folder, "run.toml"), [
            "--plan-without-weights", "--trainer-host", "process", "--no-skip-actor-forward-only",
            *flags_of(name, args)])
        model = estimate.dimensions_of(plan.config)
        parts, tokens = estimate.trainer(plan.config, model), args.micro_batches * args.gpus * args.cap
        batch = rollout(tokens, args.length, 250 if args.tiny else 150_000)
        ranks = asyncio.run(trained(plan, args.gpus, batch, args.steps, args.profile))
    met = estimate.active_parameters(model.size)
    once = estimate.flops(args.length, parameters=met, attention=model.size.attention)
    best = {what: min(ranks[0]["seconds"][what][1:args.steps]) for what in ("score", "step")}
    predicted, measured = sum(parts.values()), max(one["peak"] for one in ranks.values())
    return {
        "layout": layout_of(plan.config).sizes, "tokens_per_s_per_gpu": round(tokens / best["step"] / args.gpus),
        "score_tokens_per_s_per_gpu": round(tokens / best["score"] / args.gpus),
        "mfu": round(once * tokens / args.length / best["step"] / args.gpus / PEAK, 3),
        "predicted_gib": round(predicted / 2**30, 1), "measured_gib": round(measured / 2**30, 1),
        "off": round(predicted / measured - 1, 3), "loss": ranks[max(ranks)]["loss"],
        "grad_norm": ranks[max(ranks)]["grad_norm"], "seconds": ranks[0]["seconds"], "profile": ranks[0]["profile"],
    }  # fmt: skip


def layouts(args: argparse.Namespace) -> int:
    """Each in a process of its own, so that one which fails takes nothing along."""
    failed, words = 0, [word for word in sys.argv[1:] if word != "layouts"]
    for name in args.only or LAYOUTS:
        begin = time.monotonic()
        measured = in_process(__file__, ["layouts", "--here", name, *words], args.seconds)
        good = isinstance(measured, dict)
        failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {name} after {time.monotonic() - begin:.0f} s: "
              f"{json.dumps(measured) if good else measured}", flush=True)
    return failed


def model(args: argparse.Namespace) -> Path:
    """The folder of the weights, which are made once; with --fp8 also those in 8 bits, in the folder beside it."""
    folder, begin = args.folder / "model", time.perf_counter()
    if not (folder / "model.safetensors.index.json").is_file():
        size = checkpoint(shape_of(args), folder, 0.02)
        print(f"{size / 1e9:.2f}e9 parameters, made in {time.perf_counter() - begin:.0f} s", flush=True)
    if args.fp8 and not (args.folder / "fp8/model.safetensors.index.json").is_file():
        begin = time.perf_counter()
        converted(folder, args.folder / "fp8", "hf-to-fp8")
        print(f"and in FP8 in {time.perf_counter() - begin:.0f} s", flush=True)
    return folder


def whole(args: argparse.Namespace) -> int:
    """Colocated steps; what a rollout's requests take of the engine alone is measured in the third."""
    plain = model(args)
    words = [*UNSAVED, "--num-rollout", args.rollouts, "--skip-eval-before-train", "--eval-interval", 1000,
             "--rollout-ignore-eos", "--rollout-max-response-len", args.tokens, "--n-samples-per-prompt", 8,
             "--rollout-batch-size", args.requests // 8, "--max-tokens-per-gpu", args.cap,
             "--plugin", "r3", "--r3.compare-every", 1000, "--plugin", Path(__file__).with_name("burst.py"),
             *flags_of(args.layout, args)]
    words += (["--hf-checkpoint", args.folder / "fp8", "--ref-load", plain, "--plugin", "fp8"] if args.fp8 else
              ["--hf-checkpoint", plain])
    if args.tiny:
        words += ["--engine", "local"]
    else:
        words += [*SGLANG, "--placement", "local", "--router", "none", "--rollout-num-gpus-per-engine", args.gpus,
                  "--sglang-ep-size", args.engine_ep, "--sglang-mem-fraction-static", args.fraction,
                  "--sglang-cuda-graph-max-bs", args.requests, "--no-offload-train",
                  # its kernels are compiled when the server starts, for three minutes
                  "--sglang-enforce-disable-flashinfer-allreduce-fusion",
                  *(["--sglang-fp8-gemm-backend", "triton"] if args.fp8 else [])]
    name = f"whole-{args.layout}{'-fp8' * args.fp8}"
    folder = args.folder / name
    steps = ended(started(folder, list(map(str, words))), folder, time.monotonic() + args.seconds)
    if not steps:
        return 1
    compared = {key: value for key, value in steps[0].items() if "/r3/" in key or "logprob" in key}
    print(f"{name}, first rollout:", json.dumps(compared), flush=True)
    print(f"{name}, every step s:", [round(step["perf/step_time"], 2) for step in steps], flush=True)
    means = shown(name, steps, args.requests * args.tokens)
    if (folder / "burst.json").is_file():
        alone = json.loads((folder / "burst.json").read_text())
        print(f"{name}: engine alone {alone['seconds']:.2f} s for {alone['tokens']} new tokens; rollout "
              f"{means['perf/rollout_time'] / alone['seconds']:.3f} of it", flush=True)
    print(f"{name}: {args.requests * args.tokens / means['perf/step_time'] / args.gpus:.0f} new tokens/s of each GPU")
    return int(len(steps) < args.rollouts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["layouts", "model", "whole"])
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 4)
    parser.add_argument("--layers", type=int, help="of the model, instead of all")
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, help="layouts to measure")
    parser.add_argument("--here", choices=LAYOUTS, help="one layout, started by `layouts`")
    parser.add_argument("--layout", choices=LAYOUTS, default="ep", help="of the whole run")
    parser.add_argument("--cap", type=int, help="tokens of a micro-batch on a GPU; default: 16384")
    parser.add_argument("--length", type=int, help="tokens of a sample of `layouts`; default: 2048")
    parser.add_argument("--micro-batches", type=int, default=2, help="of each rank, of `layouts`")
    parser.add_argument("--steps", type=int, default=3, help="of `layouts`; the first is not counted")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tokens", type=int, help="new tokens of each answer of `whole`; default: 1024")
    parser.add_argument("--requests", type=int, help="answers of a rollout; default: 256")
    parser.add_argument("--rollouts", type=int, default=6)
    parser.add_argument("--engine-ep", type=int, default=1, help="ranks of the server that share out experts")
    parser.add_argument("--fraction", default="0.2", help="of a GPU's memory, for the server")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--flags", default="", help="further flags of miles run")
    parser.add_argument("--seconds", type=float, default=400, help="of each layout, of the whole run")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/miles-large"))
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    sizes = {"cap": 64, "length": 32, "tokens": 8, "requests": 16} if args.tiny else {
        "cap": 16384, "length": 2048, "tokens": 1024, "requests": 256}
    for key, value in sizes.items():
        setattr(args, key, getattr(args, key) or value)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.here:
        print(json.dumps(layout_here(args.here, args)))
        return 0
    if args.what == "model":
        model(args)
        return 0
    return {"layouts": layouts, "whole": whole}[args.what](args)


if __name__ == "__main__":
    sys.exit(main())
