"""The plugin: options and hooks. What needs torch is imported when it is first used."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from miles_core.config import RunConfig, option
from miles_core.config.load import config_json
from miles_core.errors import ConfigError
from miles_core.hookspecs import hookimpl
from miles_core.plugins.resolve import chosen
from miles_fp8.recipe import NVFP4, RECIPES, Held, of_checkpoint, tiles, writes

if TYPE_CHECKING:
    import torch
    from megatron.core.quantization.quant_config import RecipeConfig
    from miles_megatron.specs import ModelSpec, WeightMap

logger = logging.getLogger(__name__)

OF_KERNELS = ("tp_only_amax_red", "moe_router_padding_for_fp8", "moe_router_padding_for_quantization")
"""Fields of Megatron's beside those that begin with fp8 which only its kernels have a use for."""


@dataclass(frozen=True, kw_only=True)
class Fp8Options:
    """FP8 weights; what training computes in, Megatron's own options say."""

    recipe: Literal["blockwise", "tensorwise", "mxfp8", "nvfp4"] | None = option(
        None, "Scales of weights where no checkpoint says: `miles convert hf-to-fp8` and the local engine. "
        "Default: as --fp8-recipe, else blockwise. nvfp4, in four bits, is the recipe of training as well."
    )
    keep: list[str] = option(
        [], "Modules that such weights do not quantise, by their Hugging Face name or its beginning or end.",
        flags=("--extra-high-precision-layers-hf",),
    )
    first_layers: int = option(0, "Layers at the start whose modules such weights do not quantise.")
    last_layers: int = option(0, "Layers at the end whose modules such weights do not quantise.")
    emulate: Literal["all", "weights"] = option(
        "all", "What training without FP8 kernels and the local engine round: all operands, or weights alone."
    )
    precision_file: str | None = option(
        None, "YAML file of modules that train in another recipe or in bfloat16, in Megatron-core's form.",
        flags=("--te-precision-config-file",),
    )


