"""Seconds of a weight sync to a real SGLang server on GPUs, by random models of known shapes.

    NCCL_CUMEM_ENABLE=0 python tests/gpu/sync_speed.py ipc 0.6B 8B        one GPU
    NCCL_CUMEM_ENABLE=0 python tests/gpu/sync_speed.py broadcast 0.6B 8B  two GPUs
    ... 8B:2048                                                           buckets of one size, in MiB
    ... --apart moe-4b 30b-a3b/16                                         experts one by one, as checkpoints have them

Prints a line of JSON for each shape: seconds of the whole sync as a run makes it, from the pause until the engine
serves (`whole_s`), and of the sender's part alone (`send_s`), both as the median and the best of 200, of mixtures 20;
the share of the device's copy bandwidth (ipc) or of a plain NCCL broadcast's between the same two GPUs (broadcast) that
the best sender has; and what the verification costs: `..._cost` compares the medians with those of as many syncs
without it, which take turns with them on one server. Figures go to docs/benchmarks.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from miles_sglang.engine import SglangEngine
from miles_sglang.server_extension.miles_stacks import apart
from miles_sglang.sync.broadcast import BroadcastSender
from miles_sglang.sync.ipc import IpcSender
from miles_sglang.sync.sender import Servers, Settings
from miles_sglang.sync.sequence import ServerSync
from miles_sglang.sync.servers import Target
from miles_sglang.sync.verify import Ledger

from miles_core.config.tables import Checkpoint, Debug, Rollout, RunConfig
from miles_core.types import Rank

SHAPES = {
    "0.6B": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                 num_key_value_heads=8, tie_word_embeddings=True),
    "8B": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
               num_key_value_heads=8, tie_word_embeddings=False),
    "moe-4b": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=24, num_attention_heads=16,
                   num_key_value_heads=8, tie_word_embeddings=False, num_experts=64, num_experts_per_tok=8,
                   moe_intermediate_size=768),
    "30b-a3b/16": dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=16, num_attention_heads=32,
                       num_key_value_heads=4, tie_word_embeddings=False, num_experts=128, num_experts_per_tok=8,
                       moe_intermediate_size=768),
}
"""30b-a3b/16 are 16 of the 48 layers of Qwen3-30B-A3B."""
SERVED = Path(__file__).parents[2] / "plugins/miles-sglang/src/miles_sglang/server_extension"
FLAGS = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
         "--skip-server-warmup", "--skip-tokenizer-init", "--disable-cuda-graph", "--mem-fraction-static", "0.3",
         "--load-format", "dummy", "--custom-weight-loader", "miles_weights.load", "--host", "127.0.0.1"]
DENSE, MIXED = 200, 20
"""Syncs with the verification, and as many without, of a dense model and of a mixture of experts."""


class Server:
    """A server with random weights of a shape, on the first GPU."""

    def __init__(self, folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "log"
        path = os.pathsep.join([str(SERVED), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", "--model-path", folder, "--port", str(port), *FLAGS],
            stdout=self.log.open("w"), stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "0", "NCCL_CUMEM_ENABLE": "0"})

    def __enter__(self) -> Server:
        end = time.monotonic() + 400
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).read()
                return self
            except OSError:
                time.sleep(0.5)
        raise TimeoutError(self.log.read_text()[-3000:])

    def __exit__(self, *_error) -> None:
        self.process.terminate()
        self.process.wait(30)


def weights(folder: Path, device: str, one_by_one: bool) -> list[tuple[str, torch.Tensor]]:
    """Random bfloat16 tensors by Hugging Face's names; the experts of a layer as one tensor each of gate and up, which
    are views of one, and of down, as the trainer has them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    generator, inner = torch.Generator(device).manual_seed(0), getattr(config, "moe_intermediate_size", 0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)

    named = [(name, drawn(*p.shape)) for name, p in model.named_parameters() if ".experts." not in name
             and not (config.tie_word_embeddings and name == "lm_head.weight")]
    for layer in range(config.num_hidden_layers if inner else 0):
        where, count = f"model.layers.{layer}.mlp.experts.0-{config.num_experts - 1}", config.num_experts
        up, down = drawn(count, 2 * inner, config.hidden_size), drawn(count, config.hidden_size, inner)
        named += [(f"{where}.gate_proj.weight", up[:, :inner]), (f"{where}.up_proj.weight", up[:, inner:]),
                  (f"{where}.down_proj.weight", down)]
    return [pair for name, tensor in named for pair in apart(name, tensor)] if one_by_one else named


