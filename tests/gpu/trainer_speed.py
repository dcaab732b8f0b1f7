"""Speed and memory of the trainer on one GPU, beside what the memory plan says.

    python tests/gpu/trainer_speed.py                          every shape, with and without recomputation
    python tests/gpu/trainer_speed.py qwen3-0.6b --tokens 16384 --steps 4 --flags "--transformer-impl local"

A shape is a config.json; weights are Megatron's random ones, made on the GPU. Each case runs in a process of its own:
log-probs, then optimizer steps on --micro-batches packed ones of --tokens. --profile puts one more step under torch's
profiler: how long the GPU computed, in how many kernels, and in which. Prints tokens/s of a step, the share of 989
TFLOP/s (H100 and H200, bf16, dense) that the model's own operations are, and peak memory as predicted and as torch
counted it.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

PEAK = 989e12

QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
         "attention_bias": False, "use_sliding_window": False, "num_key_value_heads": 8, "torch_dtype": "bfloat16"}
SHAPES = {
    "qwen3-0.6b": QWEN3 | {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
                           "intermediate_size": 3072, "tie_word_embeddings": True},
    "qwen3-1.7b": QWEN3 | {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16,
                           "intermediate_size": 6144, "tie_word_embeddings": True},
    "qwen3-4b": QWEN3 | {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
                         "intermediate_size": 9728, "tie_word_embeddings": True},
    "moe-4b": QWEN3 | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 1024,
                       "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 3072,
                       "tie_word_embeddings": False, "num_experts": 64, "num_experts_per_tok": 8,
                       "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
                       "mlp_only_layers": []},
}
SHAPES |= {
    f"moe-{hidden}": SHAPES["moe-4b"] | {"hidden_size": hidden, "num_hidden_layers": 4, "num_attention_heads": 32,
                                         "num_key_value_heads": 4, "moe_intermediate_size": ffn}
    for hidden, ffn in ((2048, 768), (4096, 1536))
}
SHAPES["llama3-1b"] = QWEN3 | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
                               "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64,
                               "intermediate_size": 8192, "rope_theta": 500000, "tie_word_embeddings": True}
SHAPES["qwen2.5-0.5b"] = QWEN3 | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896,
                                  "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
                                  "head_dim": 64, "intermediate_size": 4864, "tie_word_embeddings": True}
SHAPES["qwen3-30b-a3b"] = SHAPES["moe-2048"] | {"num_hidden_layers": 48, "num_experts": 128, "intermediate_size": 6144}
"""moe-2048 has the layers of Qwen3-30B-A3B with half of its experts, moe-4096 those of Qwen3-235B-A22B."""

RUN = """
[checkpoint]
hf_checkpoint = "{folder}"
[rollout]
prompt_data = "data/none.jsonl"
num_rollout = 1
rollout_batch_size = {groups}
n_samples_per_prompt = 2
rollout_max_response_len = {length}
engine = "local"
rm_type = ["math"]
[perf]
bf16 = true
use_dynamic_batch_size = true
max_tokens_per_gpu = {tokens}
trainer_host = "thread"
"""


def rollout(tokens: int, length: int, vocabulary: int = 150_000, asked: int = 0):
    """A batch of so many tokens: samples of `length` tokens, of which `asked` or else an eighth are the prompt's."""
    import numpy as np

    from miles_core.types import Batch, Group, Prompt, Sample, Status

    draw, first = np.random.default_rng(0), asked or length // 8

    def sample(prompt: Prompt, index: int) -> Sample:
        answer = length - first
        columns = {"tokens": draw.integers(0, vocabulary, length).astype(np.int32),
                   "loss_mask": np.ones(answer, np.uint8), "versions": np.ones(answer, np.int32),
                   "rollout_log_probs": np.full(answer, -12.0, np.float32)}
        return Sample(prompt, index, columns, answer, status=Status.COMPLETED, reward=float(index))

    groups = []
    for number in range(tokens // length // 2):
        prompt = Prompt(number, number, "", tuple(range(first)))
        groups.append(Group(prompt, [sample(prompt, i) for i in range(2)]))
    return Batch(0, groups)


KINDS = {"communication": "nccl", "attention": "flash|fmha|sdpa", "products": "gemm|nvjet|cutlass|cublas|grouped",
         "copies": "memcpy|memset"}
"""Kinds of kernels, by what their names contain; the first that does."""


def profiled(call, profile: list[dict[str, object]]) -> None:
    """A call under torch's profiler; appends how long the GPU was busy, with what, and what took longest."""
    import torch
    from torch.profiler import ProfilerActivity
    from traces import idle

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        call()
        torch.cuda.synchronize()
    kernels = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA
               and not event.is_user_annotation]  # NCCL's and the optimizer's own, around kernels
    spans = sorted((k.time_range.start, k.time_range.end) for k in kernels)
    busy = max(end for _, end in spans) - spans[0][0] - sum(length for length, _ in idle(spans))
    longest, count, kinds = Counter(), Counter(), Counter()
    for kernel in kernels:
        kind = next((kind for kind, names in KINDS.items() if re.search(names, kernel.name, re.IGNORECASE)), "other")
        kinds[kind] += (kernel.time_range.end - kernel.time_range.start) / 1e3
        longest[kernel.name[:90]] += kernel.time_range.end - kernel.time_range.start
        count[kernel.name[:90]] += 1
    profile.append({"busy_ms": round(busy / 1e3, 1), "of_ms": round((spans[-1][1] - spans[0][0]) / 1e3, 1),
                    "kernels": len(spans), "kinds_ms": {kind: round(ms, 1) for kind, ms in kinds.most_common()},
                    "longest": [[round(us / 1e3, 2), count[name], name] for name, us in longest.most_common(30)]})


