"""What layers are made of: Megatron-core's own modules and ours, or Transformer Engine's.

Both sets give a layer the same submodules, so parameters have the same names and one weight map, one checkpoint and one
optimizer serve both. Which set a model has is its config's `transformer_impl`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from miles_core.errors import ConfigError
from miles_megatron import cpu, layers
from miles_megatron.attention import PackedAttention
from miles_megatron.layers_own_attention import LayersOwnAttention
from miles_megatron.rope import Rope
from miles_megatron.specs import Attention, ModelSpec
from miles_megatron.wide_norm import WideNorm

cpu.install()

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402 - after install()
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer import ModuleSpec, TransformerConfig  # noqa: E402
from megatron.core.transformer.attention import SelfAttentionSubmodules  # noqa: E402
from megatron.core.transformer.enums import AttnBackend  # noqa: E402
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp  # noqa: E402
from megatron.core.transformer.mlp import MLPSubmodules  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules  # noqa: E402

logger = logging.getLogger(__name__)

LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"


@dataclass(frozen=True, slots=True)
class LayerModules:
    """The modules of a layer.

    Args:
        column, row: linear layers cut along their outputs and along their inputs.
        norm: called with (config, hidden_size, eps).
        activations: ModelSpec.activation -> the module of an MLP, called with (config).
        attention: the core attention of layers of one kind: takes the config, what the checkpoint says, and the rope.
        grouped: the module that holds a rank's experts together and its linear layers; None for one MLP per expert.
        wrapped: called with a model that trains once its gradients have their buffers; None for nothing to do.
    """

    column: type
    row: type
    norm: Callable
    activations: Mapping[str, type]
    attention: Callable[[TransformerConfig, Attention, Rope | None], ModuleSpec]
    grouped: tuple[type, type, type] | None = None
    wrapped: Callable[[torch.nn.Module], None] | None = None


def packed_attention(_config: TransformerConfig, attention: Attention, rope: Rope | None) -> ModuleSpec:
    """Ours, which needs nothing but torch."""
    return ModuleSpec(module=PackedAttention,
                      params={"rope": rope, "window": attention.window, "softcap": attention.softcap,
                              "sinks": attention.sinks, "warming": attention.warming})


OURS = LayerModules(ColumnParallelLinear, RowParallelLinear, layers.Norm,
             {"silu": layers.SwiGLU, "gelu_pytorch_tanh": layers.GeGLU, "clamped_swiglu": layers.ClampedSwiGLU,
              "clamped_silu": layers.ClampedSiLU, "relu2": layers.SquaredReLU},
             packed_attention)


def implementation(wanted: str | None, bf16: bool) -> str:
    """Whose layers a model gets: in bfloat16 Transformer Engine's where it and a GPU are, else Megatron's local ones.

    In float32 these, unless the run says otherwise: Transformer Engine multiplies float32 in TF32, which is 10 bits.

    Args:
        wanted: --transformer-impl.

    Raises:
        ConfigError: neither of the two.
    """
    if wanted not in (None, LOCAL, TRANSFORMER_ENGINE):
        raise ConfigError("transformer_impl should be local or transformer_engine", code="transformer-impl-unknown",
                          got=wanted, who="--transformer-impl", fix="write one of them, or leave it out")
    missing = "the package transformer_engine" if cpu.no_transformer_engine() else None
    if cpu.no_cuda():
        missing = "a GPU"
    if missing is not None and wanted == TRANSFORMER_ENGINE:
        logger.warning("transformer_impl = transformer_engine needs %s: Megatron's local layers train instead", missing)
    default = TRANSFORMER_ENGINE if bf16 else LOCAL
    return LOCAL if missing is not None else wanted or default


def modules_of(config: TransformerConfig) -> LayerModules:
    """The modules that a model's config names."""
    if config.transformer_impl == LOCAL:
        return OURS
    from miles_megatron import te

    return te.layer_modules()


def fits(config: TransformerConfig, attention: Attention) -> bool:
    """Whether Transformer Engine's fused attention computes this; else PackedAttention does, between its layers.

    The kernels are for 16 bits, cap no scores, turn without a magnitude, are called without sinks and without queries
    that grow, have heads of up to 256 channels, and no window where keys travel between context-parallel ranks. In
    deterministic mode there are none for packed rows, and scores of all rows by all would be written out: 256 GiB for
    16,384 rows.
    """
    windowed = attention.window is not None and config.context_parallel_size > 1
    narrow = (attention.head_dim or config.kv_channels) <= _WIDEST
    magnitude = 1 if attention.rotary is None else attention.rotary.magnitude
    wanted = config.attention_backend != AttnBackend.local and magnitude == 1 and not config.deterministic_mode
    plain = attention.softcap is None and not attention.sinks and attention.warming is None
    return wanted and config.bf16 and plain and narrow and not windowed


