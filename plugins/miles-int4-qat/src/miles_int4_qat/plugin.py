"""The plugin: options and hooks. What is int4 is in names.py, the numbers in quantise.py, imported when first used."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from miles_core.config import RunConfig, option
from miles_core.errors import ConfigError
from miles_core.hookspecs import hookimpl
from miles_core.plugins.resolve import chosen as part

if TYPE_CHECKING:
    import torch
    from miles_megatron.specs import ModelSpec, WeightMap

    from miles_core.columns import Packed
    from miles_int4_qat.names import Stated

THEIRS = "OPEN_TRAINING_INT4_GROUP_SIZE"
"""Environment variable by which Miles's launch scripts say the group size."""


@dataclass(frozen=True, kw_only=True)
class Int4QatOptions:
    """What is rounded, and how."""

    group_size: int | None = option(
        None, "Weights of a row that share a scale: 32, 64 or 128; default: as the engine's checkpoint has, else 32."
    )
    targets: Literal["auto", "experts", "linears"] = option(
        "auto", "Which layers: routed experts, or all linear layers of the decoder; auto: as the engine's checkpoint, "
        "else experts where there are any."
    )
    forward: bool = option(True, "The trainer computes with rounded weights; without it only the engine does.")
    reference: bool = option(True, "The reference model computes with rounded weights too: the KL starts at 0.")


