"""DeepSeek-V3 (arXiv:2412.19437), Kimi K2 (arXiv:2507.20534), GLM-4.5 to 5 (arXiv:2508.06471), MiniMax-M2 and Hy3.

Their routers have sigmoid scores and a bias that has a say in the choice of experts alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from miles_megatron.decoder import Decoder, every_layer, refuse, rotary
from miles_megatron.hf_config import read_as
from miles_megatron.latent import Indexer, Latent
from miles_megatron.mixture import Mixture, Names, after
from miles_megatron.specs import Attention

_MIXTRAL = Names(
    router="block_sparse_moe.gate.weight", bias="block_sparse_moe.e_score_correction_bias",
    gate="block_sparse_moe.experts.{expert}.w1.weight", up="block_sparse_moe.experts.{expert}.w3.weight",
    down="block_sparse_moe.experts.{expert}.w2.weight",
)  # fmt: skip
_HUNYUAN = Names(router="mlp.router.gate.weight", bias="mlp.expert_bias", shared="mlp.shared_mlp.")


def deepseek_v3(hf: Any) -> Decoder:
    """Latent attention, experts chosen by groups, shared experts.

    Raises:
        ConfigError: another activation, or a router that Megatron's would compute otherwise.
    """
    return _latent(hf, after(hf.num_hidden_layers, hf.first_k_dense_replace))


def kimi_k2(hf: Any) -> Decoder:
    """DeepSeek-V3 with experts in one group; transformers has it under no name of its own.

    Raises:
        ConfigError: as `deepseek_v3`.
    """
    return deepseek_v3(read_as(hf, "deepseek_v3"))


def kimi_k25(hf: Any) -> Decoder:
    """Kimi K2 as the text model beside a vision tower, which is left as it is.

    Raises:
        ConfigError: as `deepseek_v3`.
    """
    inside = tuple((name, f"language_model.{name}") for name in ("model.", "lm_head."))
    return replace(kimi_k2(hf.text_config), renamed=inside, carried=("vision_tower.", "mm_projector."))


def glm4_moe_lite(hf: Any) -> Decoder:
    """GLM-4.7-Flash: DeepSeek-V3 whose dense layers are named one by one.

    Raises:
        ConfigError: as `deepseek_v3`.
    """
    return _latent(hf, _sparse(hf))


def deepseek_v32(hf: Any) -> Decoder:
    """DeepSeek-V3 in which an indexer chooses the keys of a query.

    Raises:
        ConfigError: as `deepseek_v3`; attention of another kind in some layers.
    """
    kind = next((kind for kind in hf.layer_types if kind == "deepseek_sparse_attention"), "indexed_attention")
    refuse(hf, mlp_bias=False, layer_types=[kind] * hf.num_hidden_layers)
    return _latent(hf, _sparse(hf), _indexer(hf, interleaved=False))


def glm_moe_dsa(hf: Any) -> Decoder:
    """GLM-5: GLM-4.7-Flash's latent attention, in which an indexer chooses the keys of a query.

    Raises:
        ConfigError: as `deepseek_v3`; layers that take over the choice of the one before.
    """
    refuse(hf, indexer_types=["full"] * hf.num_hidden_layers, mlp_bias=False)
    return _latent(hf, _sparse(hf), _indexer(hf, interleaved=True))


def glm4_moe(hf: Any) -> Decoder:
    """GQA with rope on a part of each head and biases on q, k and v, experts, shared experts.

    Raises:
        ConfigError: as `deepseek_v3`.
    """
    refuse(hf, hidden_act="silu")
    return Decoder(
        hf=hf, attention=every_layer(hf, Attention(rotary(hf, partial=True))), qk_norm=bool(hf.use_qk_norm),
        qkv_bias=bool(hf.attention_bias), mixture=_mixture(hf, after(hf.num_hidden_layers, hf.first_k_dense_replace)),
        **_drafting(hf, "num_nextn_predict_layers"),
    )  # fmt: skip


def minimax_m2(hf: Any) -> Decoder:
    """GQA with rope on a part of each head, a norm over all heads of q and of k, experts in every layer.

    Raises:
        ConfigError: as `deepseek_v3`.
    """
    refuse(hf, hidden_act="silu", attn_type_list=[1] * hf.num_hidden_layers, use_qk_norm=True,
           qk_norm_type="per_layer", scoring_func="sigmoid", use_routing_bias=True, shared_intermediate_size=0,
           **{f"layernorm_{part}_beta": 1.0 for part in ("full_attention", "linear_attention", "mlp")})
    mixture = Mixture(
        layers=hf.num_hidden_layers, sparse=tuple(range(hf.num_hidden_layers)), experts=hf.num_local_experts,
        chosen=hf.num_experts_per_tok, width=hf.intermediate_size, score="sigmoid", bias=True, names=_MIXTRAL,
    )  # fmt: skip
    # Which part is in a key of its own; transformers reads it from 5.18 on.
    part = hf.rotary_dim / hf.head_dim if getattr(hf, "rotary_dim", None) else None
    return Decoder(hf=hf, attention=every_layer(hf, Attention(rotary(hf, partial=True, fraction=part))),
                   wide_qk_norm=True, mixture=mixture, **_drafting(hf, "num_mtp_modules"))


def hy_v3(hf: Any) -> Decoder:
    """Hy3: GQA with norms on q and k, experts, a shared one.

    Raises:
        ConfigError: as `deepseek_v3`; biases.
    """
    sparse = _sparse(hf)
    refuse(hf, hidden_act="silu", attention_bias=False, mlp_bias=False, qk_norm=True, route_norm=True,
           moe_router_use_sigmoid=True, moe_router_enable_expert_bias=True, first_k_dense_replace=min(sparse))
    mixture = Mixture(
        layers=hf.num_hidden_layers, sparse=sparse, experts=hf.num_experts, chosen=hf.num_experts_per_tok,
        width=hf.moe_intermediate_size, shared=hf.moe_intermediate_size * hf.num_shared_experts, score="sigmoid",
        bias=True, scale=hf.router_scaling_factor, names=_HUNYUAN,
    )  # fmt: skip
    return Decoder(hf=hf, attention=every_layer(hf, Attention(rotary(hf))), qk_norm=True, mixture=mixture,
                   **_drafting(hf, "num_nextn_predict_layers"))


def _sparse(hf: Any) -> tuple[int, ...]:
    """Layers that config.json gives experts, one by one."""
    return tuple(layer for layer, kind in enumerate(hf.mlp_layer_types) if kind == "sparse")


def _latent(hf: Any, sparse: tuple[int, ...], indexer: Indexer | None = None) -> Decoder:
    refuse(hf, hidden_act="silu", num_key_value_heads=hf.num_attention_heads, scoring_func="sigmoid",
           topk_method="noaux_tc", moe_layer_freq=1)
    latent = Latent(
        query_rank=hf.q_lora_rank, rank=hf.kv_lora_rank, plain=hf.qk_nope_head_dim, turned=hf.qk_rope_head_dim,
        value=hf.v_head_dim, bias=bool(hf.attention_bias), indexer=indexer,
    )  # fmt: skip
    neighbours = indexer is not None or bool(hf.rope_interleave)
    return latent.decoder(hf, interleaved=neighbours, mixture=_mixture(hf, sparse),
                          **_drafting(hf, "num_nextn_predict_layers"))


def _indexer(hf: Any, interleaved: bool) -> Indexer:
    return Indexer(heads=hf.index_n_heads, size=hf.index_head_dim, chosen=hf.index_topk, interleaved=interleaved)


def _mixture(hf: Any, sparse: tuple[int, ...]) -> Mixture:
    """The router that DeepSeek-V3 and GLM share."""
    return Mixture(
        layers=hf.num_hidden_layers, sparse=sparse, experts=hf.n_routed_experts, chosen=hf.num_experts_per_tok,
        width=hf.moe_intermediate_size, shared=hf.moe_intermediate_size * hf.n_shared_experts, score="sigmoid",
        normalised=bool(hf.norm_topk_prob), bias=True, groups=hf.n_group, of_groups=hf.topk_group,
        scale=hf.routed_scaling_factor,
    )  # fmt: skip


def _drafting(hf: Any, key: str) -> dict[str, Any]:
    """Layers for multi-token prediction, counted on from the model's own."""
    first = hf.num_hidden_layers
    count = getattr(hf, key, None) or 0
    left = tuple(f"model.layers.{layer}." for layer in range(first, first + count))
    return {"left": left, "left_counts": (key,) if count else ()}
