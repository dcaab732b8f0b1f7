"""FP8 beside bfloat16 at hidden 4096: training, sampling, weight syncs. One GPU, one call, under five minutes.

    NCCL_CUMEM_ENABLE=0 python tests/gpu/fp8.py                     bf16 against fp8 blockwise
    ... --parts train --recipes bf16 blockwise tensorwise           one part, or further recipes
    python tests/gpu/fp8.py --tiny                                  the same code on a CPU: emulation, no servers

Both SGLang servers start at once; each is then brought up to date as by a run, and measured while the other idles.
Training steps are of the real trainer on one fixed batch of text, so that losses can be compared; each recipe has a
process of its own. Prints a table; figures go to docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

SHAPE = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 32768, "hidden_size": 4096,
    "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000, "attention_bias": False, "use_sliding_window": False, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": 0, "dtype": "bfloat16",
}  # fmt: skip
TINY = SHAPE | {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 1, "intermediate_size": 256}
SERVED = Path(__file__).parents[2] / "plugins/miles-sglang/src/miles_sglang/server_extension"
SERVER = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
          "--skip-server-warmup", "--skip-tokenizer-init", "--cuda-graph-backend-prefill", "disabled",
          "--cuda-graph-max-bs", "64", "--custom-weight-loader", "miles_weights.load", "--disable-radix-cache",
          "--host", "127.0.0.1"]
LOADS = {"bf16": "dummy", "fp8": "auto"}
"""As in a run: what FP8 layers derive when they load comes from a checkpoint."""
MEMORY = {"bf16": "0.25", "fp8": "0.25"}
RUN = """
plugins = ["sft"]
[checkpoint]
hf_checkpoint = "{folder}"
[rollout]
prompt_data = "data/none.jsonl"
num_rollout = {steps}
rollout_batch_size = {samples}
generate = "sft"
[perf]
bf16 = {bf16}
use_dynamic_batch_size = true
max_tokens_per_gpu = {tokens}
trainer_host = "thread"
[algorithm]
loss_type = "sft_loss"
calculate_per_token_loss = true
skip_actor_forward_only = true
[optimizer]
lr = 1e-4
"""


def folder_of(shape: dict, held: dict | None = None) -> Path:
    """A directory with a config.json alone."""
    folder = Path(tempfile.mkdtemp())
    more = {} if held is None else {"quantization_config": held}
    (folder / "config.json").write_text(json.dumps(shape | more))
    return folder


# ------------------------------------------------------------------------------------------------------ training


def text(samples: int, length: int, vocabulary: int):
    """A batch to learn: random walks over the vocabulary, whose next token is near the last one."""
    import numpy as np

    from miles_core.types import Batch, Group, Prompt, Sample, Status

    draw, groups = np.random.default_rng(0), []
    for number in range(samples):
        tokens = (draw.integers(0, vocabulary) + np.cumsum(draw.integers(1, 4, length))) % vocabulary
        columns = {"tokens": tokens.astype(np.int32), "loss_mask": np.ones(length - 1, np.uint8),
                   "versions": np.ones(length - 1, np.int32), "rollout_log_probs": np.zeros(length - 1, np.float32)}
        prompt = Prompt(number, number, "", (int(tokens[0]),))
        groups.append(Group(prompt, [Sample(prompt, 0, columns, length - 1, status=Status.COMPLETED, reward=0.0)]))
    return Batch(0, groups)


def train(recipe: str, steps: int, tiny: bool) -> dict[str, object]:
    """Losses and tokens/s of steps on one batch, in this process."""
    import torch
    from miles_megatron.model_on_rank import ModelOnRank

    from miles_core.build import trainer_part
    from miles_core.plugins.plan import prepare
    from miles_core.types import Rank

    shape, samples, length = (TINY, 4, 64) if tiny else (SHAPE, 8, 2048)
    folder, gpu = folder_of(shape), torch.cuda.is_available()
    (folder / "run.toml").write_text(RUN.format(folder=folder, tokens=samples * length, samples=samples, steps=steps,
                                                bf16=str(gpu).lower()))
    flags = [] if recipe == "bf16" else ["--plugin", "fp8", "--fp8-recipe", recipe]
    plan = prepare(folder / "run.toml", ["--plan-without-weights", *flags])
    ModelOnRank.fill = lambda self, source: None  # there are no files: Megatron's random weights stay, by the seed
    trainer = trainer_part(list(plan.selected), plan.config, Rank())
    trainer.load()
    losses, seconds, batch = [], [], text(samples, length, shape["vocab_size"])
    for step in range(steps):
        trainer.take_batch(batch)
        trainer.score()
        trainer.advantage()
        if gpu:
            torch.cuda.synchronize()
            if step == 1:
                torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        metrics = trainer.step(0)
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        losses.append(float(metrics["train/loss"]))
        batch = trainer.end_batch()
    peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0
    best = sorted(seconds[1:])[len(seconds[1:]) // 2]
    layers = trainer.models.actor.settings.transformer_impl
    trainer.close()
    return {"tokens_per_s": round(samples * length / best), "peak_gib": round(peak, 1), "layers": layers,
            "losses": [round(one, 4) for one in losses]}


def training(recipes: list[str], steps: int, tiny: bool) -> dict[str, dict]:
    """`train` of each recipe in a process of its own."""
    found = {}
    for recipe in recipes:
        words = [sys.executable, __file__, "--child", recipe, "--steps", str(steps), *(["--tiny"] if tiny else [])]
        env = {**os.environ, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
        done = subprocess.run(words, capture_output=True, text=True, timeout=240, env=env)
        if done.returncode:
            raise RuntimeError(f"{recipe}: {done.stdout[-1500:]}{done.stderr[-3000:]}")
        found[recipe] = json.loads(done.stdout.splitlines()[-1])
    return found


# -------------------------------------------------------------------------------------------------------- engines


class Server:
    """An SGLang server on the first GPU, with random weights."""

    def __init__(self, folder: Path, kind: str, backend: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "log"
        path = os.pathsep.join([str(SERVED), os.environ.get("PYTHONPATH", "")])
        more = ["--fp8-gemm-backend", backend] if kind == "fp8" else []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", "--model-path", folder, "--port", str(port), *SERVER, *more,
             "--load-format", LOADS[kind], "--mem-fraction-static", MEMORY[kind]],
            stdout=self.log.open("w"), stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "0", "NCCL_CUMEM_ENABLE": "0",
                 "SGLANG_ENABLE_JIT_DEEPGEMM": "0"})  # its kernels compile for minutes

    def wait(self) -> None:
        end = time.monotonic() + 170
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).read()
                return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(self.log.read_text(errors="replace")[-3000:])

    def ask(self, body: dict) -> list[dict]:
        request = urllib.request.Request(f"{self.url}/generate", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        return json.loads(urllib.request.urlopen(request, timeout=120).read())

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def weights(shape: dict, device: str) -> list:
    """Random bfloat16 tensors by Hugging Face's names."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{key: value for key, value in shape.items() if key != "architectures"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    draw = torch.Generator(device).manual_seed(0)
    return [(name, torch.empty(p.shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=draw)
             if p.dim() > 1 else torch.ones(p.shape, dtype=torch.bfloat16, device=device))
            for name, p in model.named_parameters()]