class Int4Qat:
    """Quantisation-aware training to INT4: the trainer computes with the weights that an INT4 engine has."""

    provides = ("needs-no-log-prob-pass",)
    called_for = ("quantization_config.compressed-tensors",)
    precision = {
        "trainer": "weights (targets: {targets}) rounded to int4 in the forward: {forward}; straight-through gradient",
        "log-probs": "as the trainer's forward; the reference with rounded weights: {reference}",
        "sync": "int4 as compressed-tensors pack-quantized if the engine's checkpoint is, else the rounded values",
    }

    def __init__(self, options: Int4QatOptions, config: RunConfig):
        from miles_int4_qat.names import GROUPS

        if options.group_size not in (None, *GROUPS):
            raise ConfigError(f"group_size should be one of {', '.join(map(str, GROUPS))}",
                              code="int4-group-size-unknown", got=options.group_size, who="--int4-qat.group-size",
                              fix="write 32 for precision, or 128 for size")
        self.options, self.config = options, config
        self._map: WeightMap | None = None
        self._rounds = True

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """Group sizes that no engine can serve, and two precisions for one weight."""
        _check(self.options, config)
        return config

    @hookimpl
    def weight_map(self, weight_map: WeightMap, model: str) -> WeightMap:
        """Nothing is added: which parameters the checkpoint's weights are."""
        if model == "actor":
            self._map = weight_map
        return weight_map

    @hookimpl
    def build_model(self, chunk: torch.nn.Module, spec: ModelSpec, folder: Path, model: str) -> torch.nn.Module:
        """The actor's layers compute with rounded weights. A model of its own, such as a critic, is served nowhere."""
        if model == "actor" and self.options.forward:
            from miles_int4_qat.layers import round_weights

            round_weights(chunk, cast("WeightMap", self._map), self._names, self._group_size, self._scale_dtype,
                          lambda: self._rounds)
        return chunk

    @hookimpl
    def microbatch(self, proceed: Callable[[Packed], torch.Tensor], packed: Packed, model: str) -> torch.Tensor:
        """Whose weights are in the actor's place."""
        self._rounds = model == "actor" or (model == "ref" and self.options.reference)
        try:
            return proceed(packed)
        finally:
            self._rounds = True

    @hookimpl
    def export_weights(self, stream: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Packed for an engine whose checkpoint is; else the values that it shall compute with."""
        from miles_megatron.disk_names import on_disk, split

        from miles_int4_qat.stream import packed, rounded

        ours = cast("WeightMap", self._map)
        if self._stated is None:
            return rounded(stream, ours, self._names, self._group_size, self._scale_dtype)
        names = frozenset(on_disk(name, ours) for name in self._names)
        sent = packed(split(stream, ours, names.__contains__), names, self._group_size, self._scale_dtype)
        # SGLang keeps one shape for all weights that it joins, and reads none.
        other = part(self.config, "engine") != "sglang"
        return ((name, tensor) for name, tensor in sent if other or not name.endswith(".weight_shape"))

    @hookimpl
    def import_weights(self, stream: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Plain weights out of packed ones."""
        from miles_int4_qat.stream import unpacked

        return unpacked(stream)

    @hookimpl(name="hf-to-int4")
    def convert(self, source: Path, out: Path) -> str:
        """A plain Hugging Face directory with its linear layers packed in INT4."""
        from miles_int4_qat.conversion import convert

        return convert(source, out, self._group_size, self.options.targets)

    @hookimpl("convert", name="int4-to-hf")
    def convert_to_plain(self, source: Path, out: Path) -> str:
        """A plain Hugging Face directory of a packed one, for --ref-load; the options say nothing here."""
        from miles_int4_qat.conversion import convert_to_plain

        return convert_to_plain(source, out)

    @functools.cached_property
    def _folder(self) -> Path:
        return Path(str(self.config.checkpoint.hf_checkpoint))

    @functools.cached_property
    def _stated(self) -> Stated | None:
        """Of the engine's checkpoint."""
        from miles_int4_qat.names import stated

        return stated(self._folder)

    @functools.cached_property
    def _group_size(self) -> int:
        from miles_int4_qat.names import USUAL

        return self._stated.group_size if self._stated else self.options.group_size or USUAL

    @functools.cached_property
    def _scale_dtype(self) -> torch.dtype:
        """The engine's."""
        import torch

        return getattr(torch, self.config.rollout.engine_dtype or ("bfloat16" if self.config.perf.bf16 else "float32"))

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        """Of the weights that are int4."""
        from miles_megatron.weights import instances

        from miles_int4_qat.names import chosen, differing, packed_names

        inside = [name for ours, _, names in instances(cast("WeightMap", self._map))
                  if ours.startswith("decoder.") for name in names]
        wanted = chosen(inside, self.options.targets)
        if self._stated is not None:
            stored_names = packed_names(self._folder, self._stated, inside)
            if self.options.targets != "auto":
                differing("--int4-qat.targets", wanted, stored_names & set(inside), str(self._folder))
            wanted = stored_names
        if not wanted:
            raise ConfigError("no weight would be rounded to int4", code="int4-nothing-rounded",
                              got=f"targets {self.options.targets}", who=str(self._folder),
                              fix="choose other targets, or run without plugin int4-qat")
        return wanted


def _check(options: Int4QatOptions, config: RunConfig) -> None:
    from miles_int4_qat.names import stated

    size = options.group_size
    if (requested := os.environ.get(THEIRS)) not in (None, "", str(size)):
        raise ConfigError("the environment variable and the run name different group sizes", who="plugin int4-qat",
                          got=f"{THEIRS}={requested}", code="int4-group-size-twice",
                          fix=f"write --int4-qat.group-size {requested}, or unset the variable")
    if config.surface("megatron").get("fp8"):
        raise ConfigError("weights that are rounded to int4 in the forward cannot be rounded to fp8 as well",
                          got=f"fp8 {config.surface('megatron')['fp8']}", code="int4-with-fp8", who="plugin int4-qat",
                              fix="leave --fp8-format out")
    folder = Path(config.checkpoint.hf_checkpoint or "")
    if not (folder / "config.json").is_file() or (stored := stated(folder)) is None:
        return
    if size not in (None, stored.group_size):
        raise ConfigError(f"the engine's checkpoint has groups of {stored.group_size}", got=f"group_size {size}",
                          who=f"--int4-qat.group-size, {folder}", code="int4-engine-group-size",
                          fix="leave the option out, or convert the checkpoint again")
    if part(config, "engine") == "sglang" and str(config.perf.weight_sync).startswith("disk"):
        raise ConfigError("SGLang loads no files over layers that it has repacked for its int4 kernels",
                          got=f"weight_sync {config.perf.weight_sync}", who=f"plugin int4-qat, {folder}",
                          fix="--weight-sync broadcast, or ipc with --colocate", code="int4-sync-unsupported")
