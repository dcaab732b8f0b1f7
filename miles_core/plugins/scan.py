"""Scan: which plugins are there. One pass over the installed distributions; nothing is imported."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sys
from dataclasses import dataclass
from pathlib import Path

GROUP = "miles.plugins"

BUILT_IN = {
    "core": "miles_core.stages.defaults",
    "local": "miles_core.backends.local.plugin",
    "megatron": "miles_core.backends.megatron.plugin",
    "ray": "miles_core.backends.ray.plugin",
    "sglang": "miles_core.backends.sglang.plugin",
    "sync": "miles_core.backends.sync.plugin",
}
"""The core's own parts, through the same door; always there, imported only when a run needs them."""

KNOWN = {
    "grpo": ("advantage:grpo",),
    "gspo": ("advantage:gspo", "policy_loss:gspo"),
    "cispo": ("advantage:cispo", "policy_loss:cispo"),
    "reinforce": ("advantage:reinforce_plus_plus", "advantage:reinforce_plus_plus_baseline", "advantage:rloo"),
    "tis": ("token_weights:tis", "train_step:tis"),
    "ppo": ("advantage:ppo",),
    "opd": ("advantage:on_policy_distillation", "reward:on_policy_distillation"),
    "compat": ("prompt_source:custom", "generate:custom", "reward:custom", "advantage:custom",
               "policy_loss:custom_loss", "reduction:custom"),
    "math": ("reward:math", "reward:boxed_math", "reward:format"),
    "remote-rm": ("reward:remote_rm", "reward:remote_group_rm"),
    "tools": ("generate:tools", "generate:agent", "reward:unit-tests", "reward:agent"),
    "sft": ("generate:sft", "advantage:sft", "policy_loss:sft"),
    "dapo-filter": ("filter_group:dapo-filter", "preset:dapo"),
    "partial-rollout": ("unfinished:partial-rollout",),
    "r3": ("columns:r3", "microbatch:r3"),
    "fp8": ("transformer_config:fp8", "export_weights:fp8", "convert:hf-to-fp8"),
    "int4-qat": ("build_model:int4-qat", "export_weights:int4-qat", "convert:hf-to-int4"),
    "lora": ("weight_map:lora", "build_model:lora", "weight_sync:adapter", "convert:merge-lora"),
    "mtp": ("weight_map:mtp", "build_model:mtp", "loss_terms:mtp"),
    "tensorboard": ("metrics:tensorboard",),
    "specs-llama": ("model_spec:llama", "model_spec:mistral"),
    "specs-qwen2": ("model_spec:qwen2",),
    "specs-glm": ("model_spec:glm4",),
    "specs-qwen3next": ("model_spec:qwen3_next",),
    "specs-moe": ("model_spec:deepseek_v3", "model_spec:glm4_moe", "model_spec:glm4_moe_lite", "model_spec:minimax_m2"),
    "specs-gemma": ("model_spec:gemma2", "model_spec:gemma3_text"),
}
"""Official plugins and what they offer, so that an error can name the one to install or to enable."""

CALLED_FOR = {
    "megatron.fp8": "fp8",
    "megatron.fp8_recipe": "fp8",
    "quantization_config.fp8": "fp8",
    "quantization_config.mxfp8": "fp8",
    "quantization_config.compressed-tensors": "int4-qat",
}
"""Official plugins that a run gets for an option that it sets, or for what config.json says that its engine's weights
are quantised by."""


def offering(hook: str) -> list[str]:
    """Official plugins that implement a hook."""
    return [name for name, offers in KNOWN.items() if any(offer.partition(":")[0] == hook for offer in offers)]


@dataclass(frozen=True, slots=True)
class Installed:
    """A plugin found in an installed distribution."""

    name: str
    entry: str
    distribution: str
    version: str


def installed() -> list[Installed]:
    """Every entry point of the group, sorted by name; one distribution seen twice on sys.path counts once."""
    changed = (Path(folder).stat().st_mtime_ns if Path(folder).exists() else None for folder in sys.path)
    return list(_installed(tuple(zip(sys.path, changed, strict=True))))


@functools.lru_cache(maxsize=1)
def _installed(_stamp: tuple[tuple[str, int | None], ...]) -> list[Installed]:
    """Read once a plan, which asks some six times."""
    found = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        distribution = re.sub(r"[-_.]+", "-", entry.dist.name).lower() if entry.dist else "?"
        found.setdefault((entry.name, distribution), Installed(entry.name, entry.value, distribution,
                                                               entry.dist.version if entry.dist else "?"))
    return sorted(found.values(), key=lambda item: (item.name, item.distribution))


def look_again() -> None:
    """Forget what `installed` found."""
    _installed.cache_clear()
