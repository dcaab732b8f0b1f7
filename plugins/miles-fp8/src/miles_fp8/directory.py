"""A Hugging Face directory in FP8, written from a plain one a tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from miles_local.weights import read_tensors
from miles_megatron.shards import stored_tensors, tensor_files
from miles_megatron.weights import export_hf

from miles_core.errors import CheckpointError
from miles_core.reading import parse_json, reading
from miles_fp8.recipe import Held, plain_key, plain_modules
from miles_fp8.stream import quantised


def convert(source: Path, out: Path, fp8_format: Held) -> str:
    """Write `source` to `out` with its linear layers in FP8; what was written, in words.

    Raises:
        CheckpointError: a source that is quantised already, that has no linear layers by the names of Hugging Face's
            decoders, or that cannot be read.
    """
    with reading(str(source / "config.json"), CheckpointError):
        config = parse_json((source / "config.json").read_text(encoding="utf-8"))
        if "quantization_config" in config:
            raise CheckpointError("the checkpoint is quantised already",
                                  code="fp8-already-quantised", who=str(source / "config.json"),
                                  got=config["quantization_config"].get("quant_method"), fix="convert an unquantised "
                                                                                             "checkpoint")
    files = sorted(set(tensor_files(source).values()))
    shapes = {name: one.shape for file in files for name, one in stored_tensors(file).items()}
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    taken = [name for name in matrices if fp8_format.quantises(name, shapes[name])]
    if not taken:
        raise CheckpointError("no tensor has the name of a linear layer's weight", code="fp8-no-linear-layers",
                              who=str(source), got=f"{len(shapes)} tensors",
                              fix="use a decoder with Hugging Face tensor names")
    left = plain_modules(set(matrices) - set(taken))
    more = {"quantization_config": {**fp8_format.config, plain_key(fp8_format.recipe): left}}
    more |= {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
    before = sum(file.stat().st_size for file in files)
    export_hf(out, source, quantised(_tensors(source), fp8_format), config=more)
    after = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    kind = "NVFP4" if fp8_format.tiles.four_bits else f"FP8 ({fp8_format.recipe})"
    return (f"{len(taken)} of {len(shapes)} tensors in {kind}, {after / 1e6:,.1f} MB of "
            f"{before / 1e6:,.1f} MB")


def _tensors(source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    yield from read_tensors(source)