def sampled(server: Server, prompts: list[list[int]], new: int) -> float:
    """New tokens per second, the best of three after one to warm up."""
    body = {"input_ids": prompts, "sampling_params": {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True}}
    best = float("inf")
    for turn in range(4):
        begin = time.perf_counter()
        answers = server.ask(body)
        best = best if turn == 0 else min(best, time.perf_counter() - begin)
        assert all(one["meta_info"]["completion_tokens"] == new for one in answers)
    return len(prompts) * new / best


def log_probs(server: Server, prompts: list[list[int]]) -> list[float]:
    """Of the prompts' own tokens."""
    body = {"input_ids": prompts, "return_logprob": True, "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0}}
    return [one[0] for answer in server.ask(body) for one in answer["meta_info"]["input_token_logprobs"][1:]]


def sync(server: Server, folder: Path, named: list, held) -> dict[str, float]:
    """The best of four syncs by CUDA IPC, as a run makes and verifies them."""
    from miles_fp8.stream import quantised
    from miles_sglang.sync.ipc import IpcSender
    from miles_sglang.sync.sender import Settings
    from miles_sglang.sync.servers import Target

    from miles_core.types import Rank

    settings = Settings(limit=2**29, timeout=120, source="bfloat16", target="bfloat16", tied=False,
                        heads=SHAPE["num_key_value_heads"], layers=SHAPE["num_hidden_layers"], checkpoint=str(folder))
    sender = IpcSender(settings, (Target("engine 0", server.url, gpus=(0,)),))
    sender.open(Rank())
    found = []
    for turn in range(4):
        begin = time.perf_counter()
        figures = sender.send(quantised(iter(named), held) if held else iter(named), turn + 1)
        found.append((time.perf_counter() - begin, figures))
    sender.close()
    seconds, figures = min(found, key=lambda one: one[0])
    return {"sync_s": round(seconds, 4), "gb": round(figures["bytes"] / 1e9, 3), "tensors": figures["tensors"],
            "verify_s": round(figures["verify_s"], 4), "add_up_s": round(figures["add_up_s"], 4)}


def engines(backend: str) -> dict[str, dict]:
    """Both servers: tokens/s, a sync, and how far their log-probs are apart when they hold the same model."""
    import random

    import torch
    from miles_fp8.recipe import WEIGHTS, Held
    from miles_fp8.stream import quantised
    from miles_megatron.weights import export_hf

    held = Held(WEIGHTS["blockwise"])
    folders = {"bf16": folder_of(SHAPE), "fp8": folder_of(SHAPE, held.config)}
    folders["written"] = folders["fp8"] / "written"
    draw = random.Random(0)
    prompts = [[draw.randrange(SHAPE["vocab_size"]) for _ in range(64)] for _ in range(64)]
    servers: dict[str, Server] = {}
    try:
        servers["bf16"] = Server(folders["bf16"], "bf16", backend)
        begin = time.monotonic()
        torch.cuda.set_device(0)
        named = weights(SHAPE, "cuda")
        export_hf(folders["written"], folders["fp8"], quantised(iter(named), held), config={"dtype": "bfloat16"})
        time.sleep(max(0.0, begin + 15 - time.monotonic()))  # each takes its share of the memory that is free then
        servers["fp8"] = Server(folders["written"], "fp8", backend)
        found: dict[str, dict] = {kind: {} for kind in servers}
        probs = {}
        for server in servers.values():
            server.wait()
        for kind, server in servers.items():
            found[kind] |= sync(server, folders[kind], named, held if kind == "fp8" else None)
            found[kind]["new_tokens_per_s"] = round(sampled(server, prompts, 128))
            probs[kind] = log_probs(server, prompts[:16])
        apart = [abs(a - b) for a, b in zip(probs["bf16"], probs["fp8"], strict=True)]
        found["fp8"]["log_prob_difference"] = round(sum(apart) / len(apart), 5)
        return found
    finally:
        for server in servers.values():
            server.stop()


def adding_up() -> bool:
    """Whether the kernel that adds up bits finds, for bytes too, what the CPU finds."""
    import torch
    from miles_sglang.server_extension.miles_sums import sums

    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=draw).to(dtype) for shape in ((3000, 129), (7,), (128, 4096))
               for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32)]
    tensors.append(torch.randint(0, 256, (100_003,), dtype=torch.uint8, generator=draw))
    there = [tensor.cuda() for tensor in tensors] if torch.cuda.is_available() else tensors
    return torch.equal(sums(there).cpu(), sums(tensors))