def measure(shape: str, tokens: int, length: int, steps: int, flags: list[str], *, whole: int = 0,
            asked: int = 0, profile: bool = False) -> dict[str, object]:
    """One case, in this process; the first step pays for kernels that are chosen and compiled. A step has one
    micro-batch, or `whole` tokens."""
    from miles_megatron import estimate
    from ranks import Case

    from miles_core.plugins.plan import prepare
    from miles_core.types import Rank

    folder, whole = Path(tempfile.mkdtemp()), whole or tokens
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    (folder / "run.toml").write_text(RUN.format(folder=folder, tokens=tokens, length=length,
                                                groups=whole // length // 2))
    plan = prepare(folder / "run.toml", ["--plan-without-weights", *flags])
    case = Case(plan.selected, plan.config, Rank())
    figures, trainer = case.train(rollout(whole, length, asked=asked), steps, profile)[0], case.trainer
    seconds, counted = figures["seconds"], figures["peak"]
    memory_of = trainer.models.actor.memory
    state = {tag: memory_of.held(tag) for tag in ("weights", "gradients", "optimizer")}
    model = estimate.dimensions_of(plan.config)
    parts = estimate.trainer(plan.config, model)
    met = estimate.active_parameters(model.size)
    once = estimate.flops(length, parameters=met, attention=model.size.attention) * (whole // length)
    step, score = min(seconds["step"][1:]), min(seconds["score"][1:])
    predicted = sum(parts.values())
    trainer.close()
    return {
        "layers": trainer.models.actor.settings.transformer_impl, "tokens_per_s": round(whole / step),
        "score_tokens_per_s": round(whole / score), "mfu": round(once / step / PEAK, 3),
        "loss": figures["loss"][-1], "grad_norm": figures["grad_norm"][-1], "predicted": round(predicted),
        "measured": counted, "off": round(predicted / counted - 1, 3),
        "predicted_parts": {name: round(one) for name, one in parts.items()}, "measured_state": state,
        "measured_beside_state": counted - sum(state.values()), "seconds": seconds,
        "profile": figures["profile"],
    }  # fmt: skip


def in_process(script: str, words: list[object], limit: float) -> dict[str, object] | str:
    """A case in a process of its own; what it measured, or the end of what it said."""
    try:
        done = subprocess.run([sys.executable, script, *map(str, words)], capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as late:
        return f"not done within {limit:g} s\n{str(late.stderr)[-1500:]}"
    if done.returncode:
        return (done.stdout + done.stderr)[-3000:]
    measured: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return measured


def main() -> int:
    """Every case in a process; the exit status is how many failed or were predicted more than 10 % wrong."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("shapes", nargs="*", default=["qwen3-0.6b", "qwen3-4b"])
    arguments.add_argument("--tokens", type=int, default=16384)
    arguments.add_argument("--length", type=int, default=2048)
    arguments.add_argument("--prompt", type=int, default=0, help="of --length; an eighth by default")
    arguments.add_argument("--micro-batches", type=int, default=1)
    arguments.add_argument("--samples", type=int, default=0, help="of a step, instead of full micro-batches")
    arguments.add_argument("--steps", type=int, default=4)
    arguments.add_argument("--profile", action="store_true")
    arguments.add_argument("--flags", default=None, help="of miles run, for one case instead of the two")
    arguments.add_argument("--limit", type=float, default=240, help="seconds of one case")
    arguments.add_argument("--here", action="store_true")
    given, failed = arguments.parse_args(), 0
    if given.here:
        found = measure(given.shapes[0], given.tokens, given.length, given.steps, shlex.split(given.flags or ""),
                        whole=given.samples * given.length or given.tokens * given.micro_batches,
                        asked=given.prompt, profile=given.profile)
        print(json.dumps(found))
        return 0
    cases = ["", "--recompute-granularity full"] if given.flags is None else [given.flags]
    for shape in given.shapes:
        for flags in cases:
            measured = in_process(__file__, [
                "--here", shape, "--tokens", given.tokens, "--length", given.length, "--steps", given.steps,
                "--prompt", given.prompt, f"--flags={flags}", "--micro-batches", given.micro_batches,
                "--samples", given.samples, *(["--profile"] if given.profile else [])], given.limit)
            ended = isinstance(measured, dict)
            good = ended and abs(measured["off"]) <= 0.1
            failed += not good
            print(f"{'ok  ' if good else 'FAIL'} {shape} {flags or 'no recomputation'}: "
                  f"{json.dumps(measured) if ended else measured}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
