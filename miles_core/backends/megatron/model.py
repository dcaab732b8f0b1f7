"""From an architecture to a Megatron GPTModel: the config, the layer spec, and a model that ends in hidden states."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from miles_core.backends.megatron import cpu, layers
from miles_core.backends.megatron.attention import PackedAttention
from miles_core.backends.megatron.given import defaults_for
from miles_core.backends.megatron.rope import Rope
from miles_core.backends.megatron.specs import Attention, ModelSpec
from miles_core.errors import ConfigError, UnknownKeyError

cpu.install()

from megatron.core import parallel_state  # noqa: E402 - after install()
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer import ModuleSpec, TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_block import (  # noqa: E402
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # noqa: E402

logger = logging.getLogger(__name__)

LOCAL_ONLY_OFF = {
    "gradient_accumulation_fusion": "Apex's CUDA extension",
    "apply_rope_fusion": "Transformer Engine",
    "persist_layer_norm": "Apex",
    "moe_permute_fusion": "Transformer Engine",
    "moe_grouped_gemm": "Transformer Engine or the grouped_gemm package",
    "bias_activation_fusion": "nothing, but it compiles at the first step and SwiGLU is one pass already",
    "bias_dropout_fusion": "nothing, but it compiles at the first step and there is no dropout",
    "masked_softmax_fusion": "a CUDA kernel",
}
"""Switches that the local layer spec keeps off, with what they would need."""


class LanguageModel(GPTModel):
    """A GPTModel whose last stage returns hidden states after the final norm, so that no batch's logits ever exist.

    Called as Megatron calls models: `model(input_ids, position_ids, attention_mask, packed_seq_params=...)` with
    input_ids [1, T] returns [T, 1, H] (sequence parallel: [T / tensor, 1, H]); position_ids and attention_mask are
    None. Log-probs come from `logprob.token_log_probs(hidden, model.output_weight, ...)`.
    """

    embedding_scale: float = 1.0
    """As in ModelSpec; `build` sets it."""

    def _preprocess(self, *args, **kwargs):
        embedded, *rest = super()._preprocess(*args, **kwargs)
        if self.pre_process and self.embedding_scale != 1:
            # Rounded to the embedding's dtype first, as Hugging Face's Gemma does.
            embedded = embedded * torch.tensor(self.embedding_scale, dtype=embedded.dtype, device=embedded.device)
        return (embedded, *rest)

    def _postprocess(self, hidden_states: torch.Tensor, **_) -> torch.Tensor:
        return hidden_states

    @property
    def output_weight(self) -> torch.Tensor:
        """[V / tensor, H] of the output layer, the embedding's where they are tied; on the last stage only."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


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
    overrides = _checked(spec, overrides or {})
    dtype = torch.bfloat16 if bf16 else torch.float32
    layout = {
        "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline,
        "virtual_pipeline_model_parallel_size": virtual_pipeline, "context_parallel_size": context,
        "expert_model_parallel_size": expert, "expert_tensor_parallel_size": expert_tensor or tensor,
        "sequence_parallel": sequence_parallel, "bf16": bf16, "params_dtype": dtype, "pipeline_dtype": dtype,
    }  # fmt: skip
    if virtual_pipeline is not None:
        # With two stages both neighbours are the same rank, and batched p2p silently mixes them up.
        layout |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    local = _LOCAL_DEFAULTS if local_spec() else {}
    ours = {**_DEFAULTS, "activation_func": _ACTIVATIONS[spec.activation][0]}
    values = {**defaults_for(TransformerConfig), **ours, **local, **spec.defaults, **spec.constants, **overrides,
              **layout}  # fmt: skip
    if values.get("moe_aux_loss_coeff") and "moe_router_load_balancing_type" not in overrides:
        values["moe_router_load_balancing_type"] = "aux_loss"
    if overrides.get("recompute_granularity") == "full":
        values = {"recompute_method": "uniform", "recompute_num_layers": 1, **values}
    try:
        return TransformerConfig(**values)
    except (ValueError, AssertionError, ImportError, TypeError, ZeroDivisionError) as error:
        raise ConfigError("Megatron refuses this model or layout", got=str(error).strip() or type(error).__name__,
                          who=spec.source, fix="change the [model] or [perf] keys that it names") from error