def copied(size: int) -> float:
    """Seconds of a device copy of this many bytes, best of ten: it reads and writes each."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target, best = torch.empty_like(source), float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best


def _peer(port: int, size: int) -> None:
    """The other end of `broadcast_seconds`."""
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2)
    flat = torch.empty(size, dtype=torch.uint8, device="cuda")
    for _ in range(10):
        dist.broadcast(flat, 0)
    torch.cuda.synchronize()


def broadcast_seconds(size: int) -> float:
    """Seconds of an NCCL broadcast of this many bytes from the second GPU to the first, best of the last nine."""
    import torch.distributed as dist
    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    peer = mp.get_context("spawn").Process(target=_peer, args=(port, size))
    peer.start()
    torch.cuda.set_device(1)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2)
    flat, times = torch.empty(size, dtype=torch.uint8, device="cuda"), []
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        dist.broadcast(flat, 0)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    peer.join(60)
    dist.destroy_process_group()
    return min(times[1:])


@contextlib.contextmanager
def unverified(sender: IpcSender | BroadcastSender) -> Iterator[None]:
    """Syncs that ask for no report and add nothing up, here or there. The server still closes what it opened of ours
    with the last bucket: otherwise the next sync would do that, and this one would seem cheaper than it is."""
    add, before = Ledger.add, sender._before
    if isinstance(sender, BroadcastSender):
        sender._before = None

    def counted(ledger: Ledger, named, **_options) -> None:
        add(ledger, named, sums_too=False)

    closed = patch.object(IpcSender, "_request", lambda _sender, count: {} if before and count == before[0] else None)
    unsaid = patch.object(Servers, "verify", lambda *_args: {"verify_s": 0.0, "add_up_s": 0.0})
    with closed, patch.object(Ledger, "add", counted), unsaid:
        yield
    sender._before = before


class Trainer:
    """A rank that sends these tensors, in this thread; what the loop has as a handle."""

    def __init__(self, held: list[tuple[str, torch.Tensor]]):
        self.held = held

    async def connect(self, sender: IpcSender | BroadcastSender) -> None:
        sender.open(Rank())
        self.sender = sender

    async def send(self, version: int) -> dict[str, float]:
        begin = time.perf_counter()
        figures = self.sender.send(iter(self.held), version)  # as the trainer's stream: tensors that are there
        return {**figures, "send_s": time.perf_counter() - begin}


async def timed(sync: ServerSync, trainer: Trainer, engine: SglangEngine, version: int) -> dict[str, float]:
    """Figures of a sync of new values, with the seconds of the whole: from the pause until the engine serves them."""
    for _, tensor in trainer.held:
        tensor.mul_(1.0 + 2**-7)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    figures = await sync.sync(trainer, engine, version)
    return {**figures, "whole_s": time.perf_counter() - begin}


async def turns(kind: str, url: str, settings: Settings, held: list[tuple[str, torch.Tensor]],
                gpus: tuple[int, ...], count: int) -> tuple[dict, list[dict], list[dict]]:
    """Figures of the first sync, of those with the verification, and of those without."""
    config = RunConfig(checkpoint=Checkpoint(hf_checkpoint=settings.checkpoint, run_dir=tempfile.mkdtemp()),
                       rollout=Rollout(engine="sglang"), debug=Debug(debug_rollout_only=True),
                       options={"sglang": {"router": "none", "rollout_external": True,
                                           "rollout_external_engine_addrs": [url.removeprefix("http://")]}})
    engine, trainer = SglangEngine(config, None, None), Trainer(held)
    made, target = (IpcSender if kind == "ipc" else BroadcastSender), Target("engine 0", url, gpus=gpus)
    sync = ServerSync(config, lambda _targets: made(settings, (target,)))
    await engine.start()
    try:
        first, verified, without = await timed(sync, trainer, engine, 1), [], []
        for turn in range(2 * count):
            with contextlib.nullcontext() if turn % 4 in (0, 3) else unverified(trainer.sender):  # each as often first
                found = await timed(sync, trainer, engine, turn + 2)
            (verified if turn % 4 in (0, 3) else without).append(found)
        trainer.sender.close()
    finally:
        await engine.stop()
    return first, verified, without


def cost(key: str, verified: list[dict], without: list[dict]) -> dict[str, float]:
    """What the verification costs of one duration, by medians."""
    median, plain = (statistics.median(one[key] for one in some) for some in (verified, without))
    return {key: round(median, 5), f"{key}_without": round(plain, 5), f"{key}_best": round(min(
        one[key] for one in verified), 5), f"{key}_cost": round(1 - plain / median, 4)}


def measure(kind: str, shape: str, buffer: int, one_by_one: bool) -> dict[str, object]:
    """The figures of one shape."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    folder, mixed = Path(tempfile.mkdtemp()), "num_experts" in SHAPES[shape]
    words = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []} if mixed else {}
    (Qwen3MoeConfig if mixed else Qwen3Config)(
        vocab_size=151936, head_dim=128, max_position_embeddings=4096, dtype="bfloat16",
        architectures=[f"Qwen3{'Moe' if mixed else ''}ForCausalLM"], **words, **SHAPES[shape]).save_pretrained(folder)
    device = "cuda:0" if kind == "ipc" else "cuda:1"
    torch.cuda.set_device(device)
    held = weights(folder, device, one_by_one)
    size = sum(tensor.numel() * 2 for _, tensor in held)
    reference = copied(min(size, 2**32)) * size / min(size, 2**32) if kind == "ipc" else broadcast_seconds(buffer)
    settings = Settings(limit=buffer, timeout=120, source="bfloat16", target="bfloat16",
                        heads=SHAPES[shape]["num_key_value_heads"], tied=SHAPES[shape]["tie_word_embeddings"],
                        layers=SHAPES[shape]["num_hidden_layers"], checkpoint=str(folder))
    with Server(folder) as server:
        first, verified, without = asyncio.run(turns(
            kind, server.url, settings, held, (0,) if kind == "ipc" else (), MIXED if mixed else DENSE))
    unit, best = size / reference if kind == "ipc" else buffer / reference, min(one["send_s"] for one in verified)
    return {"kind": kind, "shape": shape, "tensors": first["tensors"], "gb": round(size / 1e9, 3),
            "first_s": round(first["whole_s"], 4),
            **cost("whole_s", verified, without), **cost("send_s", verified, without),
            "add_up_s": round(statistics.median(one["add_up_s"] for one in verified), 5),
            "compare_s": round(statistics.median(one["verify_s"] for one in verified), 5),
            "bandwidth_gb_s": round(unit / 1e9, 1), "share_of_bandwidth": round(size / best / unit, 4)}


if __name__ == "__main__":
    words = sys.argv[1:]
    one_by_one = "--apart" in words
    kind, *shapes = [word for word in words if word != "--apart"] or ["ipc"]
    for each in shapes or list(SHAPES):
        each, _, given = each.partition(":")
        for size in [int(given)] if given else (512, 2048):
            print(json.dumps({"bucket_mib": size, **measure(kind, each, size * 1024**2, one_by_one)}), flush=True)
