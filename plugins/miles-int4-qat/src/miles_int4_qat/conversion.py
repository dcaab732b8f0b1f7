"""`miles convert hf-to-int4`: a Hugging Face directory whose weights are packed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from miles_megatron.readers import Readers
from miles_megatron.shards import tensor_files
from miles_megatron.weights import export_hf

from miles_core.errors import CheckpointError, ConfigError
from miles_core.reading import parse_json, reading
from miles_int4_qat.names import check_width, chosen, quantization_config
from miles_int4_qat.stream import packed


def convert(source: Path, out: Path, group_size: int, targets: str) -> str:
    """Write `out`; returns what became of it, in words.

    Raises:
        CheckpointError: the source's weights are quantised already.
        ConfigError: nothing to pack, or groups do not divide an input axis.
    """
    with reading(str(source / "config.json"), CheckpointError):
        quantization = parse_json((source / "config.json").read_text(encoding="utf-8")).get("quantization_config")
        if quantization:
            raise CheckpointError("the weights are already quantised", code="int4-already-quantised", who=str(source),
                                  got=quantization.get("quant_method"), fix="convert the unquantised weights")
    files = tensor_files(source)
    names = chosen(files, targets)
    if not names:
        raise ConfigError("no weight would be packed", code="int4-nothing-packed", got=f"targets {targets}",
                          who=str(source),
                          fix="choose other targets; fused experts have to be split into one weight each")
    before, after = [0], [0]

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in sorted(files, key=lambda name: (files[name], name)):
            tensor = read.tensor(name)
            before[0] += tensor.nbytes
            yield name, tensor

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in packed(tensors(), names, group_size, None):
            after[0] += tensor.nbytes
            yield name, tensor

    with Readers(files) as read:
        for name in sorted(names):
            check_width(name, read.shape(name)[-1], group_size)
        export_hf(out, source, counted(),
                  config={"quantization_config": quantization_config(files, names, group_size)})
    return (f"{len(names)} of {len(files)} tensors in int4, groups of {group_size}; {before[0] / 1e9:.3f} GB became "
            f"{after[0] / 1e9:.3f} GB, {before[0] / after[0]:.2f}x smaller")
