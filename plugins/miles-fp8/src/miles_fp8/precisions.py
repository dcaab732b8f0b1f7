"""Precisions of single modules, by the names that they have in Megatron's model (--te-precision-config-file)."""

from __future__ import annotations

import base64
from pathlib import Path

import yaml
from miles_megatron import cpu

from miles_core.errors import ConfigError, DataError
from miles_fp8.recipe import NVFP4, RECIPES

cpu.install()

from megatron.core.quantization.quant_config import RecipeConfig  # noqa: E402 - after install()
from megatron.core.quantization.utils import get_quant_config_or_none  # noqa: E402 - after install()

WHO, INLINE = "--te-precision-config-file", "base64:"


def recipes_of(given: str) -> RecipeConfig:
    """Which module has which recipe.

    Args:
        given: a YAML file in Megatron-core's form (megatron/core/quantization), or its text after `base64:`.

    Raises:
        DataError: it cannot be read, or a pattern names a recipe that it does not have.
    """
    try:
        text = (base64.b64decode(given.removeprefix(INLINE), validate=True).decode() if given.startswith(INLINE)
                else Path(given).read_text(encoding="utf-8"))
        recipes = RecipeConfig.from_config_dict(yaml.safe_load(text))
        named = {one.config_key: recipes.configs[one.config_key]["training_recipe"] for one in recipes.matchers}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, AssertionError, NotImplementedError,
            yaml.YAMLError) as error:
        raise DataError("the precisions of modules cannot be read", got=f"{type(error).__name__}: {error}"[:200],
                        who=f"{WHO} {given}"[:200], code="module-precisions-unreadable",
                        fix="name a YAML file of configs, each with a training_recipe, and of matchers") from None
    if not named:
        raise DataError("the precisions of modules name no module", code="module-precisions-empty",
                        who=f"{WHO} {given}"[:200], fix="write matchers, each with enabled: true")
    return recipes


def emulated(recipes: RecipeConfig | None, module: str, own: str) -> str | None:
    """The recipe that a module computes by; None for that of the trainer's own dtype.

    Args:
        own: that of the run.

    Raises:
        ConfigError: one that only kernels have, or another one for the passes without gradients.
    """
    matched = get_quant_config_or_none(module, recipes)
    if matched is None or not matched.config["training_recipe"].get("override_quantized_autocast", True):
        return own
    training = matched.config["training_recipe"]
    chosen: str | None = training.get("fp8_quantization_recipe") or training.get("fp4_quantization_recipe")
    if "evaluation_recipe" in matched.config or chosen not in (None, NVFP4, *RECIPES):
        raise ConfigError("this precision of a module is supported by Transformer Engine's kernels only", who=WHO,
                          got=f"{matched.config_key}: {matched.config}"[:200], code="module-precision-not-emulated",
                          fix=f"a training_recipe of {', '.join([NVFP4, *RECIPES])} or none, and no evaluation_recipe")
    return chosen