class Fp8:
    """FP8: training with Transformer Engine's recipes, or in emulation, and engines with FP8 weights."""

    called_for = ("megatron.fp8", "megatron.fp8_recipe", "quantization_config.fp8", "quantization_config.mxfp8",
                  "quantization_config.modelopt")
    implies = {"megatron.fp8": "e4m3", "megatron.fp8_recipe": "blockwise"}
    precision = {
        "trainer": ["{own}; linear layers multiply in fp8 {megatron.fp8} ({megatron.fp8_recipe})"],
        "log-probs": ["{own}; linear layers as in training, in fp8 {megatron.fp8}"],
        "engine": ["{checkpoint} weights (config.json), read as {local}",
                   "{checkpoint} weights (config.json), {server}",
                   "fp8 weights as in training ({megatron.fp8} {megatron.fp8_recipe}), read as {local}"],
        "sync": ["{checkpoint} weights and their scales; other tensors in {computed}",
                 "fp8 weights and their scales ({megatron.fp8} {megatron.fp8_recipe}); other tensors in {local}"],
    }

    def __init__(self, options: Fp8Options, config: RunConfig):
        self.options, self.config = options, config
        self._emulation: dict[str, object] | None = None
        self._recipes: RecipeConfig | None = None
        self._map: WeightMap | None = None

    @hookimpl
    def weight_map(self, weight_map: WeightMap, model: str) -> WeightMap:
        """Nothing is added: which tensors hold several experts."""
        if model == "actor":
            self._map = weight_map
        return weight_map

    @hookimpl
    def derive(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """NVFP4 is this plugin's name alone: Megatron has it beside FP8, with options of its own."""
        four_bits = self.options.recipe == NVFP4 and config.surface("megatron").get("fp8")
        return config.with_surface("megatron", fp8_recipe=NVFP4) if four_bits else config

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """What no sync could write nor the local engine read, and what SGLang would keep, whatever a sync sends."""
        path, whole = config_json(config)
        stated: Any = (whole or {}).get("quantization_config") or {}
        if config.trains or (config.debug.debug_rollout_only and chosen(config, "engine") == "local"):
            writes(stated, path.parent)
        served = chosen(config, "engine") == "sglang" and not config.debug.debug_rollout_only
        if served and stated.get("quant_method") == "fp8" and not stated.get("weight_block_size"):
            raise ConfigError("SGLang rearranges FP8 weights with one scale each when it loads them, and cannot load "
                              "new ones", code="fp8-sglang-needs-blocks", got=f"no weight_block_size in {path}",
                              who="plugin fp8", fix="serve scales per block: miles convert hf-to-fp8")
        if served and stated.get("quant_method") == "modelopt":
            raise ConfigError("SGLang rearranges NVFP4 weights when it loads them, and cannot load new ones",
                              got=f"quant_algo {stated.get('quant_algo')} in {path}", code="nvfp4-not-updatable",
                              fix="serve one in FP8 or INT4: miles convert hf-to-fp8, hf-to-int4", who="plugin fp8")
        return config

    @hookimpl
    def transformer_config(self, fields: dict[str, object]) -> dict[str, object]:
        """Megatron's fp8 fields go to Transformer Engine; where its kernels do not run, they are emulated."""
        self._emulation = None
        if not fields.get("fp8"):
            return fields
        from miles_fp8.hardware import Device, emulated

        if self.options.precision_file:
            from miles_fp8.precisions import recipes_of

            self._recipes = recipes_of(self.options.precision_file)
            fields = {**fields, "quant_recipe": self._recipes}
        kernels = not emulated(Device.here(), fields, self.config.perf.bf16)
        if kernels and fields["fp8_recipe"] != NVFP4:
            return fields
        self._emulation = None if kernels else dict(fields)
        four_bits = {"fp4": "e2m1", "fp4_recipe": NVFP4} if kernels else {}
        return four_bits | {name: value for name, value in fields.items()
                            if not name.startswith("fp8") and name not in OF_KERNELS}

    @hookimpl
    def build_model(self, chunk: torch.nn.Module, spec: ModelSpec, weight_map: WeightMap) -> torch.nn.Module:
        """Emulation: the decoder's linear layers round their operands."""
        names = [name for name, _ in chunk.named_modules()]
        for one in self._recipes.matchers if self._recipes is not None else ():
            if not fnmatch.filter(names, one.pattern):
                logger.warning("--te-precision-config-file: no module here is called %s", one.pattern)
        if (fields := self._emulation) is None:
            return chunk
        import torch

        from miles_fp8.emulate import Emulation, emulate

        layers = cast("int", spec.constants["num_layers"])
        plain_layers = _kept_layers(fields, layers)
        made = Emulation(str(fields["fp8_recipe"]), frozenset(range(layers)) - plain_layers,
                         torch.float8_e5m2 if fields["fp8"] == "hybrid" else torch.float8_e4m3fn,
                         self.options.emulate == "all", self._recipes)
        count = emulate(chunk, made, weight_map)
        logger.info("%d linear layers compute as if in FP8 (%s)", count, made.recipe)
        return chunk

    @hookimpl
    def export_weights(self, stream: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights in FP8 with their scales, where the engine holds such."""
        fp8_format = self._held()
        if fp8_format is None:
            return stream
        from miles_fp8.stream import apart, quantised

        if self._map is not None and self._map.packed:
            stream = apart(stream, fp8_format, self._map, whole=chosen(self.config, "engine") == "local")
        return quantised(stream, fp8_format)

    @hookimpl
    def import_weights(self, stream: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """FP8 weights times their scales, for an engine that has no kernels for them."""
        from miles_fp8.stream import plain, plain_of_four_bits, rounding_inputs

        fp8_format = self._held()
        if fp8_format is None:
            return plain(stream)
        stream = plain_of_four_bits(stream) if fp8_format.tiles.four_bits else plain(stream, fp8_format.tiles)
        return rounding_inputs(stream, fp8_format) if self.options.emulate == "all" else stream

    @hookimpl("convert", name="hf-to-fp8")
    def convert(self, source: Path, out: Path) -> str:
        """A plain Hugging Face directory with its linear layers in FP8."""
        from miles_fp8.directory import convert

        recipe = self.options.recipe or "blockwise"
        return convert(source, out, self._own(recipe, source, self.options.first_layers, self.options.last_layers))

    @hookimpl("convert", name="fp8-to-hf")
    def convert_to_plain(self, source: Path, out: Path) -> str:
        """A plain Hugging Face directory of one in FP8, for --ref-load; the options say nothing here."""
        from miles_fp8.directory import convert_to_plain

        return convert_to_plain(source, out)

    def _held(self) -> Held | None:
        """How the engine holds its weights; None for plain ones."""
        path, whole = config_json(self.config)
        quantization: Any = (whole or {}).get("quantization_config")
        local = chosen(self.config, "engine") == "local"
        fp8_format = of_checkpoint(quantization, path.parent) if quantization else None
        if fp8_format is not None or quantization or not local:
            return fp8_format
        megatron = self.config.surface("megatron")
        if not megatron.get("fp8"):
            return None
        recipe = self.options.recipe or str(megatron.get("fp8_recipe"))
        if recipe not in (*RECIPES, NVFP4):
            return None
        plain_ends = _ends(megatron) if megatron.get("first_last_layers_bf16") else (0, 0)
        return self._own(recipe, path.parent, *(max(pair) for pair in zip(
            plain_ends, (self.options.first_layers, self.options.last_layers), strict=True)))

    def _own(self, recipe: str, folder: Path, first: int, last: int) -> Held:
        """How weights are held where no checkpoint says."""
        fp8_format = Held(tiles(recipe), recipe, tuple(self.options.keep))
        if not first and not last:
            return fp8_format
        hf_config: Mapping[str, Any] = config_json(replace(self.config, checkpoint=replace(
            self.config.checkpoint, hf_checkpoint=str(folder))))[1] or {}
        layers = int(hf_config.get("text_config", hf_config)["num_hidden_layers"])
        return replace(fp8_format, layers=frozenset(range(first, layers - last)))


def _ends(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Layers at the start and at the end that first_last_layers_bf16 is about."""
    first, last = (fields.get(f"num_layers_at_{end}_in_bf16") for end in ("start", "end"))
    return 1 if first is None else int(first), 1 if last is None else int(last)


def _kept_layers(fields: Mapping[str, Any], layers: int) -> frozenset[int]:
    """Of a model, those that stay in the trainer's own dtype."""
    first, last = _ends(fields) if fields.get("first_last_layers_bf16") else (0, 0)
    return frozenset([*range(first), *range(layers - last, layers)])
