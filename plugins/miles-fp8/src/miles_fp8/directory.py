"""A Hugging Face directory in FP8, written from a plain one a tensor at a time, and a plain one from one in FP8."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from miles_local.weights import read_tensors
from miles_megatron import hf_config, mxfp4
from miles_megatron.convert import as_stored
from miles_megatron.readers import Readers
from miles_megatron.shards import outlines, stored_tensors, tensor_files
from miles_megatron.weights import export_hf

from miles_core.errors import CheckpointError, ConfigError
from miles_core.reading import parse_json, reading
from miles_fp8 import nvfp4
from miles_fp8.recipe import (
    OF_ACTIVATIONS,
    READ,
    SCALE_OF_SCALES,
    Held,
    is_excluded,
    of_checkpoint,
    plain_key,
    plain_modules,
)
from miles_fp8.rounding import dequantise
from miles_fp8.stream import apart, quantised


def convert(source: Path, out: Path, fp8_format: Held) -> str:
    """Write `source` to `out` with its linear layers in FP8; what was written, in words.

    Experts that lie in one tensor go apart, as in a weight sync and as engines read them.

    Raises:
        OwnerError: they do, and no plugin knows how.
        CheckpointError: a source that is quantised already, that has no linear layers by the names of Hugging Face's
            decoders, or that cannot be read.
        ConfigError: modules to keep that the source does not have.
    """
    with reading(str(source / "config.json"), CheckpointError):
        config = parse_json((source / "config.json").read_text(encoding="utf-8"))
        if "quantization_config" in config:
            raise CheckpointError("the checkpoint is quantised already",
                                  code="fp8-already-quantised", who=str(source / "config.json"),
                                  got=config["quantization_config"].get("quant_method"), fix="convert an unquantised "
                                                                                             "checkpoint")
    weight_map = as_stored(source)
    shapes = {name: one.shape for name, one in apart(iter(outlines(source)), fp8_format, weight_map, whole=False)}
    matrices = {name for name, shape in shapes.items() if len(shape) in (2, 3)}  # the latter: experts in one tensor
    taken = [name for name in shapes if fp8_format.quantises(name, shapes[name])]
    if not taken:
        raise CheckpointError("no tensor has the name of a linear layer's weight", code="fp8-no-linear-layers",
                              who=str(source), got=f"{len(shapes)} tensors",
                              fix="use a decoder with Hugging Face tensor names")
    if unknown := [one for one in fp8_format.excluded
                   if not any(is_excluded(name.removesuffix(".weight"), [one]) for name in matrices)]:
        raise ConfigError("no module has this name, or a name that begins or ends so", code="fp8-keep-unknown",
                          who="--keep", got=", ".join(unknown), fix="use names of tensors without .weight, such as "
                          f"{taken[0].removesuffix('.weight')}")
    left = plain_modules(matrices - set(taken))
    more = {"quantization_config": {**fp8_format.config, plain_key(fp8_format.recipe): left}}
    more |= {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
    before = sum(file.stat().st_size for file in set(tensor_files(source).values()))
    export_hf(out, source, quantised(
        apart(_tensors(source), fp8_format, weight_map, whole=False), fp8_format), config=more)
    after = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    kind = "NVFP4" if fp8_format.tiles.four_bits else f"FP8 ({fp8_format.recipe})"
    return (f"{len(taken)} of {len(shapes)} tensors in {kind}, {after / 1e6:,.1f} MB of "
            f"{before / 1e6:,.1f} MB")


def convert_to_plain(source: Path, out: Path) -> str:
    """Write `source`, with linear layers in FP8, MXFP4 or NVFP4, to `out` without scales; what was written, in words.

    Scales of activations and of the KV cache stay behind, too. Weights get the dtype that config.json names; every
    other tensor keeps its own.

    Raises:
        CheckpointError: a source that is not in FP8, lacks the scale of a weight, or cannot be read.
        ConfigError: FP8 of a kind that this plugin does not read.
    """
    stated = hf_config.quantization(source)
    fp8_format = of_checkpoint(stated, source) if stated else None
    if fp8_format is None:
        raise CheckpointError("the checkpoint is not in FP8", code="fp8-source-not-fp8",
                              got=stated.get("quant_method", "plain weights"), who=str(source / "config.json"),
                              fix="compressed-tensors' INT4 is for miles convert int4-to-hf; "
                              "of other kinds use the checkpoint that it was made from")
    files, dtype = tensor_files(source), _dtype(source)
    stored = {name: one for file in set(files.values()) for name, one in stored_tensors(file).items()}
    # Beside weights in FP8 there are experts in MXFP4 (DeepSeek-V4), two numbers in what calls itself an int8.
    dtypes = (torch.uint8,) if fp8_format.tiles.four_bits else (torch.float8_e4m3fn, torch.int8)
    rounded = [name for name in files if name.endswith("weight") and stored[name].dtype in dtypes]
    scales = {name: _scales(name, fp8_format, files, source) for name in rounded}
    beside = {scale for several in scales.values() for scale in several}

    def tensors(read: Readers) -> Iterator[tuple[str, torch.Tensor]]:
        left = (name for name in files.keys() - beside if not name.endswith(OF_ACTIVATIONS))
        for name in sorted(left, key=lambda name: (files[name], name)):
            tensor = read.tensor(name)
            if name in scales:
                tensor = _plain(tensor, [read.tensor(scale) for scale in scales[name]], fp8_format).to(dtype)
            yield name, tensor

    with Readers(files) as read:
        export_hf(out, source, tensors(read), config=hf_config.without_quantization(source))
    before, after = (sum(file.stat().st_size for file in several)
                     for several in (set(files.values()), out.glob("*.safetensors")))
    return f"{len(rounded)} of {len(files)} tensors in {dtype}, {after / 1e6:,.1f} MB of {before / 1e6:,.1f} MB"


def _scales(weight: str, fp8_format: Held, files: Mapping[str, Path], source: Path) -> list[str]:
    module = weight.removesuffix("weight")
    scale = next((module + end for end in READ if module + end in files), module + READ[0])
    wanted = [scale, module + SCALE_OF_SCALES] if fp8_format.tiles.four_bits else [scale]
    if missing := [name for name in wanted if name not in files]:
        raise CheckpointError(f"{weight} has no scale", got=f"no {missing[0]}", who=str(source), fix="fetch the "
                              "checkpoint again", code="fp8-weight-without-scale")
    return wanted


def _plain(weight: torch.Tensor, scales: list[torch.Tensor], fp8_format: Held) -> torch.Tensor:
    if fp8_format.tiles.four_bits:
        return nvfp4.dequantise(weight, scales[0], scales[1])
    if weight.dtype == torch.int8:
        blocks = weight.view(torch.uint8).unflatten(1, (scales[0].shape[1], -1))
        return mxfp4.dequantised(blocks, scales[0].view(torch.uint8))
    return dequantise(weight, scales[0], fp8_format.tiles)


def _dtype(source: Path) -> torch.dtype:
    """What config.json names, itself or for the text model inside."""
    with reading(str(source / "config.json"), CheckpointError):
        keys = parse_json((source / "config.json").read_text(encoding="utf-8"))
        named = (one.get(key) for one in (keys, keys.get("text_config") or {}) for key in ("dtype", "torch_dtype"))
        dtype = getattr(torch, next((str(name) for name in named if name), "bfloat16"))
        return dtype if dtype.itemsize > 1 else torch.bfloat16  # some name that of the quantised weights


def _tensors(source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    yield from read_tensors(source)
