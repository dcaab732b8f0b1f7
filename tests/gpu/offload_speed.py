"""Seconds in which the trainer gives its memory to an engine on the same GPU and takes it back.

    python tests/gpu/offload_speed.py                 the 4B mixture of trainer_speed.py
    python tests/gpu/offload_speed.py qwen3-4b --turns 6
    python tests/gpu/offload_speed.py --tiny          a tiny mixture, on a CPU too

Each turn does what a colocated run does: `leave_s`, gradients and optimizer state leave; `sync_s`, two buckets are
taken, --sync seconds pass, and the buckets are given back, which waits for copies under way; `weights_s`, the weights
leave; then all comes back (`back_s`), log-probs are computed and the optimizer steps (`step_s`; `resident_step_s` is
that of a step without offload). Beside these it prints what the copies would take at the bandwidth of one large pinned
copy each way, the bytes of each kind, and how long pinning took. A step that finds other state than it left would have
another loss: `apart_by` compares the losses and gradient norms of two trainers, one of which never offloads.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import shlex
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from trainer_speed import QWEN3, RUN, SHAPES, rollout

TINY = QWEN3 | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 32,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
                "intermediate_size": 48, "tie_word_embeddings": False, "num_experts": 4,
                "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
                "decoder_sparse_step": 1, "mlp_only_layers": []}
TAGS = ("weights", "gradients", "optimizer")


def synchronise() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clocked(call, *args) -> float:
    """Seconds until the call returns: what a run waits for; copies may go on."""
    begin = time.perf_counter()
    call(*args)
    return time.perf_counter() - begin


@contextlib.contextmanager
def made(shape: dict, tokens: int, length: int, flags: list[str]):
    """A trainer with random weights; it is loaded."""
    from miles_megatron.model_on_rank import ModelOnRank

    from miles_core.build import trainer_part
    from miles_core.plugins.plan import prepare
    from miles_core.types import Rank

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "run.toml").write_text(RUN.format(folder=folder, tokens=tokens, length=length,
                                                groups=tokens // length // 2))
    plan = prepare(folder / "run.toml", ["--plan-without-weights", *flags])
    ModelOnRank.fill = lambda self, source: None  # there are no files: Megatron's random weights stay
    trainer = trainer_part(list(plan.selected), plan.config, Rank())
    trainer.load()
    try:
        yield trainer
    finally:
        trainer.close()


def stepped(trainer, tokens: int, length: int) -> tuple[float, float]:
    """(seconds, loss) of log-probs and a step."""
    begin = time.perf_counter()
    trainer.take_batch(rollout(tokens, length))
    trainer.score()
    trainer.advantage()
    metrics = trainer.step(0)
    synchronise()
    trainer.end_batch()
    return time.perf_counter() - begin, metrics["train/loss"] + metrics["train/grad_norm"]


def synced(seconds: float) -> None:
    """As a sync by `ipc`: two buckets are taken, and given back in the end."""
    import torch

    bucket = torch.ones(2**30, dtype=torch.uint8, device="cuda") if torch.cuda.is_available() else None
    time.sleep(seconds)
    del bucket
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def turn(trainer, sync: float, work) -> dict[str, float]:
    """One rollout's hand-over there and back, and the step after it."""
    synchronise()
    seconds = {"leave_s": clocked(trainer.offload, ["gradients", "optimizer"])}
    seconds["sync_s"] = clocked(synced, sync)
    seconds["weights_s"] = clocked(trainer.offload, ["weights"])
    seconds["back_s"] = clocked(trainer.onload, list(TAGS))
    seconds["step_s"], seconds["loss"] = work()
    return seconds


def bandwidth(size: int = 2**30) -> tuple[float, float]:
    """Bytes a second of one pinned copy to the host and back, best of five; 0 without a GPU."""
    import torch
    from miles_local.transfer import host_memory

    if not torch.cuda.is_available():
        return 0.0, 0.0
    device, host = torch.empty(size, dtype=torch.uint8, device="cuda"), host_memory(size, True)

    def best(target, source) -> float:
        times = []
        for _ in range(5):
            synchronise()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            synchronise()
            times.append(time.perf_counter() - begin)
        return size / min(times)

    return best(host, device), best(device, host)


def pinned(trainer) -> float:
    """Have host memory pinned as a colocated run does while its servers start; seconds until it is there."""
    memory, before = trainer.models.actor.memory, set(threading.enumerate())
    begin = time.perf_counter()
    memory.reserve()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    return time.perf_counter() - begin


def resident(turns: int, *how) -> list[tuple[float, float]]:
    """Steps of a trainer that never offloads."""
    with made(*how) as trainer:
        return [stepped(trainer, *how[1:3]) for _ in range(turns + 1)]


def offloaded(turns: int, sync: float, *how) -> tuple[dict[str, object], dict[str, int], list[float]]:
    """(figures, bytes of each tag, losses) of a trainer that offloads between two steps."""
    with made(*how) as trainer:
        figures: dict[str, object] = {"pinning_s": round(pinned(trainer), 2)}
        figures["first_s"] = round(clocked(trainer.offload, list(TAGS)) + clocked(trainer.onload, list(TAGS)), 2)
        losses, memory = [stepped(trainer, *how[1:3])[1]], trainer.models.actor.memory
        held = {tag: memory.held(tag) for tag in TAGS}
        seconds = [turn(trainer, sync, lambda: stepped(trainer, *how[1:3])) for _ in range(turns)]
        losses += [one.pop("loss") for one in seconds]
        figures["pinned_gb"] = round(sum(host.nbytes for host in memory.host.values()) / 1e9, 2)
        figures["turns"] = [{key: round(one, 3) for key, one in each.items()} for each in seconds]
        return figures, held, losses


def main() -> int:
    """Prints a line of JSON; the status is 1 if an offloaded trainer trains otherwise."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("shape", nargs="?", default="moe-4b", choices=list(SHAPES))
    arguments.add_argument("--tokens", type=int, default=16384)
    arguments.add_argument("--length", type=int, default=2048)
    arguments.add_argument("--turns", type=int, default=4)
    arguments.add_argument("--sync", type=float, default=0.3, help="seconds from optimizer state to weights")
    arguments.add_argument("--flags", default="", help="of miles run")
    arguments.add_argument("--tiny", action="store_true")
    given = arguments.parse_args()
    how = (TINY, 64, 16) if given.tiny else (SHAPES[given.shape], given.tokens, given.length)
    how = (*how, shlex.split(given.flags))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:  # the GPU has room for one trainer
        alone = (resident if given.tiny else lambda *words: other.submit(resident, *words).result())(given.turns, *how)
    figures, held, losses = offloaded(given.turns, 0.0 if given.tiny else given.sync, *how)
    down, up = bandwidth()
    moved = held["weights"] + held["optimizer"]
    apart = max(abs(ours - theirs) for ours, (_, theirs) in zip(losses, alone, strict=True))
    print(json.dumps({
        "shape": "tiny" if given.tiny else given.shape, "gb": {tag: round(size / 1e9, 2) for tag, size in held.items()},
        "copies_alone_s": [round(moved / rate, 3) if rate else None for rate in (down, up)],
        "gb_per_s": [round(down / 1e9, 1), round(up / 1e9, 1)], **figures,
        "resident_step_s": round(min(seconds for seconds, _ in alone[1:]), 3), "apart_by": apart}))
    # On a GPU sums have no fixed order; state that is not what it was is another loss altogether.
    return int(apart > (0.05 if down else 0))


if __name__ == "__main__":
    sys.exit(main())
