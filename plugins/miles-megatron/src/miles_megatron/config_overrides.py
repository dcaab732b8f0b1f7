"""Megatron-core's options that the run sets, handed to the classes that take them.

An option that several classes have (use_distributed_optimizer) means the same in each and reaches each. Where
Megatron-LM's scripts hand megatron-core another value than the dataclass's default, theirs is the default here too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from miles_core.errors import ConfigError
from miles_megatron import cpu
from miles_megatron.flags import megatron_lm_defaults
from miles_megatron.specs import ModelSpec
from miles_megatron.surface import surface

cpu.install()

from megatron.core.transformer.enums import AttnBackend  # noqa: E402 - after install()

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}
_ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


def defaults_for(kind: type) -> dict[str, object]:
    """Megatron-LM's own defaults of a dataclass of megatron-core."""
    names = _names(kind)
    return {name: value for name, value in megatron_lm_defaults().items() if name in names}


def overrides_for(kind: type, options: Mapping[str, object]) -> dict[str, object]:
    """The fields of a dataclass of megatron-core that the run sets, as values that it takes."""
    names = _names(kind)
    return {name: _value(name, value) for name, value in options.items() if name in names}


def check_architecture(options: Mapping[str, object], spec: ModelSpec) -> None:
    """Options that no configuration takes, because the checkpoint's architecture decides them.

    Raises:
        ConfigError: one that disagrees, or one of an architecture that this is not.
    """
    rotary = spec.rotary
    fixed = {
        "share_embeddings_and_output_weights": spec.tied, "position_embedding_type": "rope",
        "rotary_percent": rotary.fraction, "rotary_base": rotary.theta, "rope_scaling": rotary.scaling == "llama3",
        "rope_scaling_factor": rotary.factor,
        "seq_len_interpolation_factor": rotary.factor if rotary.scaling == "linear" else None,
        "activation_func": spec.activation,
    }  # fmt: skip
    for name, value in options.items():
        if value in spec.also.get(name, ()):
            continue
        if name in fixed and value != fixed[name]:
            raise ConfigError(f"{name} disagrees with the checkpoint, which says {fixed[name]}",
                              code="override-disagrees-with-checkpoint", got=value, who=spec.source,
                              fix=f"leave {name} out, or use a checkpoint with that value")
        owner = surface()[name].owner
        if owner == "MLATransformerConfig" or (owner == "GPTModel" and name not in fixed):
            raise ConfigError(f"{name} does not apply to the architecture of this checkpoint",
                              got=value, code="override-not-applicable", who=spec.source,
                              fix="leave it out")


def _names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _value(name: str, value: object) -> object:
    if name == "attention_backend":
        return AttnBackend[str(value)]
    if name == "activation_func":
        return _ACTIVATIONS[str(value)]
    if surface()[name].type.startswith("dtype") and isinstance(value, str):
        if value not in _DTYPES:
            raise ConfigError(f"{name} should be one of {', '.join(_DTYPES)}", code="override-dtype-unknown", got=value,
                              fix="write one of these")
        return _DTYPES[value]
    return value
