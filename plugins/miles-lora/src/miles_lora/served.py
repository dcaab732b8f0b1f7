"""What SGLang's servers are told of adapters before any is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miles_core.errors import ConfigError
from miles_lora.targets import ALL, LINEAR, chosen, last

JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that SGLang keeps as one: it makes one adapter of theirs, and needs all of them for it."""
WHOLE = {"qkv_proj": JOINED[0], "gate_up_proj": JOINED[1]}
"""What SGLang calls them."""


def modules(checkpoint: Path, wanted: Sequence[str], excluded: Sequence[str]) -> list[str]:
    """Last words of the names of the layers that adapters may be on, as `lora_target_modules` takes them.

    Raises:
        ConfigError: a part of what SGLang keeps as one layer, or experts.
    """
    from miles_megatron.shards import tensor_files

    names = [name for name in tensor_files(checkpoint) if ".layers." in name and name.endswith(".weight")]
    known = {last(name) for name in names if LINEAR.search(last(name))}
    adapted = {last(name) for name in names if chosen(name, wanted, excluded)}
    if experts := sorted(adapted & {last(name) for name in names if ".experts." in name}):
        # SGLang 0.5.16 wraps the experts, and its loaders then miss their weights by a name, base_layer, in between.
        raise ConfigError("SGLang cannot update the weights of experts that may have adapters", got=", ".join(experts),
                          who="--weight-sync adapter", fix=f"add --exclude-modules {','.join(experts)}, or leave "
                          "--weight-sync out: merged weights reach experts too", code="lora-sglang-experts")
    for group in JOINED:
        missing = [name for name in group if name in known and name not in adapted]
        if missing and adapted & set(group):
            raise ConfigError(f"SGLang keeps {', '.join(group)} as one layer, and takes adapters for all of them or "
                              "for none", code="lora-sglang-merged-layers",
                              got=f"none for {', '.join(missing)}", who="--weight-sync adapter, --target-modules",
                              fix=f"add {', '.join(missing)}, or leave --weight-sync out: merged weights do not need "
                                  "them")
    return sorted(adapted)


def server_fields(checkpoint: Path, wanted: tuple[Sequence[str], Sequence[str]], rank: int, path: str | None,
                  backup: bool, own: Sequence[str] = ()) -> dict[str, object]:
    """What a server needs to hold one adapter beside the base.

    Args:
        wanted: layers with adapters, and those that have none.
        path: NAME=FOLDER of an adapter that it begins with.
        backup: the base stays in host memory while it sleeps.
        own: its `lora_target_modules`, where the run sets them.

    Raises:
        ConfigError: they lack a layer that has an adapter; see also `modules`.
    """
    adapted = modules(checkpoint, *wanted)
    room = {part for name in own for part in WHOLE.get(name, (name,))}
    if own and not room & {"all", ALL} and (missing := [name for name in adapted if name not in room]):
        raise ConfigError("servers would take no adapter of layers that have one", got=f"no {', '.join(missing)}",
                          who="--sglang-lora-target-modules", fix="add them, or leave the option out: it follows from "
                          "--target-modules", code="lora-target-not-served")
    fields: dict[str, object] = {"enable_lora": True, "max_lora_rank": rank, "max_loras_per_batch": 2,
                                "lora_target_modules": adapted}
    if path is not None:
        fields["lora_paths"] = [path]
    if backup:
        fields["enable_weights_cpu_backup"] = True
    return fields
