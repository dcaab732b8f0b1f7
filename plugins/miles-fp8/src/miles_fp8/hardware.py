"""What FP8 kernels need: a sentence for each thing that is missing."""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.errors import ConfigError
from miles_fp8.recipe import NVFP4, RECIPES

NEEDED = {"blockwise": (9, 0), "tensorwise": (8, 9), "delayed": (8, 9), "custom": (8, 9), "mxfp8": (10, 0),
          "nvfp4": (10, 0)}
"""Least compute capability of each recipe's kernels in Transformer Engine."""


@dataclass(frozen=True, slots=True)
class Device:
    """Where a trainer's rank computes.

    Args:
        name: of the GPU; None without one.
        capability: its compute capability.
        engine: Transformer Engine is installed.
    """

    name: str | None = None
    capability: tuple[int, int] = (0, 0)
    engine: bool = False

    @classmethod
    def here(cls) -> Device:
        """This process's."""
        import torch
        from miles_megatron import cpu

        if cpu.no_cuda():
            return cls()
        return cls(torch.cuda.get_device_name(), torch.cuda.get_device_capability(),
                   not cpu.no_transformer_engine())


def emulated(device: Device, fields: dict[str, object], bf16: bool) -> bool:
    """Whether FP8 is emulated: without a GPU, and where the run asks for Megatron's local layers.

    Args:
        fields: of Megatron's TransformerConfig that the run sets.

    Raises:
        ConfigError: a GPU whose kernels cannot do it, or no Transformer Engine, or training in float32.
    """
    recipe = str(fields.get("fp8_recipe") or "delayed")
    if fields.get("fp8_param"):
        raise ConfigError("parameters stored in FP8 cannot be streamed to engines", code="fp8-parameters-not-streamed",
                          who="--fp8-param-gather", got="fp8_param",
                          fix="leave it out: parameters stay in bfloat16 and GEMMs run in FP8")
    if device.name is None or fields.get("transformer_impl") == "local":
        if recipe not in (*RECIPES, NVFP4):
            raise ConfigError(f"the recipe {recipe!r} is supported by Transformer Engine's kernels only",
                              got=_without(device), code="fp8-recipe-needs-transformer-engine",
                              who="--fp8-recipe", fix="write --fp8-recipe blockwise, tensorwise or mxfp8")
        return True
    if not bf16:
        raise ConfigError("FP8 kernels train in bfloat16", got="float32", who="--fp8-format, --no-bf16",
                          fix="write --bf16, or leave FP8 out", code="fp8-needs-bf16")
    if not device.engine:
        raise ConfigError("FP8 on a GPU needs Transformer Engine, which is not installed", got=device.name,
                          who="--fp8-format", fix="pip install transformer_engine[pytorch], or emulate it slowly with "
                          "--transformer-impl local", code="fp8-transformer-engine-missing")
    needed = NEEDED[recipe]
    if device.capability < needed:
        able = [name for name in ("blockwise", "tensorwise") if device.capability >= NEEDED[name]]
        raise ConfigError(f"the recipe {recipe} needs a GPU of compute capability {needed[0]}.{needed[1]}",
                          got=f"{device.name}, {device.capability[0]}.{device.capability[1]}", who="--fp8-recipe",
                          fix=f"write --fp8-recipe {able[0]}" if able else "train in bfloat16 here: --fp8-format none",
                          code="fp8-gpu-too-old")
    return False


def _without(device: Device) -> str:
    return "no GPU" if device.name is None else "--transformer-impl local"
