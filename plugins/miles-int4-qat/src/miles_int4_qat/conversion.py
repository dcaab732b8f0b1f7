"""`miles convert hf-to-int4`: a Hugging Face directory whose weights are packed; int4-to-hf: one where they are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from miles_megatron import hf_config
from miles_megatron.convert import as_stored
from miles_megatron.disk_names import split
from miles_megatron.readers import Readers
from miles_megatron.shards import outlines, tensor_files
from miles_megatron.weights import export_hf

from miles_core.errors import CheckpointError, ConfigError
from miles_core.reading import parse_json, reading
from miles_int4_qat.names import check_width, chosen, quantization_config, stated
from miles_int4_qat.stream import packed, unpacked


def convert(source: Path, out: Path, group_size: int, targets: str) -> str:
    """Write `out`; returns what became of it, in words.

    Raises:
        CheckpointError: the source's weights are quantised already.
        ConfigError: nothing to pack, or groups do not divide an input axis.
        OwnerError: experts lie in one tensor, and no plugin knows how.
    """
    with reading(str(source / "config.json"), CheckpointError):
        quantization = parse_json((source / "config.json").read_text(encoding="utf-8")).get("quantization_config")
        if quantization:
            raise CheckpointError("the weights are already quantised", code="int4-already-quantised", who=str(source),
                                  got=quantization.get("quant_method"), fix="convert the unquantised weights")
    files, weight_map, stored = tensor_files(source), as_stored(source), outlines(source)
    names = chosen(dict(split(stored, weight_map, lambda _: True)), targets)
    shapes = {name: one.shape for name, one in split(stored, weight_map, names.__contains__)}
    if not names:
        raise ConfigError("no weight would be packed", code="int4-nothing-packed", got=f"targets {targets}",
                          who=str(source),
                          fix="choose other targets; of gpt-oss's experts none is packed")
    before, after = [0], [0]

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in sorted(files, key=lambda name: (files[name], name)):
            tensor = read.tensor(name)
            before[0] += tensor.nbytes
            yield name, tensor

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in packed(split(tensors(), weight_map, names.__contains__), names, group_size, None):
            after[0] += tensor.nbytes
            yield name, tensor

    for name in sorted(names):
        check_width(name, shapes[name][-1], group_size)
    with Readers(files) as read:
        export_hf(out, source, counted(),
                  config={"quantization_config": quantization_config(shapes, names, group_size)})
    return (f"{len(names)} of {len(shapes)} tensors in int4, groups of {group_size}; {before[0] / 1e9:.3f} GB became "
            f"{after[0] / 1e9:.3f} GB, {before[0] / after[0]:.2f}x smaller")


def convert_to_plain(source: Path, out: Path) -> str:
    """Write `out` with the weights that an int4 engine computes with, in their scales' dtype; what it did, in words.

    Raises:
        CheckpointError: the source is not packed, or lacks a part of a weight.
        ConfigError: it is quantised in another way.
    """
    if stated(source) is None:
        raise CheckpointError("the weights are not packed", code="int4-source-not-packed", who=str(source),
                              got="plain weights", fix="nothing needs converting")
    files = tensor_files(source)
    names = sorted(files, key=lambda name: (files[name], name))
    with Readers(files) as read:
        export_hf(out, source, unpacked((name, read.tensor(name)) for name in names),
                  config=hf_config.without_quantization(source))
    count = sum(name.endswith(".weight_packed") for name in files)
    return f"{count} weights of {len(files)} tensors are no longer packed"
