"""The plugin: options and hooks. Names are in targets.py, the layers in layers.py and attach.py, syncs in sync.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from miles_core.config import RunConfig, option
from miles_core.hookspecs import hookimpl
from miles_core.plugins.resolve import chosen

if TYPE_CHECKING:
    import torch

    from miles_core.backends.megatron.specs import ModelSpec, WeightMap
    from miles_core.columns import Packed
    from miles_core.stages.rollout import Request
    from miles_core.stages.sync import WeightSync
    from miles_lora.attach import Switch
    from miles_lora.merging import Base
    from miles_lora.peft import Shape

ADAPTER = "miles_lora"
"""What servers call the adapter."""


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """The adapters: which layers have one, how large, and where they begin."""

    lora_rank: int | None = option(
        None, "Columns of B and rows of A; default: those of --lora-adapter-path.", flags=("--lora-rank",)
    )
    lora_alpha: float = option(16.0, "Adapters count alpha / rank times.", flags=("--lora-alpha",))
    lora_dropout: float = option(0.0, "0 alone: what samples and what trains has to be one policy.",
                                 flags=("--lora-dropout",))
    lora_type: str = option("canonical_lora", "canonical_lora alone: q, k, v, gate and up have adapters of their own.",
                            flags=("--lora-type",))
    target_modules: str = option(
        "all-linear", "Last words of the names of the layers that get one, with commas; or all-linear.",
        flags=("--target-modules",),
    )
    exclude_modules: str = option("", "Those of them that get none.", flags=("--exclude-modules",))
    lora_adapter_path: str | None = option(
        None, "A PEFT directory to begin with; default: A is drawn and B is 0.", flags=("--lora-adapter-path",)
    )
    lora_base_cpu_backup: bool = option(
        False, "Colocated servers keep the base in host memory while they sleep, so that it travels once.",
        flags=("--lora-base-cpu-backup",),
    )


class Lora:
    """Low-rank adapters: the base is frozen, adapters train, and engines get them merged or alone."""

    provides = ("files:lora_adapter_path",)
    refuses = (
        {"when": {"lora.lora_rank": {"set": False}, "lora.lora_adapter_path": {"set": False},
                  "debug.debug_rollout_only": False},
         "what": "adapters need a rank", "fix": "add --lora-rank, 32 for instance"},
        {"when": {"architecture.rank": {"set": True}, "debug.debug_rollout_only": False,
                  "lora.target_modules": {"like": "(.*,)?(all-linear|kv_a_proj_with_mqa)(,.*)?"},
                  "lora.exclude_modules": {"unlike": "(.*,)?kv_a_proj_with_mqa(,.*)?"}},
         "what": "a layer that makes latents can have no adapter", "fix": "add --exclude-modules kv_a_proj_with_mqa"},
        {"when": {"architecture.query_rank": {"set": True}, "debug.debug_rollout_only": False,
                  "lora.target_modules": {"like": "(.*,)?(all-linear|q_a_proj)(,.*)?"},
                  "lora.exclude_modules": {"unlike": "(.*,)?q_a_proj(,.*)?"}},
         "what": "a layer that makes latents of queries can have no adapter",
         "fix": "add --exclude-modules q_a_proj,kv_a_proj_with_mqa"},
        {"when": {"mtp.enable_training": True},
         "what": "adapters train alone, and the layers of plugin mtp would stay as they are",
         "fix": "leave --enable-mtp-training out, or train without adapters"},
        {"when": {"lora.lora_rank": {"outside": "[1, inf)"}},
         "what": "adapters of no rank are none", "fix": "leave --lora-rank out to train all weights"},
        {"when": {"lora.lora_rank": {"above": "architecture.hidden"}},
         "what": "the rank is above the width of what it should approximate", "fix": "32 is usual"},
        {"when": {"server.max_lora_rank": {"set": True}, "perf.weight_sync": {"not": "adapter"}, "engine": "sglang",
                  "debug.debug_rollout_only": False},
         "what": "servers get merged weights and hold no adapter", "fix": "add --weight-sync adapter, or leave it out"},
        {"when": {"server.lora_target_modules": {"set": True}, "perf.weight_sync": {"not": "adapter"},
                  "engine": "sglang", "debug.debug_rollout_only": False},
         "what": "servers get merged weights and hold no adapter", "fix": "add --weight-sync adapter, or leave it out"},
        {"when": {"server.enable_lora": True, "perf.weight_sync": {"not": "adapter"}, "engine": "sglang",
                  "debug.debug_rollout_only": False},
         "what": "servers get merged weights and hold no adapter", "fix": "add --weight-sync adapter, or leave it out"},
        {"when": {"lora.lora_rank": {"above": "server.max_lora_rank"}},
         "what": "servers would be told to expect adapters of a smaller rank than --lora-rank",
         "fix": "leave --sglang-max-lora-rank out: it is --lora-rank's"},
        {"when": {"lora.lora_adapter_path/adapter_config.json/r": {"above": "server.max_lora_rank"}},
         "what": "servers would be told to expect adapters of a smaller rank than adapter_config.json's",
         "fix": "leave --sglang-max-lora-rank out: it is the adapter's"},
        {"when": {"server.lora_target_modules": {"set": True, "unlike": "all|qkv_proj|[qkv]_proj"},
                  "lora.target_modules": {"like": r".*(all-linear|\b[qkv]_proj\b).*"},
                  "lora.exclude_modules": {"unlike": r".*\b[qkv]_proj\b.*"}, "architecture.rank": {"set": False}},
         "what": "servers apply no adapters on q_proj, k_proj and v_proj",
         "fix": "leave --sglang-lora-target-modules out: it is --target-modules's"},
        {"when": {"server.lora_target_modules": {"set": True, "unlike": "all|o_proj"},
                  "lora.target_modules": {"like": r".*(all-linear|\bo_proj\b).*"},
                  "lora.exclude_modules": {"unlike": r".*\bo_proj\b.*"}},
         "what": "servers apply no adapters on o_proj", "fix": "leave --sglang-lora-target-modules out"},
        {"when": {"server.lora_target_modules": {"set": True, "unlike": "all|gate_up_proj|(gate|up)_proj"},
                  "lora.target_modules": {"like": r".*(all-linear|\b(gate|up)_proj\b).*"},
                  "lora.exclude_modules": {"unlike": r".*\b((gate|up)_proj|w[13])\b.*"}},
         "what": "servers apply no adapters on gate_proj and up_proj", "fix": "leave --sglang-lora-target-modules out"},
        {"when": {"server.lora_target_modules": {"set": True, "unlike": "all|down_proj"},
                  "lora.target_modules": {"like": r".*(all-linear|\bdown_proj\b).*"},
                  "lora.exclude_modules": {"unlike": r".*\b(down_proj|w2)\b.*"}},
         "what": "servers apply no adapters on down_proj", "fix": "leave --sglang-lora-target-modules out"},
        {"when": {"server.max_loaded_loras": {"below": 2}, "perf.weight_sync": "adapter",
                  "server.max_loras_per_batch": {"set": False}},
         "what": "a batch has the adapter and the base, which want room for both", "fix": "leave the limit out"},
        {"when": {"server.speculative_algorithm": {"set": True, "unlike": "(?i)NGRAM|NONE"},
                  "perf.weight_sync": "adapter"},
         "what": "SGLang serves adapters with drafts of n-grams alone", "fix": "NGRAM, or leave --weight-sync out"},
        {"when": {"perf.weight_sync": "adapter", "engine": "sglang", "rollout.pause_generation_mode": "in_place"},
         "what": "a server takes no new adapter while requests still use the old one",
         "fix": "pause by retract or abort, or leave --weight-sync out: merged weights can be swapped"},
        {"when": {"perf.weight_sync": "adapter", "engine": "sglang", "architecture.experts": {"set": True},
                  "lora.target_modules": {"like": r".*(all-linear|\b((gate|up|down)_proj|w[123])\b).*"},
                  "lora.exclude_modules": {"unlike": r".*\b(down_proj|w[123])\b.*"}},
         "what": "SGLang takes no new weights for experts that may have adapters",
         "fix": "add --exclude-modules gate_proj,up_proj,down_proj, or leave --weight-sync out: that reaches experts"},
        {"when": {"perf.weight_sync": "adapter", "engine": "sglang", "architecture.rank": {"set": False},
                  "lora.target_modules": {"like": r".*\b[qkv]_proj\b.*", "unlike":
                                          r"(?=.*\bq_proj)(?=.*\bk_proj)(?=.*\bv_proj).*|.*all-linear.*"}},
         "what": "SGLang keeps q_proj, k_proj and v_proj as one layer, and takes adapters of all or none",
         "fix": "name all three, or leave --weight-sync out: merged weights need no such"},
        {"when": {"perf.weight_sync": "adapter", "engine": "sglang", "architecture.rank": {"set": False},
                  "lora.exclude_modules": {"like": r".*\b[qkv]_proj\b.*",
                                           "unlike": r"(?=.*\bq_proj)(?=.*\bk_proj)(?=.*\bv_proj).*"},
                  "lora.target_modules": {"like": ".*all-linear.*"}},
         "what": "SGLang keeps q_proj, k_proj and v_proj as one layer, and takes adapters of all or none",
         "fix": "exclude all three, or leave --weight-sync out: merged weights need no such"},
        {"when": {"perf.weight_sync": "adapter", "engine": "sglang",
                  "lora.target_modules": {"like": r".*\b(gate|up)_proj\b.*",
                                          "unlike": r"(?=.*\bgate_proj)(?=.*\bup_proj).*|.*all-linear.*"}},
         "what": "SGLang keeps gate_proj and up_proj as one layer, and takes adapters of both or none",
         "fix": "name both, or leave --weight-sync out: merged weights need no such"},
        {"when": {"perf.weight_sync": "adapter", "engine": "sglang",
                  "lora.exclude_modules": {"like": r".*\b(gate|up)_proj\b.*",
                                           "unlike": r"(?=.*\bgate_proj)(?=.*\bup_proj).*"},
                  "lora.target_modules": {"like": ".*all-linear.*"}},
         "what": "SGLang keeps gate_proj and up_proj as one layer, and takes adapters of both or none",
         "fix": "exclude both, or leave --weight-sync out: merged weights need no such"},
        {"when": {"lora.lora_adapter_path": {"missing": True}},
         "what": "there is no such adapter", "fix": "name a PEFT folder, or leave --lora-adapter-path out"},
        {"when": {"lora.lora_adapter_path": {"lacks": "adapter_config.json"}},
         "what": "this is no folder of an adapter: it has no adapter_config.json",
         "fix": "name the folder that PEFT saved it into; a whole model is --hf-checkpoint"},
        {"when": {"lora.lora_adapter_path": {"lacks": "adapter_model.safetensors"}},
         "what": "the adapter's folder has no adapter_model.safetensors",
         "fix": "save it with PEFT as safetensors, or fetch it again"},
        {"when": {"lora.lora_adapter_path": {"set": True}, "lora.lora_adapter_path/adapter_config.json": {"set": False},
                  "lora.lora_adapter_path/adapter_model.safetensors": {"set": True}},
         "what": "the adapter's adapter_config.json cannot be read", "fix": "fetch it again"},
        {"when": {"lora.lora_adapter_path/adapter_config.json/r": {"apart": "lora.lora_rank"}},
         "what": "the adapter to begin with has another rank than the run",
         "fix": "leave --lora-rank out, or write the r of its adapter_config.json"},
        {"when": {"lora.lora_adapter_path/adapter_config.json/lora_alpha": {"apart": "lora.lora_alpha"}},
         "what": "the adapter to begin with has another alpha than the run",
         "fix": "write --lora-alpha as its adapter_config.json has it"},
        {"when": {"lora.lora_adapter_path/adapter_config.json/peft_type": {"set": True, "not": "LORA"}},
         "what": "the adapter to begin with is not LoRA", "fix": "leave --lora-adapter-path out"},
        {"when": {"lora.lora_adapter_path/adapter_config.json/task_type": {"like": "SEQ_\\w+|TOKEN_CLS|QUESTION_ANS"}},
         "what": "the adapter to begin with is no language model's", "fix": "leave --lora-adapter-path out"},
        {"when": {"lora.lora_adapter_path/adapter_config.json/r": {"text": True}},
         "what": "the rank in adapter_config.json is a number", "fix": "take its quotes away"},
        {"when": {"lora.lora_adapter_path/adapter_config.json/lora_alpha": {"text": True}},
         "what": "lora_alpha in adapter_config.json is a number", "fix": "take its quotes away"},
        {"when": {"lora.lora_adapter_path/adapter_config.json/init_lora_weights": {
            "like": "(?i)(pissa|olora|corda|loftq|lora_ga).*"}},
         "what": "this way to begin an adapter changes the base, which the checkpoint's is not",
         "fix": "merge it where it was trained, or save it with PEFT's path_initial_model_for_weight_conversion"},
        {"when": {"lora.lora_adapter_path/adapter_config.json/target_parameters": {"set": True}},
         "what": "the adapter is on parameters that are no layers, such as fused experts, which have none here",
         "fix": "use an adapter without target_parameters"},
        {"when": {"lora.lora_adapter_path/adapter_config.json/*_token*": {"set": True}},
         "what": "the adapter holds embeddings of tokens, or counts after some of them alone, which is not done here",
         "fix": "use plain LoRA adapters"},
        {"when": {"lora.lora_adapter_path/adapter_config.json/layer*_[tr]*": {"set": True}},
         "what": "the adapter is on some layers or on repeated ones, and here all have one",
         "fix": "use an adapter without layers_to_transform and layer_replication"},
        {"when": {"lora.lora_adapter_path/adapter_config.json/fan_in_fan_out": True},
         "what": "the adapter is of layers that keep their weights transposed, and no model here has such",
         "fix": "name one of this model"},
        {"when": {"lora.lora_adapter_path/adapter_config.json/target_modules": {
            "unlisted": "([qkvo]|gate|up|down)_proj|all-linear|.*[(*].*"},
                  "model.model_name": {"like": "llama|mistral|qwen2|qwen3"}},
         "what": "the adapter to begin with is of another family: its layers are not this model's",
         "fix": "name one of this model"},
        {"when": {"lora.lora_adapter_path/adapter_config.json/base_model_name_or_path": {
            "like": "(.*/)?(Meta-)?Llama-[0-9][^/]*"},
                  "model.model_name": {"like": "qwen\\w+|mistral"}},
         "what": "the adapter to begin with belongs to another model", "fix": "name one of this model"},
        {"when": {"lora.lora_adapter_path/adapter_model.safetensors/*.default.weight": {"set": True}},
         "what": "the adapter's tensors have names of a model in memory", "fix": "save it with PEFT's save_pretrained"},
        {"when": {"lora.lora_adapter_path/adapter_model.safetensors/base_model.model.layers.0.*/dtype": {
            "set": True}}, "what": "the adapter's tensors have names of the model without its head",
         "fix": "save it anew with the head"},
        {"when": {"lora.lora_adapter_path/adapter_model.safetensors/*.gate_proj.lora_B.weight/shape/0": {
            "apart": "architecture.ffn"},
                  "architecture.experts": {"set": False}},
         "what": "the adapter to begin with is of a model of another width", "fix": "name one of this model"},
        {"when": {"lora.lora_adapter_path/adapter_config.json/use_*ora": True},
         "what": "DoRA and rank-stabilised adapters are not trained here", "fix": "use plain LoRA adapters"},
        {"when": {"lora.lora_adapter_path/adapter_config.json/*bias": {"unlisted": "none|False"}},
         "what": "adapters with biases are not trained here", "fix": "use plain LoRA adapters"},
        {"when": {"lora.lora_adapter_path/adapter_config.json/modules_to_save": {"set": True}},
         "what": "the adapter holds whole layers, which are not trained here", "fix": "use plain LoRA adapters"},
        {"when": {"lora.lora_adapter_path/adapter_config.json/*_pattern/*": {"set": True}},
         "what": "all layers have one rank and one alpha here", "fix": "use one without rank_pattern, alpha_pattern"},
        {"when": {"lora.lora_adapter_path/adapter_model.safetensors/*.[qkv]_proj.lora_A.weight/shape/1":
                  {"apart": "architecture.hidden"}},
         "what": "the adapter to begin with is of a model of another width", "fix": "name one of this model"},
        {"when": {"lora.lora_adapter_path/adapter_model.safetensors/*.lora_A.weight/shape/0":
                  {"apart": "lora.lora_adapter_path/adapter_config.json/r"}},
         "what": "the adapter's tensors have another rank than its adapter_config.json", "fix": "fetch both again"},
        {"when": {"lora.target_modules": {"unlike": ".*all-linear.*"},
                  "lora.lora_adapter_path/adapter_config.json/target_modules": {
                      "like": "[qkvo]_proj|gate_proj|up_proj|down_proj", "unnamed": "lora.target_modules"}},
         "what": "the adapter to begin with adapts a layer that the run does not",
         "fix": "write --target-modules as its adapter_config.json has it"},
        {"when": {"lora.target_modules": {"like": ".*all-linear.*"}, "lora.exclude_modules": "",
                  "model.model_name": {"like": "llama|mistral|qwen2|qwen3"},
                  "lora.lora_adapter_path/adapter_config.json/target_modules": {
                      "like": "[qkvo]_proj", "not": "gate_proj"}},
         "what": "the run adapts all layers, and the adapter to begin with does not",
         "fix": "write --target-modules as its adapter_config.json has it"},
        {"when": {"lora.target_modules": {"like": ".*all-linear.*"}, "lora.exclude_modules": "",
                  "model.model_name": {"like": "llama|mistral|qwen2|qwen3"},
                  "lora.lora_adapter_path/adapter_config.json/target_modules": {
                      "like": "gate_proj|up_proj", "not": "q_proj"}},
         "what": "the run adapts all layers, and the adapter to begin with does not",
         "fix": "write --target-modules as its adapter_config.json has it"},
        {"when": {"lora.target_modules": {"like": "(.*,)? *(linear_(qkv|proj|fc1|fc2)|query_key_value|c_attn)(,.*)?"}},
         "what": "layers with adapters are named as Hugging Face's Llama names them",
         "fix": "--target-modules all-linear, or some of q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"},
        {"when": {"lora.target_modules": {"unlike": r"( *(all-linear|\w*proj\w*|w[123])? *(,|$))+"},
                  "debug.debug_rollout_only": False},
         "what": "these are not the last words of linear layers' names",
         "fix": "write names with commas and nothing around them: --target-modules q_proj,v_proj, or all-linear"},
        {"when": {"lora.exclude_modules": {"unlike": r"( *(\w*proj\w*|w[123])? *(,|$))*"},
                  "debug.debug_rollout_only": False},
         "what": "these are not the last words of linear layers' names",
         "fix": "write names with commas: --exclude-modules o_proj,down_proj; other layers have no adapter anyhow"},
        {"when": {"lora.target_modules": {"unlike": "( *(all-linear|([qkvo]|gate|up|down)_proj)? *(,|$))+"},
                  "model.model_name": {"like": "llama|mistral|qwen2|qwen3|qwen3_moe"},
                  "debug.debug_rollout_only": False},
         "what": "the model has no linear layers of this name",
         "fix": "all-linear, or some of q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"},
        {"when": {"lora.target_modules": {"like": "[ ,]*"}, "debug.debug_rollout_only": False},
         "what": "no layer would have an adapter", "fix": "--target-modules all-linear"},
        {"when": {"lora.target_modules": {"is": "lora.exclude_modules"}, "debug.debug_rollout_only": False},
         "what": "no layer is left to have an adapter", "fix": "leave --exclude-modules out"},
        {"when": {"lora.lora_alpha": {"outside": "(0, inf)"}}, "what": "adapters should count", "fix": "16 is usual"},
        {"when": {"lora.lora_dropout": {"above": 0}},
         "what": "with dropout another policy would train than the one that sampled",
         "fix": "leave --lora-dropout out"},
        {"when": {"lora.lora_adapter_path/adapter_config.json/peft_type": "LORA",
                  "lora.lora_adapter_path/adapter_model.safetensors/*lora_[AB]*": {"set": False}},
         "what": "the adapter's adapter_model.safetensors holds no adapter",
         "fix": "save it again with PEFT; under ZeRO-3 the parts have to be gathered first"},
        {"when": {"lora.lora_type": {"not": "canonical_lora"}},
         "what": "q, k and v, and gate and up, have adapters of their own here", "fix": "leave --lora-type out"},
    )

    def __init__(self, options: LoraOptions, config: RunConfig):
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
    def weight_map(self, weight_map: WeightMap, model: str) -> WeightMap:
        """Adapters are the actor's, and a checkpoint need not have them."""
        from miles_lora.targets import added, targets

        if model != "actor":
            return weight_map
        return added(weight_map, targets(weight_map, *self._wanted()))

    @hookimpl
    def build_model(self, chunk: torch.nn.Module, spec: ModelSpec, model: str,
                    weight_map: WeightMap) -> torch.nn.Module:
        """Freeze the actor, add adapters, and fill them from --lora-adapter-path."""
        if model != "actor":
            return chunk
        from miles_lora.attach import Switch, attach
        from miles_lora.targets import OPTIONAL, targets

        base = replace(weight_map, rules=tuple(rule for rule in weight_map.rules if rule.optional != OPTIONAL))
        wanted, shape = targets(base, *self._wanted()), self._shape()
        self._switch = self._switch or Switch()
        attach(chunk, base, wanted, shape.rank, shape.scale, self.config.optimizer.seed, self._switch)
        self._chunks.append(chunk)
        self._map = weight_map
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

        if not self.alone:
            yield from merged(stream, self._shape().scale)
            return
        from miles_core.backends.megatron.weights import hf_stream
        from miles_lora.targets import adapter_of, alone

        yield from hf_stream(self._chunks, alone(cast("WeightMap", self._map)))
        if self._sent and chosen(self.config, "engine") == "local":
            return
        yield from ((name, tensor) for name, tensor in stream if adapter_of(name) is None)
        self._sent = True

    @hookimpl
    def import_weights(self, stream: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The local engine computes with merged weights, and keeps the base where adapters travel alone."""
        from miles_lora.merging import Base

        if not (self.alone or self._given):
            return stream
        self._base = self._base or Base(self._shape().scale)
        if self._given:
            from miles_lora import peft

            stream = itertools.chain(peft.tensors(Path(str(self.options.lora_adapter_path))), stream)
        return self._base.taken(stream)

    @hookimpl
    def save_weights(self, stream: Iterator[tuple[str, torch.Tensor]],
                     folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """The merged model, and beside it FOLDER-adapter, which PEFT reads."""
        from miles_lora.streams import saved

        return saved(stream, self._shape(), folder, str(Path(str(self.config.checkpoint.hf_checkpoint)).resolve()))

    @hookimpl
    def engine_args(self, fields: dict[str, object]) -> dict[str, object]:
        """What a server needs to hold one adapter beside the base."""
        if not (self.alone or self._given):
            return fields
        from miles_lora.served import server_fields

        path = f"{ADAPTER}={self.options.lora_adapter_path}" if self._given else None
        return server_fields(Path(str(self.config.checkpoint.hf_checkpoint)), self._wanted(), self._shape().rank, path,
                             self.options.lora_base_cpu_backup) | fields

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

        path = self.options.lora_adapter_path
        return merge_folder(source, out, None if path is None else Path(path), self.options.lora_alpha)

    def _wanted(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        from miles_lora.targets import words

        return words(self.options.target_modules), words(self.options.exclude_modules)

    def _shape(self) -> Shape:
        from miles_lora import peft

        return peft.shape(self.options.lora_rank, self.options.lora_adapter_path, self.options.lora_alpha)
