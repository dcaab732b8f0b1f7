"""The plugin: options and hooks. Names are in targets.py, the layers in layers.py and attach.py, syncs in sync.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from miles_core.config import RunConfig, option
from miles_core.errors import ConfigError
from miles_core.hookspecs import hookimpl
from miles_core.plugins.resolve import chosen

if TYPE_CHECKING:
    import torch
    from miles_megatron.specs import WeightMap
    from transformers import PreTrainedModel

    from miles_core.columns import Packed
    from miles_core.stages.rollout import Request
    from miles_core.stages.sync import WeightSync
    from miles_lora.merging import Base, Stream
    from miles_lora.peft import Shape
    from miles_lora.targets import Switch

ADAPTER = "miles_lora"
"""What servers call the adapter."""


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """The adapters: which layers have one, how large, and where they begin."""

    lora_rank: int | None = option(
        None, "Columns of B and rows of A; default: those of --lora-adapter-path.", flags=("--lora-rank",)
    )
    lora_alpha: float = option(16.0, "Adapters are scaled by alpha / rank.", flags=("--lora-alpha",))
    lora_dropout: float = option(0.0, "Only 0 is supported: the sampling and the training policy must be the same.",
                                 flags=("--lora-dropout",))
    lora_type: str = option("canonical_lora", "Only canonical_lora is supported: q, k, v, gate and up have adapters "
                                              "of their own.",
                            flags=("--lora-type",))
    target_modules: str = option(
        "all-linear", "Comma-separated last components of the names of the layers that get adapters, in the checkpoint "
                      "or in Megatron; or all-linear.",
        flags=("--target-modules",),
    )
    exclude_modules: str = option("",
                                  "Comma-separated names of layers that get no adapters.", flags=("--exclude-modules",))
    experts_shared_outer_loras: bool = option(
        False, "All experts of a layer share A of gate and up and B of down; A of down and B of gate and up stay each "
               "expert's own.", flags=("--experts-shared-outer-loras",),
    )
    lora_adapter_path: str | None = option(
        None, "PEFT directory to start from; default: A is random and B is 0.", flags=("--lora-adapter-path",)
    )
    lora_base_cpu_backup: bool = option(
        False, "Colocated servers keep the base in host memory while they sleep, so that it travels once.",
        flags=("--lora-base-cpu-backup",),
    )


def _check(options: LoraOptions, config: RunConfig) -> None:
    """
    Raises:
        ConfigError: adapters that would train another policy than the one that samples, or that servers cannot take.
    """
    from miles_lora.targets import of_all_layers, words

    server, rank = config.surface("server"), options.lora_rank
    alone = config.perf.weight_sync == "adapter" and config.rollout.engine == "sglang"
    own = [name for name in ("lora_target_modules", "enable_lora") if server.get(name)]
    problems = {
        "--lora-dropout": (options.lora_dropout, options.lora_dropout != 0,
                           "with dropout another policy would train than the one that sampled", "leave it out"),
        "--lora-type": (options.lora_type, options.lora_type != "canonical_lora",
                        "q, k and v, and gate and up, have adapters of their own here", "leave it out"),
        "--lora-alpha": (options.lora_alpha, not options.lora_alpha > 0, "adapters would not count", "16 is usual"),
        "--lora-rank": (rank, rank is not None and rank < 1, "adapters of no rank are none", "32 is usual"),
        **{flag: (names, not all(map(of_all_layers, words(names))),
                  "adapters are those of all layers, by the last words of their names",
                  "write such as q_proj,gate_proj, linear_qkv,linear_fc1, or all-linear")
           for flag, names in (("--target-modules", options.target_modules),
                               ("--exclude-modules", options.exclude_modules))},
        "--experts-shared-outer-loras": (True, options.experts_shared_outer_loras and config.perf.trainer == "fsdp",
                                         "experts have no adapters to share there", "train with --trainer megatron, or "
                                         "leave it out"),
        "--enable-mtp-training": (True, bool(config.options.get("mtp", {}).get("enable_training")),
                                  "adapters train alone, and the layers of plugin mtp would stay as they are",
                                  "leave it out, or train without adapters"),
        "--weight-sync": (config.perf.weight_sync, bool(own) and not alone and config.rollout.engine == "sglang"
                          and not config.debug.debug_rollout_only,
                          "servers get merged weights and hold no adapter", "write adapter, or leave "
                          f"{', '.join(own)} of the servers out"),
        "--sglang-max-lora-rank": (server.get("max_lora_rank"), alone and rank is not None and rank > server.get(
            "max_lora_rank", rank), "servers would expect adapters of a smaller rank", "leave it out"),
        "--pause-generation-mode": (config.rollout.pause_generation_mode, alone and
                                    config.rollout.pause_generation_mode == "in_place",
                                    "a server takes no new adapter while requests still use the old one",
                                    "pause by retract or abort, or leave --weight-sync out"),
    }
    for flag, (got, wrong, what, fix) in problems.items():
        if wrong:
            raise ConfigError(what, code="lora-option-unsupported", got=got, who=f"plugin lora, {flag}", fix=fix)


class Lora:
    """Low-rank adapters: the base is frozen, adapters train, and engines get them merged or alone."""

    provides = ("files:lora_adapter_path", "needs-no-log-prob-pass", "hf-modules", "frozen-base")

    def __init__(self, options: LoraOptions, config: RunConfig):
        _check(options, config)
        self.options, self.config = options, config
        self.alone = config.perf.weight_sync == "adapter"
        # Nobody trains, and the engine serves what there is.
        self._given = config.debug.debug_rollout_only and options.lora_adapter_path is not None
        self._switch: Switch | None = None
        self._base: Base | None = None
        self._chunks: list[torch.nn.Module] = []
        self._map: WeightMap | None = None
        self._sent = False

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """Nothing changes; layers that latent attention lacks are told of, and a size of servers without adapters."""
        from miles_lora.plan import without_layers

        if lacking := without_layers(Path(str(config.checkpoint.hf_checkpoint)), self._wanted()[0]):
            note(f"--target-modules: the model's attention is latent and has no {', '.join(lacking)}")
        if not (self.alone or self._given) and config.surface("server").get("max_lora_rank"):
            note("server.max_lora_rank: no effect, as servers get merged weights (--weight-sync adapter)")
        return config

    @hookimpl
    def plan_lines(self, config: RunConfig) -> Iterable[tuple[str, str]]:
        """How many numbers train."""
        from miles_lora.plan import parameters, rank_of

        path = self.options.lora_adapter_path
        if rank := self.options.lora_rank or (rank_of(Path(path)) if path else None):
            count = parameters(Path(str(config.checkpoint.hf_checkpoint)), *self._wanted(), rank,
                               self.options.experts_shared_outer_loras)
            return [("adapters", f"{count:,} parameters train, all others are frozen")] if count else []
        return []

    @hookimpl
    def weight_map(self, weight_map: WeightMap, model: str) -> WeightMap:
        """Adapters are the actor's, and a checkpoint need not have them."""
        from miles_lora.targets import added, targets

        if model != "actor":
            return weight_map
        return added(weight_map, targets(weight_map, *self._wanted(), self.options.experts_shared_outer_loras))

    @hookimpl
    def build_model(self, chunk: torch.nn.Module, folder: Path, model: str,
                    weight_map: WeightMap | None) -> torch.nn.Module:
        """Freeze the actor, add adapters, and fill them from --lora-adapter-path."""
        if model != "actor":
            return chunk
        if weight_map is None:
            self._adapt(cast("PreTrainedModel", chunk), folder)
            return chunk
        from miles_lora.attach import attach
        from miles_lora.targets import Switch, targets, without

        base, shape = without(weight_map), self._shape()
        wanted = targets(base, *self._wanted(), self.options.experts_shared_outer_loras)
        self._switch = self._switch or Switch()
        attach(chunk, base, wanted, shape.rank, shape.scale, self.config.optimizer.seed, self._switch)
        self._chunks.append(chunk)
        self._map = weight_map
        if (self.alone or self._given) and (base.packed or base.renamed):
            raise ConfigError("adapters travel alone only to a model whose files name its layers one by one",
                              code="lora-merged-layer-names", who=str(self.config.checkpoint.hf_checkpoint),
                              fix="leave --weight-sync adapter out")
        if self.options.lora_adapter_path is not None and not next(chunk.parameters()).is_meta:
            from miles_lora.streams import fill

            fill(chunk, weight_map, Path(self.options.lora_adapter_path), shape)
        return chunk

    @hookimpl
    def microbatch(self, proceed: Callable[[Packed], torch.Tensor], packed: Packed, model: str) -> torch.Tensor:
        """Whatever is swapped into the actor's place (the reference) has no adapters."""
        switch = cast("Switch", self._switch)  # build_model comes first
        switch.on = model == "actor"
        try:
            return proceed(packed)
        finally:
            switch.on = True

    @hookimpl
    def export_weights(self, stream: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Merged; or the adapters and then the base, which the local engine gets once."""
        from miles_lora.merging import merged
        from miles_lora.targets import adapter_of

        if not self.alone:
            yield from self._disk(merged(self._plain(stream), self._shape().scale))
            return
        once = self._sent and chosen(self.config, "engine") == "local"
        if self._map is None:  # adapters come first as it is
            stream = self._plain(stream)
            yield from itertools.takewhile(lambda pair: adapter_of(pair[0]) is not None, stream) if once else stream
        else:
            from miles_megatron.weights import hf_stream

            from miles_lora.targets import alone

            yield from self._plain(hf_stream(self._chunks, alone(self._map)))
            yield from () if once else (pair for pair in stream if adapter_of(pair[0]) is None)
        self._sent = True

    @hookimpl
    def import_weights(self, stream: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The local engine computes with merged weights, and keeps the base where adapters travel alone."""
        from miles_lora.merging import Base

        if not (self.alone or self._given):
            return stream
        self._base = self._base or Base(self._shape().scale)
        if self._given:
            from miles_megatron.shards import tensor_files

            from miles_lora import peft

            weights = tensor_files(Path(str(self.config.checkpoint.hf_checkpoint)))
            stream = itertools.chain(peft.tensors_for(Path(str(self.options.lora_adapter_path)), weights), stream)
        return self._base.taken(stream)

    @hookimpl
    def save_weights(self, stream: Iterator[tuple[str, torch.Tensor]],
                     folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """The merged model, and beside it FOLDER-adapter, which PEFT reads."""
        from miles_lora.merging import saved
        from miles_lora.modules import inside

        base = Path(str(self.config.checkpoint.hf_checkpoint)).resolve()
        called = inside(base)
        return self._disk(saved(self._plain(stream), self._shape(), folder, str(base),
                                lambda name: called(self._called(name)), self._packed))

    @hookimpl
    def engine_args(self, fields: dict[str, object]) -> dict[str, object]:
        """What a server needs to hold one adapter beside the base."""
        if not (self.alone or self._given):
            return fields
        from miles_lora.served import server_fields

        path = f"{ADAPTER}={self.options.lora_adapter_path}" if self._given else None
        return server_fields(Path(str(self.config.checkpoint.hf_checkpoint)), self._wanted(), self._shape().rank, path,
                             self.options.lora_base_cpu_backup,
                             cast("list[str]", fields.get("lora_target_modules") or [])) | fields

    @hookimpl
    def generate_request(self, request: Request) -> Request:
        """Servers that have the adapter apart are told to use it."""
        apart = (self.alone or self._given) and chosen(self.config, "engine") == "sglang"
        return replace(request, adapter=ADAPTER) if apart else request

    @hookimpl(name="adapter")
    def weight_sync(self, config: RunConfig) -> WeightSync:
        """The base once, as it would travel otherwise; after that the adapters alone."""
        from miles_lora.sync import weight_sync

        return weight_sync(config, self._shape(), ADAPTER, self.options.lora_base_cpu_backup)

    @hookimpl("convert", name="merge-lora")
    def merge(self, source: Path, out: Path) -> str:
        """A base and the adapters of --lora-adapter-path, or those among its tensors, become a model without."""
        from miles_lora.merge_folder import merge_folder

        path, stated = self.options.lora_adapter_path, "lora_alpha" in self.config.options.get("lora", {})
        return merge_folder(source, out, Path(path) if path else None, self.options.lora_alpha if stated else None)

    def _adapt(self, module: PreTrainedModel, folder: Path) -> None:
        """The same as for Megatron's layers, for a module of transformers that comes from a folder."""
        from miles_lora import modules, peft
        from miles_lora.targets import Switch

        self._switch, shape, path = Switch(), self._shape(), self.options.lora_adapter_path
        modules.attach(module, folder, *self._wanted(), shape, self.config.optimizer.seed, self._switch)
        if path is not None:
            peft.check(Path(path), shape)
            modules.fill(module, Path(path))
        if modules.has_adapters(folder):
            modules.fill(module, folder)

    def _plain(self, stream: Stream) -> Stream:
        """A trainer's stream, a tensor for each layer and adapter."""
        if self._map is None:
            from miles_lora.modules import named

            return named(stream)
        from miles_megatron.disk_names import to_plain

        return to_plain(stream, self._map)

    def _disk(self, stream: Stream) -> Stream:
        """As the files of the checkpoint have it."""
        if self._map is None:
            return stream
        from miles_megatron.disk_names import to_disk

        return to_disk(stream, self._map)

    def _packed(self, adapters: Stream) -> Stream:
        """Adapters by themselves, by the names that they have in files, as files have them."""
        if self._map is None:
            return adapters
        from miles_megatron.disk_names import to_disk

        return to_disk(adapters, replace(self._map, renamed=()))

    def _called(self, name: str) -> str:
        """A weight in the files of the checkpoint."""
        if self._map is None:
            return name
        from miles_megatron.disk_names import on_disk

        return on_disk(name, self._map)

    def _wanted(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        from miles_lora.targets import words

        return words(self.options.target_modules), words(self.options.exclude_modules)

    def _shape(self) -> Shape:
        from miles_lora import peft

        return peft.shape(self.options.lora_rank, self.options.lora_adapter_path, self.options.lora_alpha)
