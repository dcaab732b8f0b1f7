"""Peak memory of `miles convert` in both directions, over that of the process before, in sizes of the largest shard.

    python bench/convert_memory.py                              # 1.2 GB in files of 250 MB; a Markdown table
    python bench/convert_memory.py --size 64 --shard 16 --processes 1

A random Qwen3 in float32 is made for it in a temporary folder. Each process converts a tiny one first, so that all that
is imported is there; its resident memory then is the baseline, and the kernel's high-water mark of each direction the
peak. Several processes find each other as torchrun's do. The round trip has to give the original, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BOUND = 1.5
MB = 10**6


def make(folder: Path, size: int, shard: int) -> None:
    """A checkpoint of about `size` bytes in files of at most `shard`, written a tensor at a time."""
    import torch
    from miles_megatron import shards
    from transformers import AutoModelForCausalLM, Qwen3Config

    hidden = max(64, int((0.77 * shard / 46) ** 0.5) // 64 * 64)
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=3 * hidden, num_attention_heads=hidden // 32, head_dim=32,
        num_key_value_heads=hidden // 64, vocab_size=max(64, shard // 8 // hidden), tie_word_embeddings=False,
        num_hidden_layers=max(1, round((size - shard) / (46 * hidden**2))), architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: list(one.shape) for name, one in AutoModelForCausalLM.from_config(config).state_dict().items()}
    files: list[dict[str, list[int]]] = [{}]
    held = 0
    for name, shape in shapes.items():
        length = 4 * torch.Size(shape).numel()
        if files[-1] and held + length > shard:
            files.append({})
            held = 0
        files[-1][name], held = shape, held + length
    generator = torch.Generator().manual_seed(0)
    for number, names in enumerate(files):
        layout = {name: (torch.float32, shape) for name, shape in names.items()}
        with shards.writing(folder / shards.shard_name(number, len(files)), layout) as append:
            for shape in names.values():
                append(torch.empty(shape).uniform_(-1, 1, generator=generator))
    shards.write_index(folder, files, 0)


def kilobytes(field: str) -> int:
    """A field of /proc/self/status."""
    return int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1])


def convert(*words: object) -> int:
    """Do a conversion; the most bytes of resident memory that the process had meanwhile."""
    from miles_core.cli import cli

    ctypes.CDLL(None).malloc_trim(0)  # what an earlier conversion left on the heap is not this one's
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    with contextlib.redirect_stdout(io.StringIO()):
        cli(["convert", *map(str, words)], standalone_mode=False)
    peak = 1024 * kilobytes("VmHWM")
    if "RANK" in os.environ:
        import torch.distributed

        torch.distributed.barrier()  # the first process has published
    return peak


def child(folder: Path, shard: int) -> None:
    """One process: both directions of the tiny checkpoint, then of the large one; prints what they took."""
    for name in ("tiny", "large"):
        before = 1024 * kilobytes("VmRSS")
        hf, dist, back = folder / name, folder / f"{name}-dist", folder / f"{name}-back"
        peaks = (convert("hf-to-dist", hf, dist),
                 convert("dist-to-hf", dist, back, "--hf-checkpoint", hf, "--shard-size", shard))
    print(json.dumps([peak - before for peak in peaks]))


def measure(folder: Path, processes: int, shard: int) -> list[list[int]]:
    """For each process the bytes that hf-to-dist and dist-to-hf take."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(processes):
        env = {"RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        started.append(subprocess.Popen([sys.executable, __file__, "--child", str(folder), "--shard", str(shard / MB)],
                                        stdout=subprocess.PIPE, text=True, env={**os.environ, **env}))
    while None in (codes := [one.poll() for one in started]) and not any(codes):
        time.sleep(0.1)
    if any(codes):
        for one in started:
            one.kill()
        raise SystemExit(f"a process failed: {codes}")
    return [json.loads(one.communicate()[0].splitlines()[-1]) for one in started]


def same(one: Path, other: Path) -> bool:
    """Whether two directories hold the same tensors."""
    import torch
    from miles_megatron import shards

    def tensors(folder: Path) -> dict:
        files = shards.tensor_files(folder)
        held = {file: shards.stored_tensors(file) for file in set(files.values())}
        return {name: held[file][name] for name, file in files.items()}

    left, right = tensors(one), tensors(other)
    for name, stored in left.items() if left.keys() == right.keys() else ():
        a, b = (torch.empty(at.shape, dtype=at.dtype) for at in (stored, right[name]))
        shards.read_into(stored, a)
        shards.read_into(right[name], b)
        if not torch.equal(a, b):
            return False
    return left.keys() == right.keys()


def main() -> None:
    """Measure and print; exit code 1 when a figure misses the bound or the round trip changes a bit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=1200, help="MB of the checkpoint")
    parser.add_argument("--shard", type=float, default=250, help="MB of a file")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    shard = int(given.shard * MB)
    if given.child:
        child(given.child, shard)
        return
    print("| processes | direction | largest shard, MB | peak of a process over its baseline, MB | in shards |\n"
          "|---|---|---|---|---|")
    good = True
    for processes in given.processes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make(folder / "tiny", 10**5, 10**5)
            make(folder / "large", int(given.size * MB), shard)
            taken = measure(folder, processes, shard)
            sources = {"hf-to-dist": folder / "large", "dist-to-hf": folder / "large-back"}
            for number, (direction, files) in enumerate(sources.items()):
                largest = max(file.stat().st_size for file in files.glob("*.safetensors"))
                peak = max(one[number] for one in taken)
                print(f"| {processes} | {direction} | {largest / MB:.1f} | {peak / MB:.1f} | {peak / largest:.2f} |")
                good &= peak <= BOUND * largest
            good &= same(folder / "large", folder / "large-back")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