def stream_bytes(shape: dict) -> dict[str, dict]:
    """What a sync would carry, counted without a server."""
    from miles_fp8.recipe import WEIGHTS, Held
    from miles_fp8.stream import quantised
    from miles_local.buckets import Cutter

    named = weights(shape, "cpu")
    streams = {"bf16": iter(named), "fp8": quantised(iter(named), Held(WEIGHTS["blockwise"]))}
    return {kind: {"gb": round(sum(bucket.bytes for bucket in Cutter(2**20)(stream)) / 1e9, 6)}
            for kind, stream in streams.items()}


def table(trained: dict[str, dict], served: dict[str, dict]) -> None:
    """What was measured, as lines that a person reads; ratios are to bf16."""
    first = trained.get("bf16", {})
    for recipe, one in trained.items():
        ratio = one["tokens_per_s"] / first.get("tokens_per_s", one["tokens_per_s"])
        apart = [abs(a - b) for a, b in zip(one["losses"], first.get("losses", one["losses"]), strict=True)]
        print(f"train  {recipe:<11} {one['tokens_per_s']:>9,} tokens/s ({ratio:.2f}x)  peak {one['peak_gib']} GiB  "
              f"loss {one['losses'][0]} -> {one['losses'][-1]}, at most {max(apart):.4f} from bf16  {one['layers']}")
    for kind, one in served.items():
        print(f"engine {kind:<11} " + "  ".join(f"{name} {value}" for name, value in one.items()))
    print(json.dumps({"train": trained, "engine": served}))


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--parts", nargs="*", default=["engine", "train"], choices=["engine", "train"])
    arguments.add_argument("--recipes", nargs="*", default=["bf16", "blockwise"])
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--backend", default="triton", help="of SGLang's FP8 products: --fp8-gemm-backend")
    arguments.add_argument("--tiny", action="store_true")
    arguments.add_argument("--child")
    given = arguments.parse_args()
    if given.child:
        print(json.dumps(train(given.child, given.steps, given.tiny)))
        return 0
    if not adding_up():
        print("the sums of bits differ between CPU and GPU", file=sys.stderr)
        return 1
    served: dict[str, dict] = {}
    if "engine" in given.parts:
        served = stream_bytes(TINY) if given.tiny else engines(given.backend)
        table({}, served)
    trained = training(given.recipes, given.steps, given.tiny) if "train" in given.parts else {}
    table(trained, served)
    return 0


if __name__ == "__main__":
    sys.exit(main())