def _checked(spec: ModelSpec, overrides: Mapping[str, object]) -> dict[str, object]:
    """The overrides, without what the local layers cannot have."""
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    for name, value in overrides.items():
        if name not in known:
            raise UnknownKeyError("Megatron's TransformerConfig has no such field", got=name,
                                  fix="see the fields of megatron.core.transformer.TransformerConfig")
        if name == "moe_layer_freq" and isinstance(value, int):
            value = [int(layer % value == 0) for layer in range(spec.constants["num_layers"])]
        if name in spec.constants and value != spec.constants[name]:
            raise ConfigError(f"{name} disagrees with the checkpoint, which says {spec.constants[name]}", got=value,
                              who=spec.source, fix=f"leave {name} out, or use a checkpoint with that value")
    off = LOCAL_ONLY_OFF if local_spec() else {}
    for name, needs in off.items():
        if overrides.get(name):
            logger.warning("%s is off: the layers that run here have no use for it (it needs %s)", name, needs)
    return {name: value for name, value in overrides.items() if name not in off and name not in spec.constants}


_ACTIVATIONS = {"silu": (F.silu, layers.SwiGLU), "gelu_pytorch_tanh": (F.gelu, layers.GeGLU)}
"""Of ModelSpec.activation: the function that Megatron's config names (Transformer Engine's GELU is the tanh one), and
the gated module that stands for it in the local layers."""

_DEFAULTS = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}

_LOCAL_DEFAULTS = {
    **dict.fromkeys(LOCAL_ONLY_OFF, False),
    "use_cpu_initialization": True,
    # Not Transformer Engine's: it makes Megatron's MLP call the spec's activation, which is layers.SwiGLU.
    "use_te_activation_func": True,
}


def local_spec() -> bool:
    """Whether layers are Megatron's local ones; the seam for Transformer Engine's on GPUs."""
    return True


def layer_spec(config: TransformerConfig, spec: ModelSpec, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage.

    Where Transformer Engine's layers are wanted, `get_gpt_decoder_block_spec(config, use_transformer_engine=True)`
    belongs here behind `local_spec()`, together with a weight map in its names.
    """
    pattern = config.moe_layer_freq if config.num_moe_experts else 0
    pattern = pattern if isinstance(pattern, list) else [int(bool(pattern))] * config.num_layers
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    mine = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    ropes = {one.rotary: Rope(config.kv_channels, one.rotary) for one in spec.attention}
    kinds = [(bool(pattern[layer]), spec.attention[layer]) for layer in mine]
    made = {kind: _local_layer(config, spec, *kind, ropes[kind[1].rotary]) for kind in set(kinds)}
    return TransformerBlockSubmodules(layer_specs=[made[kind] for kind in kinds], layer_norm=layers.Norm)


def _local_layer(
    config: TransformerConfig, spec: ModelSpec, sparse: bool, attention: Attention, rope: Rope
) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if sparse else None, qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )  # fmt: skip
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = layers.Norm
    if spec.post_norms:
        parts.self_attn_bda = parts.mlp_bda = ModuleSpec(module=layers.NormThenAdd, params={"config": config})
    inner = parts.self_attention.submodules
    inner.core_attention = ModuleSpec(
        module=PackedAttention, params={"rope": rope, "window": attention.window, "softcap": attention.softcap}
    )
    if config.qk_layernorm:
        inner.q_layernorm = inner.k_layernorm = layers.Norm
    mlp = parts.mlp.submodules.experts if sparse else parts.mlp
    mlp.submodules.activation_func = _ACTIVATIONS[spec.activation][1]
    return layer


def build(config: TransformerConfig, spec: ModelSpec, vp_stage: int | None = None,
          kind: type[LanguageModel] = LanguageModel) -> LanguageModel:
    """This rank's part of the model, randomly initialised. Needs `cpu.initialize` (or Megatron's own) before.

    Args:
        kind: a subclass with another head.

    Raises:
        ConfigError: the vocabulary does not divide among tensor-parallel ranks.
    """
    if spec.vocab_size % config.tensor_model_parallel_size:
        raise ConfigError("the vocabulary does not divide by the tensor-parallel size",
                          got=f"{spec.vocab_size} / {config.tensor_model_parallel_size}", who=spec.source,
                          fix="choose a tensor-parallel size that divides it")
    where = {"ignore_virtual": False, "vp_stage": vp_stage}
    model = kind(
        config,
        layer_spec(config, spec, vp_stage),
        vocab_size=spec.vocab_size,
        max_sequence_length=spec.max_positions,
        # The local layers' attention turns q and k itself (attention.PackedAttention).
        position_embedding_type="none",
        share_embeddings_and_output_weights=spec.tied,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        vp_stage=vp_stage,
    )
    model.embedding_scale = spec.embedding_scale
    return model
