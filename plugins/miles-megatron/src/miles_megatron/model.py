"""From an architecture to a Megatron GPTModel: the config, the layer spec, and a model that ends in hidden states."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F

from miles_core.errors import ConfigError, UnknownKeyError
from miles_megatron import cpu
from miles_megatron.config_overrides import defaults_for
from miles_megatron.module_specs import LOCAL, TRANSFORMER_ENGINE, implementation, layer, modules_of
from miles_megatron.rope import Rope
from miles_megatron.specs import Attention, ModelSpec, WeightMap

cpu.install()

from megatron.core import parallel_state  # noqa: E402 - after install()
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_block import (  # noqa: E402
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # noqa: E402

logger = logging.getLogger(__name__)

ALWAYS_OFF = {
    "gradient_accumulation_fusion": "nothing: Transformer Engine's layers do it without this switch, which wants Apex",
    "apply_rope_fusion": "nothing: the core attention turns q and k, on a GPU in one kernel",
    "persist_layer_norm": "Apex",
    "bias_activation_fusion": "nothing, but it compiles at the first step and the activation is one pass already",
    "bias_dropout_fusion": "nothing, but it compiles at the first step and there is no dropout",
    "masked_softmax_fusion": "a CUDA kernel of Megatron's own attention",
    "use_te_activation_func": "nothing: the activation is one kernel already",
}
"""Switches that the layers here keep off, with what they would need."""

ROUTER_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff")
"""Fields of TransformerConfig: what multiplies losses of routers, of all tokens that they see."""

_PADDING = 4
"""Of what GPTModel._preprocess returns behind the embeddings: where the mask of padding is."""

LOCAL_ONLY_OFF = {
    "moe_permute_fusion": "Transformer Engine",
    "moe_grouped_gemm": "Transformer Engine or the grouped_gemm package",
}
"""Switches that the local layers keep off too."""


class LanguageModel(GPTModel):
    """A GPTModel whose last stage returns hidden states after the final norm, so that no batch's logits ever exist.

    Called as Megatron calls models: `model(input_ids, position_ids, attention_mask, packed_seq_params=...)` with
    input_ids [1, T] returns [T, 1, H] (sequence parallel: [T / tensor, 1, H]); position_ids and attention_mask are
    None. Log-probs come from `logprob.token_log_probs(hidden, model.output_weight, ...)`.
    """

    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    """As in ModelSpec; `build` sets them."""
    beside_embedding: torch.nn.Module | None
    """As in ModelSpec; `build` sets it."""
    weight_map: WeightMap | None = None
    """What its parameters are called in a checkpoint, for who observes the modules of a trainer's model."""

    def _preprocess(self, *args, packed_seq_params=None, **kwargs):
        embedded, *others = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if packed_seq_params is not None:
            packed_seq_params.tokens = kwargs["input_ids"]
            others[_PADDING] = packed_seq_params.padding = router_padding(self.config, packed_seq_params.padding)
        if self.pre_process and self.embedding_scale != 1:
            # Rounded to the embedding's dtype first, as Hugging Face's Gemma does.
            embedded = embedded * torch.tensor(self.embedding_scale, dtype=embedded.dtype, device=embedded.device)
        if self.pre_process and (replaced := getattr(packed_seq_params, "replaced", None)) is not None:
            rank = parallel_state.get_tensor_model_parallel_rank() if self.config.sequence_parallel else 0
            embedded = replaced(embedded, rank * len(embedded))
        if self.beside_embedding is not None:
            embedded = self.beside_embedding(kwargs["input_ids"], embedded)
        return (embedded, *others)

    def _postprocess(self, hidden_states: torch.Tensor, **_) -> torch.Tensor:
        return hidden_states * self.logit_scale if self.post_process and self.logit_scale != 1 else hidden_states

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        """None where they are not tied: Megatron-core adds up the gradients of what this returns over stages, also for
        multi-token prediction, whose own copy of the embedding would be on the last one."""
        return super().shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None

    @property
    def output_weight(self) -> torch.Tensor:
        """[V / tensor, H] of the output layer, the embedding's where they are tied; on the last stage only."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def routers_learn(config: TransformerConfig) -> bool:
    """Whether routers learn from every token, whatever its advantage: by losses, or by a bias that is moved."""
    moved = config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate
    lost = any(np.any(getattr(config, name) or 0) for name in ROUTER_LOSSES)
    return config.num_moe_experts is not None and bool(moved or lost)


def router_padding(config: TransformerConfig, padding: torch.Tensor | None) -> torch.Tensor | None:
    """[1, t], which of the rows that this rank's routers see are padding, of [T] of its rows; None where they do not
    learn. Layouts differ in padding: counted, it would be learnt from, and differently in each."""
    if padding is None or not routers_learn(config):
        return None
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return padding.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank() if ranks > 1 else 0][None]


def transformer_config(
    spec: ModelSpec,
    overrides: Mapping[str, object] | None = None,
    *,
    bf16: bool = False,
    tensor: int = 1,
    pipeline: int = 1,
    virtual_pipeline: int | None = None,
    context: int = 1,
    expert: int = 1,
    expert_tensor: int | None = None,
    sequence_parallel: bool = False,
) -> TransformerConfig:
    """Megatron's config of a model: the checkpoint's constants, our defaults, then the overrides.

    Args:
        overrides: fields of TransformerConfig by name, recomputation included.

    Raises:
        ConfigError: an override that contradicts the checkpoint, or values that Megatron refuses together.
        UnknownKeyError: an override that TransformerConfig has no field for.
    """
    chosen = implementation((overrides or {}).get("transformer_impl"), bf16)
    overrides = _checked(spec, overrides or {}, chosen)
    dtype = torch.bfloat16 if bf16 else torch.float32
    layout = {
        "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline,
        "virtual_pipeline_model_parallel_size": virtual_pipeline, "context_parallel_size": context,
        "expert_model_parallel_size": expert, "expert_tensor_parallel_size": expert_tensor or tensor,
        "sequence_parallel": sequence_parallel, "bf16": bf16, "params_dtype": dtype, "pipeline_dtype": dtype,
        "calculate_per_token_loss": True,
    }  # fmt: skip
    if virtual_pipeline is not None:
        layout |= _INTERLEAVED
        for name, value in _INTERLEAVED.items():
            if overrides.get(name, value) != value:
                logger.warning("%s is %s: a virtual pipeline computes wrong results without it", name, value)
    ours = {**_DEFAULTS, **_OF_LAYERS[chosen], "activation_func": _ACTIVATIONS[spec.activation]}
    values = {**defaults_for(TransformerConfig), **ours, **spec.defaults, **spec.constants, **overrides, **layout,
              "transformer_impl": chosen}  # fmt: skip
    if spec.wide_qk_norm:
        # Megatron would add up the gradients of norms of q and k over tensor-parallel ranks, which here are cut.
        values["qk_layernorm"] = False
    if values.get("moe_aux_loss_coeff") and "moe_router_load_balancing_type" not in overrides:
        values["moe_router_load_balancing_type"] = "aux_loss"
    if overrides.get("recompute_granularity") == "full":
        values = {"recompute_method": "uniform", "recompute_num_layers": 1, **values}
    try:
        return TransformerConfig(**values)
    except (ValueError, AssertionError, ImportError, TypeError, ZeroDivisionError) as error:
        raise ConfigError("Megatron rejects this model or layout", code="megatron-rejects-model",
                          got=str(error).strip() or type(error).__name__, who=spec.source,
                          fix="change the [model] or [perf] keys that it names") from error


def _checked(spec: ModelSpec, overrides: Mapping[str, object], chosen: str) -> dict[str, object]:
    """The overrides, without what the chosen layers cannot have."""
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    overrides = {name: value for name, value in overrides.items() if value not in spec.also.get(name, ())}
    for name, value in overrides.items():
        if name not in known:
            raise UnknownKeyError("unknown field of Megatron's TransformerConfig", code="megatron-field-unknown",
                                  got=name, fix="see the fields of megatron.core.transformer.TransformerConfig")
        if name == "moe_layer_freq" and isinstance(value, int):
            value = [int(layer % value == 0) for layer in range(spec.constants["num_layers"])]
        if name in spec.constants and value != spec.constants[name]:
            raise ConfigError(f"{name} disagrees with the checkpoint, which says {spec.constants[name]}",
                              code="constant-disagrees-with-checkpoint", got=value, who=spec.source,
                              fix=f"leave {name} out, or use a checkpoint with that value")
    off = ALWAYS_OFF | (LOCAL_ONLY_OFF if chosen == LOCAL else {})
    for name, needs in off.items():
        if overrides.get(name):
            logger.warning("%s is off: the layers that run here have no use for it (it needs %s)", name, needs)
    return {name: value for name, value in overrides.items() if name not in off and name not in spec.constants}


_INTERLEAVED = {"overlap_p2p_comm": True, "batch_p2p_comm": False, "deallocate_pipeline_outputs": False}
"""With two stages both neighbours are the same rank, and batched p2p mixes them up. What overlapping sends still read,
Megatron-core 0.16 would free (its pull request 4047 fixes that): the next stage got whatever came to lie there."""

_ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": F.gelu, "clamped_swiglu": F.silu,
                "clamped_silu": F.silu, "relu2": F.relu}
"""Of ModelSpec.activation: the function that Megatron's config names, of those that it takes; a layer computes what its
module does. Transformer Engine's GELU is the tanh one."""