_WIDEST = 256
"""Channels of a head that FlashAttention and cuDNN have backward kernels for."""


class _OwnedRow(RowParallelLinear):
    """A row-parallel layer whose output is no view: Megatron adds an expert's bias to it in place."""

    def forward(self, x):
        output, bias = super().forward(x)
        return output.clone(), bias


def layer(config: TransformerConfig, spec: ModelSpec, sparse: bool, attention: Attention | None, rope: Rope | None,
          modules: LayerModules) -> ModuleSpec:
    """A layer of one kind.

    Args:
        sparse: whether its MLP is a mixture of experts.
        attention: None for an MLP alone.
        rope: of its queries and keys, if they have one; the core attention turns them.
    """
    made = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if sparse else None, qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )  # fmt: skip
    inside = made.submodules
    _norms(inside, config, spec, modules)
    if attention is None:
        inside.input_layernorm = inside.self_attention = IdentityOp
        inside.self_attn_bda = IdentityFuncOp
    elif attention.mixer is not None:
        inside.self_attention = attention.mixer(config, attention, rope, modules)
    else:
        _self_attention(inside.self_attention, config, spec, attention, rope, modules)
    if attention is not None and spec.lone:
        inside.pre_mlp_layernorm = inside.mlp = IdentityOp
        inside.mlp_bda = IdentityFuncOp
    else:
        _mlp(inside.mlp, config, spec, sparse, modules)
    if spec.reshape is not None:
        spec.reshape(config, made, attention, sparse, modules)
    return made


def _norms(inside: TransformerLayerSubmodules, config: TransformerConfig, spec: ModelSpec,
           modules: LayerModules) -> None:
    """Before both sublayers, and between them and the residual."""
    inside.input_layernorm = inside.pre_mlp_layernorm = modules.norm if spec.pre_norms else IdentityOp
    if spec.post_norms:
        params = {"config": config, "norm": modules.norm}
        inside.self_attn_bda = inside.mlp_bda = ModuleSpec(module=layers.NormThenAdd, params=params)
        if spec.layer_scalar:
            inside.mlp_bda = ModuleSpec(module=layers.NormThenAdd, params=params | {"scalar": True})
    elif spec.residual_scale != 1:
        params = {"config": config, "scale": spec.residual_scale}
        inside.self_attn_bda = inside.mlp_bda = ModuleSpec(module=layers.ScaledAdd, params=params)


def _self_attention(made: ModuleSpec, config: TransformerConfig, spec: ModelSpec, attention: Attention,
                    rope: Rope | None, modules: LayerModules) -> None:
    """Megatron's, or that with heads of the layer's own."""
    if not attention.plain:
        made.module, made.params = LayersOwnAttention, {**made.params, "attention": attention}
    inner: SelfAttentionSubmodules = made.submodules
    inner.linear_qkv, inner.linear_proj = modules.column, modules.row
    inner.core_attention = modules.attention(config, attention, rope)
    if config.qk_layernorm:
        inner.q_layernorm = inner.k_layernorm = modules.norm
    if spec.wide_qk_norm:
        inner.q_layernorm, inner.k_layernorm = (ModuleSpec(module=WideNorm, params={"heads": heads})
                                                for heads in (config.num_attention_heads, config.num_query_groups))


def _mlp(mlp: ModuleSpec, config: TransformerConfig, spec: ModelSpec, sparse: bool, modules: LayerModules) -> None:
    """One MLP, or a mixture of experts."""
    activation = modules.activations[spec.activation]
    dense = MLPSubmodules(linear_fc1=modules.column, linear_fc2=modules.row, activation_func=activation)
    if not sparse:
        mlp.submodules = dense
        return
    mixture = mlp.submodules
    mixture.experts.submodules = mixture.shared_experts.submodules = dense
    if config.add_bias_linear and modules.row is RowParallelLinear:
        mixture.experts.submodules = replace(dense, linear_fc2=_OwnedRow)
    if config.moe_grouped_gemm and modules.grouped is not None:
        together, fc1, fc2 = modules.grouped
        grouped = MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2, activation_func=activation)
        mixture.experts = ModuleSpec(module=together, submodules=grouped)
