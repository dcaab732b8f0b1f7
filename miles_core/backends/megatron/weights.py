"""Hugging Face tensors <-> Megatron parameters, by the rules of a WeightMap, one tensor at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from miles_core.backends.megatron import cpu
from miles_core.backends.megatron.publish import publish
from miles_core.backends.megatron.specs import Rule, WeightMap
from miles_core.errors import CheckpointError, ConfigError

cpu.install()

from megatron.core import parallel_state  # noqa: E402 - after install()
from megatron.core.utils import unwrap_model  # noqa: E402

SHARD_BYTES = 5 * 10**9
"""A file of an exported checkpoint holds about this much (transformers' own default)."""

_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


def load_hf(folder: str | Path, model: torch.nn.Module, weight_map: WeightMap) -> None:
    """Fill this rank's parameters from safetensors files, tensor by tensor; dtypes are cast, nothing else changes.

    Raises:
        CheckpointError: no safetensors there, a file that cannot be read, or names that are missing, unexpected or
            misshapen, all of them in one message and before anything was changed.
    """
    files = _tensor_files(Path(folder))
    parameters = dict(unwrap_model(model).named_parameters())
    expected = {name for rule in weight_map.rules for _, names in _instances(rule) for name in names}
    wanted = {ours: (rule, names) for ours, rule, names in _local(parameters, weight_map)}
    if unmapped := sorted(parameters.keys() - wanted.keys()):
        raise ConfigError("no rule of the weight map fills these parameters", got=_few(unmapped),
                          fix="add rules to the family's weight_map")
    problems = {
        "missing": sorted(expected - files.keys()),
        "unexpected": sorted(n for n in files.keys() - expected - weight_map.ignored if "rotary_emb" not in n),
    }
    with _Readers(files) as read:
        shapes = []
        for ours, (rule, names) in wanted.items():
            for name, shape in zip(names, _hf_shapes(rule, parameters[ours], weight_map), strict=True):
                if name in files and (got := read.shape(name)) != shape:
                    shapes.append(f"{name} {got} where the config says {shape}")
        problems["misshapen"] = shapes
        if any(problems.values()):
            text = "; ".join(f"{len(names)} {kind}: {_few(names)}" for kind, names in problems.items() if names)
            raise CheckpointError("the tensors do not fit the model that config.json describes", got=text,
                                  who=str(folder), fix="use a complete checkpoint of this architecture")
        with torch.no_grad():
            for ours, (rule, names) in wanted.items():
                parameter = parameters[ours]
                parts = [_shard(read.tensor(name), parameter) for name in names]
                parameter.copy_(_join(rule, parts, weight_map))


def hf_stream(model: torch.nn.Module, weight_map: WeightMap) -> Iterator[tuple[str, torch.Tensor]]:
    """The complete policy under its names on disk, in the order of the rules; every rank must go through it.

    Tensors are detached and, where a view does, share memory with the model: copy what must outlive a step.

    Raises:
        ConfigError: pipeline or expert parallelism, for which the stream is not written yet.
    """
    if _sizes_beyond_tensor() > 1:
        raise ConfigError("weights cannot be streamed under pipeline or expert parallelism yet",
                          fix="use tensor, context or data parallelism")
    parameters = dict(unwrap_model(model).named_parameters())
    for ours, rule, names in _local(parameters, weight_map):
        parameter = parameters[ours]
        for name, part in zip(names, _split(rule, parameter.detach(), weight_map, _tensor_size(parameter)),
                              strict=True):  # fmt: skip
            yield name, _gather(part, parameter)


def export_hf(
    folder: str | Path,
    source_folder: str | Path,
    stream: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a Hugging Face directory: the source's config, tokenizer and generation config, and the stream's tensors.

    Args:
        dtype: of all tensors in the files; by default each keeps its own.

    One process calls it. The folder appears when it is complete; an older one of that name is replaced.

    Raises:
        CheckpointError: a source without config.json, or a write that fails.
    """
    source = Path(source_folder)
    if not (source / "config.json").is_file():
        raise CheckpointError("there is no config.json to copy", who=str(source),
                              fix="give the Hugging Face directory that the run started from")
    with publish(Path(folder)) as target:
        for file in sorted(source.iterdir()):
            if file.is_file() and not file.name.endswith(_WEIGHT_FILES) and not file.name.startswith("."):
                shutil.copyfile(file, target / file.name)
        written = _write_shards(target, stream, dtype, shard_bytes)
        config = json.loads((target / "config.json").read_text())
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(written).removeprefix("torch.")
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_shards(
    target: Path, stream: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None, limit: int
) -> torch.dtype | None:
    """Returns the dtype of the last tensor, which is that of all for the models here."""
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    size = total = 0
    written = dtype

    def flush() -> None:
        _write_safetensors(target / f"part-{len(shards)}", held)
        shards.append(list(held))
        held.clear()

    for name, tensor in stream:
        written = dtype or tensor.dtype
        length = tensor.numel() * written.itemsize
        if held and size + length > limit:
            flush()
            size = 0
        held[name] = tensor.to(device="cpu", dtype=written)
        size, total = size + length, total + length
    flush()
    if len(shards) == 1:
        (target / "part-0").rename(target / "model.safetensors")
        return written
    where = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (target / f"part-{i}").rename(target / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return written


def _write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The format itself (https://github.com/huggingface/safetensors#format): length, JSON header, raw bytes.

    safetensors' own writer maps the file, so a full disk kills the process with SIGBUS; a plain write raises OSError.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))


def _instances(rule: Rule) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(Megatron name over the whole model, HF names) of each parameter that a rule stands for."""
    for layer in rule.layers if rule.layers is not None else (0,):
        for expert in range(rule.experts or 1):
            where = {"layer": layer, "expert": expert}
            yield rule.megatron.format(**where), tuple(name.format(**where) for name in rule.hf)


def _local(parameters: dict, weight_map: WeightMap) -> Iterator[tuple[str, Rule, tuple[str, ...]]]:
    """(name on this rank, rule, HF names) of this rank's parameters, in the order of the rules."""
    first_layer, first_expert = _first_layer(parameters), _first_expert(weight_map)
    for rule in weight_map.rules:
        for layer in rule.layers if rule.layers is not None else (first_layer,):
            for expert in range(first_expert, rule.experts) if rule.experts else (first_expert,):
                ours = rule.megatron.format(layer=layer - first_layer, expert=expert - first_expert)
                if layer >= first_layer and ours in parameters:
                    yield ours, rule, tuple(name.format(layer=layer, expert=expert) for name in rule.hf)


def _first_layer(parameters: dict) -> int:
    """Layers before this pipeline stage's; stages hold equal numbers of layers and each counts from 0."""
    here = len({name.split(".")[2] for name in parameters if name.startswith("decoder.layers.")})
    return parallel_state.get_pipeline_model_parallel_rank() * here


def _first_expert(weight_map: WeightMap) -> int:
    experts = max(rule.experts for rule in weight_map.rules)
    return parallel_state.get_expert_model_parallel_rank() * experts // _expert_size() if experts else 0


def _expert_size() -> int:
    return parallel_state.get_expert_model_parallel_world_size()


def _sizes_beyond_tensor() -> int:
    return parallel_state.get_pipeline_model_parallel_world_size() * _expert_size()


def _tensor_group(parameter: torch.nn.Parameter) -> dist.ProcessGroup:
    """Experts have a tensor-parallel group of their own; Megatron marks them with allreduce = False."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


def _tensor_size(parameter: torch.nn.Parameter) -> int:
    """Ranks among which the parameter is cut; 1 for one that each rank holds whole."""
    cut = getattr(parameter, "tensor_model_parallel", False)
    return _tensor_group(parameter).size() if cut else 1


def _hf_shapes(rule: Rule, parameter: torch.nn.Parameter, weight_map: WeightMap) -> list[list[int]]:
    full = list(parameter.shape)
    if (size := _tensor_size(parameter)) > 1:
        full[parameter.partition_dim] *= size
    if rule.join == "same":
        return [full]
    if rule.join == "rows":
        return [[full[0] // len(rule.hf), *full[1:]] for _ in rule.hf]
    counts = (weight_map.heads, weight_map.groups, weight_map.groups)
    return [[count * weight_map.head_dim, *full[1:]] for count in counts]


def _shard(tensor: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's part of a tensor of the checkpoint."""
    size = _tensor_size(parameter)
    return tensor if size == 1 else tensor.chunk(size, parameter.partition_dim)[_tensor_group(parameter).rank()]


def _gather(part: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The inverse of `_shard`."""
    size = _tensor_size(parameter)
    if size == 1:
        return part
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(parts, part.contiguous(), group=_tensor_group(parameter))
    return torch.cat(parts, parameter.partition_dim)


def _join(rule: Rule, parts: list[torch.Tensor], weight_map: WeightMap) -> torch.Tensor:
    """HF tensors -> Megatron parameter. "qkv": for each query group its query heads, its key, its value."""
    if rule.join == "same":
        return parts[0]
    if rule.join == "rows":
        return torch.cat(parts)
    groups = parts[1].shape[0] // weight_map.head_dim
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)


def _split(rule: Rule, tensor: torch.Tensor, weight_map: WeightMap, ranks: int) -> tuple[torch.Tensor, ...]:
    """The inverse of `_join`; `ranks` is among how many the parameter is cut."""
    if rule.join == "same":
        return (tensor,)
    if rule.join == "rows":
        return tensor.chunk(len(rule.hf))
    size, groups = weight_map.head_dim, weight_map.groups // ranks
    widths = (weight_map.heads // weight_map.groups * size, size, size)
    return tuple(part.flatten(0, 1) for part in tensor.unflatten(0, (groups, -1)).split(widths, 1))


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index or from the headers."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            where = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError("the index of the tensor files cannot be read", got=str(error), who=str(index),
                                  fix="fetch the checkpoint again") from error
        if absent := sorted({file.name for file in where.values() if not file.is_file()}):
            raise CheckpointError("files that the index names are missing", got=_few(absent), who=str(folder),
                                  fix="fetch the checkpoint again")
        return where
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError("there are no .safetensors files", who=str(folder),
                              got="a folder" if folder.is_dir() else "no such folder",
                              fix="give a Hugging Face directory with weights in safetensors")
    return {name: file for file in files for name in _open(file).keys()}  # noqa: SIM118 - not a mapping


def _open(file: Path):
    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError("a tensor file cannot be read", got=str(error), who=str(file),
                              fix="fetch the checkpoint again") from error


class _Readers:
    """Reads tensors by name and keeps each file open once."""

    def __init__(self, files: dict[str, Path]):
        self._files, self._open = files, {}

    def __enter__(self) -> _Readers:
        return self

    def __exit__(self, *_exc) -> None:
        self._open.clear()

    def _reader(self, name: str):
        file = self._files[name]
        if file not in self._open:
            self._open[file] = _open(file)
        return self._open[file]

    def shape(self, name: str) -> list[int]:
        try:
            return list(self._reader(name).get_slice(name).get_shape())
        except SafetensorError as error:
            raise CheckpointError(f"the index places {name} in a file that lacks it", who=str(self._files[name]),
                                  fix="fetch the checkpoint again") from error

    def tensor(self, name: str) -> torch.Tensor:
        return self._reader(name).get_tensor(name)


def _few(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
