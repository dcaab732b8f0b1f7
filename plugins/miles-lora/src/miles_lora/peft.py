"""A PEFT directory: adapter_config.json and adapter_model.safetensors, as PEFT and SGLang read them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from miles_megatron.disk_names import PlainReaders
from miles_megatron.readers import Readers
from miles_megatron.shards import tensor_files
from miles_megatron.specs import Packed, WeightMap
from safetensors.torch import save_file

from miles_core.errors import CheckpointError, ConfigError
from miles_core.reading import parse_json
from miles_core.record.publish import publish
from miles_lora.targets import adapter_of, called_as, names_of, of_expert

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_OTHER: dict[str, tuple[object, ...]] = {
    "use_dora": (False, None), "use_rslora": (False, None), "fan_in_fan_out": (False, None),
    "bias": ("none", None), "modules_to_save": (None, []), "rank_pattern": ({}, None), "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []), "layer_replication": (None, []), "target_parameters": (None, []),
    "trainable_token_indices": (None, []), "alora_invocation_tokens": (None, []), "lora_bias": (False, None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}  # fmt: skip
"""Keys of adapter_config.json with their values for adapters of the kind that is trained here: others are on
other layers, count otherwise, or begin with a base that is not the checkpoint's."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How large adapters are, and how much they count."""

    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def shape(rank: int | None, path: str | None, alpha: float) -> Shape:
    """That of a run's adapters: the rank that it says, else that of the folder which it begins with.

    Raises:
        ConfigError: the size of the adapters is not given.
    """
    if rank is None and path is None:
        raise ConfigError("LoRA adapters need a rank",
                          code="lora-rank-missing", who="plugin lora", fix="add --lora-rank, for example "
                                                                              "--lora-rank 32")
    return Shape(read(Path(str(path))).rank if rank is None else rank, alpha)


def drawn(rank: int, inputs: int, name: str) -> torch.Tensor:
    """What A starts as by a name: [rank, inputs] uniform in +-1/sqrt(inputs), as PEFT draws it."""
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.rand(rank, inputs, generator=draw) * 2 - 1) / inputs**0.5


def config(shape: Shape, names: Iterable[str], base: str) -> dict[str, object]:
    """adapter_config.json of adapters on a Hugging Face directory `base`.

    Args:
        names: of their tensors.
    """
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": shape.rank, "lora_alpha": shape.alpha, "lora_dropout": 0.0, "target_modules": modules_of(names),
        "bias": "none", "fan_in_fan_out": False, "use_dora": False, "use_rslora": False, "modules_to_save": None,
        "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip


def modules_of(names: Iterable[str]) -> list[str]:
    """Last words of the names of the layers that have the adapters of these names."""
    return sorted({adapter[0].removesuffix(".weight").rpartition(".")[2]
                   for name in names if (adapter := adapter_of(name)) is not None})


def read(folder: Path) -> Shape:
    """
    Raises:
        CheckpointError: no PEFT directory, or adapters of another kind.
    """
    path = folder / CONFIG
    try:
        adapter_config = parse_json(path.read_text(encoding="utf-8"))
        shape = Shape(int(adapter_config["r"]), float(adapter_config["lora_alpha"]))
        other = {key: adapter_config[key] for key, usual in _OTHER.items()
                 if key in adapter_config and adapter_config[key] not in usual}
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError("not a PEFT directory", code="peft-directory-invalid", got=str(error), who=str(path),
                              fix=f"give the folder of {CONFIG} and {WEIGHTS}") from error
    if adapter_config.get("peft_type", "LORA") != "LORA" or other:
        raise CheckpointError("adapters of this kind are not supported", code="peft-kind-unsupported", who=str(path),
                              got=str(other or adapter_config["peft_type"]),
                              fix="use plain LoRA adapters: one rank and one alpha, no DoRA, no biases")
    return shape


def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Of a PEFT directory, of each expert by itself but for what they share.

    Raises:
        CheckpointError: no file of adapters there, or one that cannot be read.
    """
    with reader(tensor_files(folder)) as read_from:
        for name in read_from.places:
            yield name, read_from.tensor(name)


def tensors_for(folder: Path, weights: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, as adapters of weights of these names, whose text model others may call otherwise; see INSIDE."""
    called = called_as(weights)
    for name, tensor in tensors(folder):
        weight, half = adapter_of(name) or (name, "")
        yield (names_of(called(weight))["AB".index(half)] if half else name), tensor


def reader(files: Mapping[str, Path]) -> PlainReaders:
    """Reads tensors of files of which some may be of all experts of a layer, as SGLang has them (`Target.packed`)."""
    with Readers(dict(files)) as read:
        shapes = {name: read.shape(name) for name in files if adapter_of(name) is not None}
    packed = (Packed(name, (name if shape[0] == 1 else of_expert(name),), shape[0])
              for name, shape in shapes.items() if len(shape) == 3)
    return PlainReaders(files, WeightMap((), 1, 1, 1, packed=tuple(packed)))


def write(folder: Path, shape: Shape, adapters: Mapping[str, torch.Tensor], base: str) -> None:
    """A PEFT directory, which appears when it is complete.

    Raises:
        CheckpointError: the disk is full or cannot be written.
    """
    with publish(folder, beside=False) as target:
        save_file({name: tensor.contiguous() for name, tensor in adapters.items()}, target / WEIGHTS, {"format": "pt"})
        (target / CONFIG).write_text(json.dumps(config(shape, adapters, base), indent=2) + "\n")


def check(folder: Path, shape: Shape) -> None:
    """
    Raises:
        CheckpointError: the adapters of a directory are others than those that the run trains.
    """
    stored = read(folder)
    pairs = {"--lora-rank": (stored.rank, shape.rank), "--lora-alpha": (stored.alpha, shape.alpha)}
    if wrong := {flag: pair for flag, pair in pairs.items() if pair[0] != pair[1]}:
        raise CheckpointError("the initial adapters do not match the run", who=str(folder),
                              got="; ".join(f"they have {flag} {theirs:g}, the run {ours:g}"
                                            for flag, (theirs, ours) in wrong.items()),
                              fix="use the values of the directory", code="lora-initial-adapters-differ")