_DEFAULTS = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    **dict.fromkeys(ALWAYS_OFF, False),
    # Megatron's MLP then calls the module that the layer names, which is one pass (module_specs.py).
    "use_te_activation_func": True,
}

_OF_LAYERS = {
    LOCAL: {**dict.fromkeys(LOCAL_ONLY_OFF, False), "use_cpu_initialization": True},
    TRANSFORMER_ENGINE: {"moe_grouped_gemm": True, "moe_permute_fusion": True},
}
"""Defaults that go with whose layers they are."""


def layer_spec(config: TransformerConfig, spec: ModelSpec, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, of what `config.transformer_impl` says."""
    pattern = config.moe_layer_freq if config.num_moe_experts else 0
    pattern = pattern if isinstance(pattern, list) else [int(bool(pattern))] * config.num_layers
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    mine = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    kinds = [(bool(pattern[number]), spec.attention[number]) for number in mine]
    modules = modules_of(config)
    rope = functools.cache(Rope)  # layers that turn alike share their tables

    def turning(one: Attention | None) -> Rope | None:
        return rope(one.head_dim or config.kv_channels, one.rotary) if one is not None and one.rotary else None

    made = {kind: layer(config, spec, *kind, turning(kind[1]), modules) for kind in set(kinds)}
    return TransformerBlockSubmodules(layer_specs=[made[kind] for kind in kinds], layer_norm=modules.norm)


def build(config: TransformerConfig, spec: ModelSpec, vp_stage: int | None = None,
          kind: type[LanguageModel] = LanguageModel) -> LanguageModel:
    """This rank's part of the model, randomly initialised. Needs `cpu.initialize` (or Megatron's own) before.

    Args:
        kind: a subclass with another head.

    Raises:
        ConfigError: the vocabulary does not divide among tensor-parallel ranks.
    """
    if spec.vocab_size % config.tensor_model_parallel_size:
        raise ConfigError("the vocabulary does not divide by the tensor-parallel size", code="vocabulary-not-divisible",
                          got=f"{spec.vocab_size} / {config.tensor_model_parallel_size}", who=spec.source,
                          fix="choose a tensor-parallel size that divides it")
    where = {"ignore_virtual": False, "vp_stage": vp_stage}
    model = kind(
        config,
        layer_spec(config, spec, vp_stage),
        vocab_size=spec.vocab_size,
        max_sequence_length=spec.max_positions,
        # The core attention turns q and k itself (module_specs.py).
        position_embedding_type="none",
        share_embeddings_and_output_weights=spec.tied,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        vp_stage=vp_stage,
    )
    model.embedding_scale, model.logit_scale = spec.embedding_scale, spec.logit_scale
    wider = spec.beside_embedding if model.pre_process else None
    model.beside_embedding = None if wider is None else wider(config, modules_of(config))
    if config.num_moe_experts and config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
        _apart(model)
    if config.transformer_impl == TRANSFORMER_ENGINE:
        from miles_megatron import te

        te.finish(model)
    return model


def _apart(model: LanguageModel) -> None:
    """Mark experts as cut by ranks of their own, and so reduced over these.

    Megatron does where experts are spread over ranks; without that they have as much to do with other groups than the
    dense layers' as soon as they are cut otherwise.
    """
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce, parameter.sequence_parallel = False, False
