"""`miles convert merge-lora`: a base directory and adapters become a directory without adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from miles_megatron import hf_config
from miles_megatron.convert import AS_NAMED, architecture
from miles_megatron.disk_names import PlainReaders, places
from miles_megatron.disk_names import changed as in_place_of
from miles_megatron.shards import few, tensor_files
from miles_megatron.weights import export_hf

from miles_core.errors import CheckpointError, ConfigError
from miles_lora import peft
from miles_lora.merging import merge
from miles_lora.targets import OF_ALL_EXPERTS, PEFT, adapter_of, by_itself, names_among


def merge_folder(source: Path, out: Path, adapters: Path | None, alpha: float | None) -> str:
    """A tensor at a time.

    Args:
        adapters: a PEFT directory; None for adapters that are among the tensors of `source`.
        alpha: of these; a PEFT directory says its own.

    Raises:
        ConfigError: the alpha of adapters that are among the tensors is not given.
        CheckpointError: no adapters, adapters of weights that the base does not have, more than adapters of linear
            layers, or a base that is not plain.
        OwnerError: no plugin knows where this architecture keeps the weights, whose names are not those of the files.
    """
    base = tensor_files(source)
    files = base if adapters is None else base | tensor_files(adapters)
    read = peft.reader(files)
    changed = {adapter[0] for name in read.places if (adapter := adapter_of(name)) is not None
               and not OF_ALL_EXPERTS.search(name)}
    if not changed:
        raise CheckpointError("no adapters to merge", code="lora-nothing-to-merge", who=str(source),
                              fix="name a PEFT directory with --lora-adapter-path")
    if stated := hf_config.quantization(source):
        raise CheckpointError("adapters cannot be merged into quantised weights", code="lora-base-quantised",
                              got=stated.get("quant_method"), who=str(source / "config.json"), fix="merge into plain "
                              "weights: miles convert fp8-to-hf or int4-to-hf writes them, or use the run's --save-hf")
    as_named = changed <= base.keys()
    weight_map = AS_NAMED if as_named else architecture(source, ())[1]
    called = {name if as_named else by_itself(name): name for name in changed}
    names = [name for name in base if adapter_of(name) is None]
    if lost := sorted(called.keys() - places(names, weight_map).keys()):
        raise CheckpointError("the adapters belong to another model", got=f"no {lost[0]}", who=str(source),
                              fix="use the base model that they were trained on", code="lora-adapters-of-other-model")
    if adapters is None and alpha is None:
        raise ConfigError("tensors do not say the alpha of the adapters", code="lora-alpha-missing", who=str(source),
                          fix="add --lora-alpha, as the run had it (its default: 16)")
    shape = None if adapters is None else peft.read(adapters)
    with read:
        if more := [name for name in sorted(files.keys() - base.keys()) if adapter_of(name) is None
                    and not _of_base(name, base, read)]:
            raise CheckpointError("beside adapters of layers there are tensors that cannot be merged", got=few(more),
                                  who=str(adapters), code="lora-tensors-beside", fix="merge with PEFT's "
                                  "merge_and_unload, or train without embeddings, biases and modules_to_save")

        def with_adapter(name: str, weight: torch.Tensor) -> torch.Tensor:
            if name not in called:
                return weight
            first, second = map(read.tensor, names_among(called[name], read.places))
            return merge(weight, first, second, shape.scale if shape else cast("float", alpha) / len(first))

        export_hf(out, source, in_place_of(((name, read.tensor(name)) for name in names), weight_map, with_adapter))
    return f"{len(changed)} weights merged"


def _of_base(name: str, base: Mapping[str, Path], read: PlainReaders) -> bool:
    """Whether it is a weight as the base has it, which PEFT puts beside an output layer's adapter."""
    weight = name.removeprefix(PEFT).replace(".base_layer.", ".")
    return weight in base and torch.equal(read.tensor(name), read.tensor(weight))
