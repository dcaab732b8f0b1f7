"""How long training waits for a checkpoint, with --async-save and without, in turns.

    python bench/checkpoint_stall.py                          # a Qwen3 of 147 M parameters; a Markdown table
    python bench/checkpoint_stall.py --layers 2 --hidden 64 --vocab 256 --rounds 1

A random model with the trainer's own optimizer, in bfloat16 with float32 masters, on one rank of the CPU. A stall is
the time until `save` returns, when sampling goes on; with --async-save weights may change when they are copied, which
is the next column and only a wait where training goes on at once. The first save makes the memory that later ones
write over and is given by itself; of the others the median. After each, the checkpoint is waited for, so that no two
share the disk. Both folders have to hold the same bytes in the end.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from pathlib import Path

AIM = 0.1
"""Of a synchronous save's wall time."""


def trained(layers: int, hidden: int, vocab: int) -> dict:
    """The parts of a checkpoint: a random model, its optimizer and schedule."""
    from miles_megatron import cpu, families, model, optimizer
    from transformers import Qwen3Config

    cpu.initialize()
    hf_config = Qwen3Config(
        hidden_size=hidden, intermediate_size=3 * hidden, num_attention_heads=hidden // 32, head_dim=32,
        num_key_value_heads=hidden // 32, vocab_size=vocab, num_hidden_layers=layers, tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    spec = families.FAMILIES["qwen3"].model_spec(hf_config)
    chunk = model.build(model.transformer_config(spec, {}, bf16=True), spec)
    options = optimizer.OptimizerOptions(lr=1e-6, train_iters=1)
    chunks = optimizer.wrap([chunk], chunk.config, options)
    return {"actor": (chunks, *optimizer.make_optimizer(chunks, options))}


def digest(folder: Path) -> str:
    """Of the tensors in a checkpoint."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.distcp")):
        total.update(path.read_bytes())
    return total.hexdigest()


def main() -> None:
    """Measure and print; exit code 1 when a stall misses the aim or the bytes differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; default: the folder of temporary files")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    from miles_megatron import checkpoint
    from miles_megatron.async_save import AsyncSave

    parts = trained(given.layers, given.hidden, given.vocab)
    beside = AsyncSave(3600)
    taken: dict[str, list[tuple[float, ...]]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        for _ in range(given.rounds + 1):
            for how, stalls in taken.items():
                wall, cpu_time = time.perf_counter(), time.thread_time()
                target = checkpoint.save(Path(name, how), 1, parts, async_save=beside if how == "with" else None)
                stall = time.perf_counter() - wall, time.thread_time() - cpu_time
                beside.settle()
                copied = time.perf_counter() - wall
                beside.wait()
                stalls.append((*stall, copied, time.perf_counter() - wall))
        same = digest(Path(name, "with")) == digest(Path(name, "without"))
        size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    count = sum(parameter.numel() for chunk in parts["actor"][0] for parameter in chunk.parameters())
    print(f"{count / 1e6:.0f} M parameters, {size / 1e9:.2f} GB a checkpoint, bytes {'equal' if same else 'DIFFER'}\n\n"
          "| --async-save | stall, s | CPU s of it | copied after, s | published after, s | first stall, s |\n"
          "|---|---|---|---|---|---|")
    medians = {how: [statistics.median(column) for column in zip(*stalls[1:], strict=True)]
               for how, stalls in taken.items()}
    for how, figures in medians.items():
        print(f"| {how} | {' | '.join(f'{seconds:.2f}' for seconds in (*figures, taken[how][0][0]))} |")
    shares = [medians["with"][i] / medians["without"][i] for i in (0, 1)]
    print(f"\nThe stall is {shares[0]:.1%} of that without it, {shares[1]:.1%} in CPU time.")
    raise SystemExit(0 if same and shares[0] <= AIM else 1)


if __name__ == "__main__":
    main()
