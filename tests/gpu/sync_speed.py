"""Seconds of a weight sync to a real SGLang server on GPUs, by random models of known shapes.

    NCCL_CUMEM_ENABLE=0 python tests/gpu/sync_speed.py ipc 0.6B 8B        one GPU
    NCCL_CUMEM_ENABLE=0 python tests/gpu/sync_speed.py broadcast 0.6B 8B  two GPUs
    ... 8B:2048                                                           buckets of one size, in MiB

Prints a line of JSON for each shape: the best of 21 syncs, its share of the device's copy bandwidth (ipc) or of a plain
NCCL broadcast's bandwidth between the same two GPUs (broadcast), and what the verification costs: `cost_share` compares
the medians of those syncs and of 21 without it (`median_s`, `without_s`), which take turns with them on one server.
`verification_share` is only what follows the servers' answers. Figures go to docs/benchmarks.md.
"""

from __future__ import annotations

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

from miles_core.backends.sync.broadcast import BroadcastSender
from miles_core.backends.sync.ipc import IpcSender
from miles_core.backends.sync.sender import Servers, Settings
from miles_core.backends.sync.servers import Target
from miles_core.backends.sync.verify import Ledger
from miles_core.types import Rank

SHAPES = {
    "0.6B": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                 num_key_value_heads=8, tie_word_embeddings=True),
    "8B": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
               num_key_value_heads=8, tie_word_embeddings=False),
}
SERVED = Path(__file__).parents[2] / "miles_core" / "backends" / "sglang" / "served"
FLAGS = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
         "--skip-server-warmup", "--skip-tokenizer-init", "--disable-cuda-graph", "--mem-fraction-static", "0.3",
         "--load-format", "dummy", "--custom-weight-loader", "miles_weights.load", "--host", "127.0.0.1"]
TURNS = 21
"""Syncs with the verification, and as many without."""


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


def weights(folder: Path, device: str) -> list[tuple[str, torch.Tensor]]:
    """Random bfloat16 tensors by Hugging Face's names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = [(name, p.shape) for name, p in model.named_parameters()
             if not (config.tie_word_embeddings and name == "lm_head.weight")]
    generator = torch.Generator(device).manual_seed(0)
    return [(name, torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator))
            for name, shape in names]


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
    with closed, patch.object(Ledger, "add", counted), patch.object(Servers, "verify", lambda *_args: 0.0):
        yield
    sender._before = before


def timed(sender: IpcSender | BroadcastSender, held: list[tuple[str, torch.Tensor]],
          version: int) -> tuple[float, dict[str, float]]:
    """Seconds and figures of a sync of new values."""
    for _, tensor in held:
        tensor.mul_(1.0 + 2**-7)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    figures = sender.send(iter(held), version)  # as the trainer's stream: tensors that are there
    return time.perf_counter() - begin, figures


def measure(kind: str, shape: str, buffer: int) -> dict[str, object]:
    """The figures of one shape."""
    from transformers import Qwen3Config

    folder = Path(tempfile.mkdtemp())
    Qwen3Config(vocab_size=151936, head_dim=128, max_position_embeddings=4096, dtype="bfloat16",
                architectures=["Qwen3ForCausalLM"], **SHAPES[shape]).save_pretrained(folder)
    device = "cuda:0" if kind == "ipc" else "cuda:1"
    torch.cuda.set_device(device)
    held = weights(folder, device)
    size = sum(tensor.numel() * 2 for _, tensor in held)
    reference = copied(min(size, 2**32)) * size / min(size, 2**32) if kind == "ipc" else broadcast_seconds(buffer)
    tied = SHAPES[shape]["tie_word_embeddings"]
    settings = Settings(limit=buffer, timeout=120, source="bfloat16", target="bfloat16", tied=tied, heads=8,
                        layers=SHAPES[shape]["num_hidden_layers"], checkpoint=str(folder))
    with Server(folder) as server:
        target = Target("engine 0", server.url, gpus=(0,) if kind == "ipc" else ())
        sender = (IpcSender if kind == "ipc" else BroadcastSender)(settings, (target,))
        sender.open(Rank())
        first, turns, without = timed(sender, held, 1)[0], [], []
        for turn in range(2 * TURNS):
            if turn % 4 in (0, 3):  # each is as often the one after its like
                turns.append(timed(sender, held, turn + 2))
            else:
                with unverified(sender):
                    without.append(timed(sender, held, turn + 2)[0])
        sender.close()
    seconds, figures = min(turns, key=lambda turn: turn[0])
    median, plain = statistics.median(turn[0] for turn in turns), statistics.median(without)
    unit = size / reference if kind == "ipc" else buffer / reference
    return {"kind": kind, "shape": shape, "gb": round(size / 1e9, 3), "first_s": round(first, 4),
            "best_s": round(seconds, 4), "transfer_s": round(figures["transfer_s"], 4),
            "verify_s": round(figures["verify_s"], 4), "add_up_s": round(figures["add_up_s"], 4),
            "verification_share": round(figures["verify_s"] / seconds, 4),
            "median_s": round(median, 5), "without_s": round(plain, 5), "without_best_s": round(min(without), 5),
            "cost_share": round(1 - plain / median, 4),
            "bandwidth_gb_s": round(unit / 1e9, 1), "share_of_bandwidth": round(size / seconds / unit, 4)}


if __name__ == "__main__":
    kind, *shapes = sys.argv[1:] or ["ipc"]
    for each in shapes or list(SHAPES):
        each, _, given = each.partition(":")
        for size in [int(given)] if given else (512, 2048):
            print(json.dumps({"bucket_mib": size, **measure(kind, each, size * 1024**2)}), flush=True)
