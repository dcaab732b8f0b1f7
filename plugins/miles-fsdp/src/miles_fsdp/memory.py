"""What --plan says of this trainer: ranks, micro-batches, and the memory of what is sharded. No torch here."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from miles_local.muon_options import LAYER, MUON

from miles_core.config.hardware import trainer_gpus
from miles_core.config.tables import RunConfig
from miles_fsdp.plugin import FsdpOptions

GIB = 2**30
MASTER, GRADIENT, MOMENT = 4, 4, 4
"""Bytes of a parameter in float32; AdamW has two moments, and Muon one."""
TEXT = re.compile(r"(^|\.)(language_model|lm_head)\.|^(model\.)?(embed_tokens|layers|norm)\.")
"""Begins the names of a text model, where it lies beside what sees."""


def lines(config: RunConfig, options: FsdpOptions, *, frozen: bool = False, images: bool = False,
          ) -> Iterator[tuple[str, str]]:
    """(title, line), in the order of the plan.

    Args:
        frozen: what the checkpoint holds does not train.
        images: what reads images is part of the model, and gathered whole for a pass.
    """
    perf, ranks = config.perf, trainer_gpus(config)
    size = f"{perf.micro_batch_size} samples"
    if perf.use_dynamic_batch_size:
        size = f"at most {(perf.max_tokens_per_gpu or 0) * options.context_parallel_size} tokens"
    yield "batch arithmetic", f"micro-batches of {size}, the same number on each rank"
    shared = f", {context} share the rows of a sample" if (context := options.context_parallel_size) > 1 else ""
    shared += f", {tensor} share the projections of a layer" if (tensor := options.tensor_parallel_size) > 1 else ""
    yield "layout", f"{ranks} trainer rank{'s' * (ranks > 1)} (fsdp){shared}, {'bfloat16' if perf.bf16 else 'float32'}"
    folder = Path(str(config.checkpoint.hf_checkpoint))
    if (count := parameters(folder)) is None:
        return
    muon = config.optimizer.optimizer in MUON
    moments = 2 * count - (parameters(folder, matrices=True) or 0) * muon
    computed = 2 if perf.bf16 else 4
    parts = {"frozen weights": count * computed} if frozen else {
        "weights": count * MASTER, "gradients": count * GRADIENT, "optimizer": moments * MOMENT}
    other = Path(config.checkpoint.load or "", "config.json").is_file()  # the actor begins with other weights
    if config.algorithm.needs_reference and (other or not frozen):
        parts["reference, in host memory where there is a GPU"] = count * computed
    copied = (tensor - 1) * (parameters(folder, beside_layers=True) or 0) / count  # on each rank that shares layers
    sizes = ", ".join(f"{name} {size * (1 + copied) / ranks / GIB:.2g}" for name, size in parts.items())
    where = "host memory" if options.cpu_offload else "each rank"
    if frozen:
        each = MASTER + GRADIENT + (2 - muon) * MOMENT
        sizes += f"; {each} bytes for each parameter that plugins add, shared among ranks"
    if images and (tower := parameters(folder, beside_text=True)):
        copies, gradients = (1, "") if frozen else (2, " and its gradients")
        whole = tower * computed * copies / GIB
        sizes += f"; whole in each rank during a pass, what reads images{gradients}: {whole:.2g}"
    yield "memory", f"trainer, GiB in {where} beside activations: {sizes}"
    if config.checkpoint.async_save and not frozen:
        saved = count * MASTER + (0 if config.checkpoint.no_save_optim else moments * MOMENT)
        yield "memory", f"host, GiB of a rank that writes checkpoints (--async-save): {saved / ranks / GIB:.2g}"


def parameters(folder: Path, *, matrices: bool = False, beside_text: bool = False,
               beside_layers: bool = False) -> int | None:
    """Numbers in a directory's safetensors files, by their headers; None where there are none.

    Args:
        matrices: only what Muon moves, or nearly: the checkpoint may hold experts one by one.
        beside_text: only what is no part of the text model, such as a vision tower.
        beside_layers: only embeddings, output layers and the like.
    """
    files = sorted(folder.glob("*.safetensors"))
    shapes = [pair for path in files for pair in stored_shapes(path)]
    return sum(math.prod(shape) for name, shape in shapes if (not matrices or _is_matrix(name, shape)) and not (
        beside_text and TEXT.search(name)) and not (beside_layers and ".layers." in name)) if files else None


def stored_shapes(path: Path) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of a safetensors file's tensors."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return ((name, entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _is_matrix(name: str, shape: list[int]) -> bool:
    return len(shape) in (2, 3) and LAYER.search(name) is not None and not name.endswith("bias")
