"""Qwen3-Next on a GPU: a real SGLang server's log-probs against the trainer's, and what a gated delta net costs.

    python tests/gpu/qwen3next.py agree       a random small model, 8 prompts, 64 tokens each; under three minutes
    python tests/gpu/qwen3next.py speed       layers of the 80B model's shape: seconds and memory, forward and backward
    python tests/gpu/qwen3next.py agree --local    the same comparison without SGLang, on a CPU too

`agree` prints, for the bfloat16 trainer and for the same weights in float32, how far the server's log-probs are from
it. The exit status is 1 where that is more than LIMIT. Nothing is fetched.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import torch

DATA = Path(__file__).parents[2] / "examples" / "arithmetic"
SHAPE = {  # as released checkpoints write it; sizes that SGLang's kernels take
    "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "dtype": "bfloat16", "hidden_act": "silu",
    "vocab_size": 264, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
    "rope_theta": 10000000, "rope_scaling": None, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "attention_bias": False,
    "tie_word_embeddings": False, "initializer_range": 0.02, "bos_token_id": None, "eos_token_id": 258,
    "pad_token_id": 256,
}  # fmt: skip
LARGE = {"hidden_size": 2048, "num_attention_heads": 16, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
         "num_hidden_layers": 4, "num_experts": 0, "intermediate_size": 5120}
FLAGS = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
         "--skip-server-warmup", "--skip-tokenizer-init", "--disable-cuda-graph", "--mem-fraction-static", "0.3",
         "--dtype", "bfloat16", "--host", "127.0.0.1"]
PROMPTS, TOKENS = (5, 17, 33, 64, 65, 100, 128, 200), 64
"""Lengths of the prompts, around the 64 tokens of a chunk; tokens that each is continued by."""
LIMIT = 1.5
"""Largest mean difference between engine and trainer, as a multiple of that between bfloat16 and float32: random
weights make much of rounding, and experts are chosen otherwise."""


def checkpoint(folder: Path, shape: dict[str, object]) -> None:
    """Random bfloat16 weights with a config.json as released, and the tiny models' tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    said = dict(shape)
    config = AutoConfig.for_model(said.pop("model_type"), **said)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and decays that are not what they start as
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(shape, indent=2))
    for file in (DATA / "tiny-qwen3").glob("*token*"):
        shutil.copy(file, folder)


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, 256, (length,), generator=draw).tolist() for length in PROMPTS]


def served(folder: Path) -> list[tuple[list[int], list[float]]]:
    """(ids, log-probs) that a real server draws for each prompt."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "log"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), "--port", str(port), *FLAGS]
    process = subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT, env={**os.environ})
    try:
        end = time.monotonic() + 150
        while True:
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).read()
                break
            except OSError:
                time.sleep(0.5)
        body = {"input_ids": prompts(), "return_logprob": True,
                "sampling_params": {"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}}
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/generate", json.dumps(body).encode(),
                                       {"Content-Type": "application/json"})
        answers = json.load(urllib.request.urlopen(asked, timeout=120))
    finally:
        process.terminate()
        process.wait(30)
    drawn = [one["meta_info"]["output_token_logprobs"] for one in answers]
    return [([int(row[1]) for row in rows], [float(row[0]) for row in rows]) for rows in drawn]


def decoded(folder: Path) -> list[tuple[list[int], list[float]]]:
    """The same from the local engine, in bfloat16."""
    from miles_local.engine import LocalEngine

    from miles_core.stages.rollout import Request, SamplingParams

    async def run():
        engine = LocalEngine(folder, dtype=torch.bfloat16)
        await engine.start()
        try:
            sampling = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
            return await asyncio.gather(*(engine.generate(Request(str(i), tuple(ids), sampling, key=i))
                                          for i, ids in enumerate(prompts())))
        finally:
            await engine.stop()

    return [(one.output_ids.tolist(), one.log_probs.tolist()) for one in asyncio.run(run())]


def built(folder: Path, bf16: bool):
    """The trainer's model; Transformer Engine's layers in bfloat16 on a GPU."""
    from miles_megatron import cpu, model, weights
    from miles_megatron.testing.parity import family_of
    from transformers import AutoConfig

    cpu.initialize()
    hf = AutoConfig.from_pretrained(folder)
    family = family_of(hf.model_type, hf)
    spec = family.model_spec(hf)
    made = model.build(model.transformer_config(spec, bf16=bf16), spec).to(cpu.device())
    weights.load_hf(folder, made, family.weight_map(hf))
    return made


@torch.no_grad()
def trained(folder: Path, answers, bf16: bool) -> torch.Tensor:
    """Log-probs of all drawn tokens by one packed forward of the trainer's model."""
    from miles_megatron.logprob import token_log_probs
    from miles_megatron.packed_layout import packed_rows

    made = built(folder, bf16)
    device = next(made.parameters()).device
    whole = [torch.tensor(ids + drawn) for ids, (drawn, _) in zip(prompts(), answers, strict=True)]
    bounds = torch.tensor([0, *map(len, whole)]).cumsum(0)
    rows = torch.cat([torch.arange(end - TOKENS, end) for end in bounds[1:].tolist()]).to(device)
    tokens = torch.cat(whole).to(device)
    padded = torch.nn.functional.pad(tokens, (0, -len(tokens) % 16))
    hidden = made(padded[None], None, None, packed_seq_params=packed_rows(bounds))[:, 0]
    return token_log_probs(hidden[rows - 1], made.output_weight, tokens[rows])[0].float().cpu()


