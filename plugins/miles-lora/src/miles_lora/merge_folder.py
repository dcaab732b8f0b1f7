"""`miles convert merge-lora`: a base directory and adapters become a directory without adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from miles_megatron.readers import Readers
from miles_megatron.shards import tensor_files
from miles_megatron.weights import export_hf

from miles_core.errors import CheckpointError
from miles_lora import peft
from miles_lora.merging import merge
from miles_lora.targets import adapter_of, names_of


def merge_folder(source: Path, out: Path, adapters: Path | None, alpha: float) -> str:
    """A tensor at a time.

    Args:
        adapters: a PEFT directory; None for adapters that are among the tensors of `source`.
        alpha: of these; a PEFT directory says its own.

    Raises:
        CheckpointError: no adapters, or adapters of weights that the base does not have.
    """
    base = tensor_files(source)
    files = base if adapters is None else base | tensor_files(adapters)
    changed = {adapter[0] for name in files if (adapter := adapter_of(name)) is not None}
    if not changed:
        raise CheckpointError("no adapters to merge", code="lora-nothing-to-merge", who=str(source),
                              fix="name a PEFT directory with --lora-adapter-path")
    if lost := sorted(changed - base.keys()):
        raise CheckpointError("the adapters belong to another model", got=f"no {lost[0]}", who=str(source),
                              fix="use the base model that they were trained on", code="lora-adapters-of-other-model")
    shape = None if adapters is None else peft.read(adapters)
    with Readers(files) as read:

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for name in base:
                if adapter_of(name) is None:
                    weight = read.tensor(name)
                    if name in changed:
                        first, second = map(read.tensor, names_of(name))
                        scale = alpha / len(first) if shape is None else shape.scale
                        weight = merge(weight, first, second, scale)
                    yield name, weight

        export_hf(out, source, stream())
    return f"{len(changed)} weights merged"