def agree(local: bool) -> int:
    """Print the differences."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint(folder, SHAPE)
        begin = time.monotonic()
        answers = (decoded if local else served)(folder)
        print(f"{'local engine' if local else 'SGLang'}: {len(answers)} answers of {TOKENS} tokens, "
              f"{time.monotonic() - begin:.0f} s with its start")
        engine = torch.tensor([value for _, values in answers for value in values])
        found = {"bfloat16": trained(folder, answers, True), "float32": trained(folder, answers, False)}
    differences = {f"engine - trainer in {name}": engine - values for name, values in found.items()}
    differences["trainer in bfloat16 - in float32"] = found["bfloat16"] - found["float32"]
    print(f"log-probs: mean {float(engine.mean()):.3f}, deviation {float(engine.std()):.3f}")
    for what, values in differences.items():
        print(f"{what}: mean |d| {float(values.abs().mean()):.5f}, largest {float(values.abs().max()):.4f}, "
              f"mean d {float(values.mean()):+.5f}")
    by_prompt = differences["engine - trainer in bfloat16"].abs().view(len(PROMPTS), -1).mean(1)
    print("by length of the prompt:", {n: round(float(d), 5) for n, d in zip(PROMPTS, by_prompt, strict=True)})
    rounding = float(differences["trainer in bfloat16 - in float32"].abs().mean())
    print(f"engine from trainer, as a multiple of rounding: {float(by_prompt.mean()) / rounding:.2f}")
    return int(not float(by_prompt.mean()) <= LIMIT * rounding)


def speed(tokens: int) -> int:
    """Seconds and peak memory of forward and backward through four layers, three of them gated delta nets."""
    from miles_megatron.packed_layout import packed_rows

    with tempfile.TemporaryDirectory() as name:
        checkpoint(Path(name), SHAPE | LARGE)
        made = built(Path(name), torch.cuda.is_available())
    gpu = torch.cuda.is_available()
    lengths = [tokens // 8] * 8
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.randint(3, 256, (1, int(bounds[-1])), device=next(made.parameters()).device)
    times = {"forward": [], "backward": []}
    for _ in range(4):
        gc.collect()
        begin = time.perf_counter()
        loss = made(ids, None, None, packed_seq_params=packed_rows(bounds)).float().square().mean()
        loss.item()
        middle = time.perf_counter()
        loss.backward()
        if gpu:
            torch.cuda.synchronize()
        times["forward"].append(middle - begin)
        times["backward"].append(time.perf_counter() - middle)
    memory = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if gpu else ""
    print(f"{tokens} tokens in 8 sequences, 4 layers: "
          + ", ".join(f"{name} {1000 * min(values[1:]):.0f} ms" for name, values in times.items()) + memory)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["agree", "speed"])
    parser.add_argument("--local", action="store_true", help="the local engine in SGLang's place")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch, for speed")
    chosen = parser.parse_args()
    return agree(chosen.local) if chosen.what == "agree" else speed(chosen.tokens)


if __name__ == "__main__":
    sys.exit(main())
