"""Nemotron-H (arXiv:2504.03624) and Nemotron 3 (arXiv:2512.20848), which has mixtures of experts for MLPs."""

from __future__ import annotations

import copy
import math
from typing import Any

from miles_megatron.decoder import Decoder, LayerNorms, by_layer_type, refuse
from miles_megatron.mixture import Mixture, Names
from miles_megatron.specs import Attention, Rule

from miles_specs_nemotron.mamba import Mamba

_OURS, _THEIRS = "decoder.layers.{layer}.", "model.layers.{layer}.mixer."
_STORED = (("model.embed_tokens.", "backbone.embeddings."), ("model.norm.", "backbone.norm_f."),
           ("model.", "backbone."))
_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""What releases of transformers before 5.16 call layers."""
_NAMES = Names(router="mixer.gate.weight", bias="mixer.gate.e_score_correction_bias",
               up="mixer.experts.{expert}.up_proj.weight", down="mixer.experts.{expert}.down_proj.weight",
               shared="mixer.shared_experts.", latent_down="mixer.fc1_latent_proj.weight",
               latent_up="mixer.fc2_latent_proj.weight")


def nemotron_h(hf: Any) -> Decoder:
    """Layers of one sublayer each, by `layers_block_type`; queries and keys are not turned.

    Raises:
        ConfigError: biases of linear layers, other activations, tied embeddings, a window, limits of the time steps,
            a router that Megatron's would compute otherwise.
    """
    refuse(hf, attention_bias=False, mlp_bias=False, use_bias=False, mamba_proj_bias=False, residual_in_fp32=False,
           tie_word_embeddings=False, mlp_hidden_act="relu2", mamba_hidden_act="silu", sliding_window=None,
           n_shared_experts=1)
    hf = copy.copy(hf)
    hf.time_step_limit = tuple(hf.time_step_limit)  # of a file it is a list
    refuse(hf, time_step_limit=(0.0, math.inf))
    hf.rms_norm_eps = hf.layer_norm_epsilon
    hf.layer_types = [_KINDS.get(kind, kind) for kind in hf.layer_types]
    layers = {kind: tuple(layer for layer, one in enumerate(hf.layer_types) if one == kind)
              for kind in ("linear_attention", "full_attention", "mlp", "moe")}
    mamba = Mamba(heads=hf.mamba_num_heads, head_dim=hf.mamba_head_dim, groups=hf.n_groups, state=hf.ssm_state_size,
                  kernel=hf.conv_kernel, bias=bool(hf.use_conv_bias))
    kinds = {"linear_attention": Attention(None, mixer=mamba), "full_attention": Attention(None), "mlp": None,
             "moe": None}
    mixture = _mixture(hf, layers["moe"]) if layers["moe"] else None
    return Decoder(
        hf=hf, attention=by_layer_type(hf, kinds), lone=True, norms=LayerNorms("norm", "norm"), activation="relu2",
        mixing=(*mamba.rules(layers["linear_attention"]), *_attention(layers["full_attention"])), mixture=mixture,
        mlp=(*_dense(layers["mlp"]), *(mixture.sparse_rules() if mixture is not None else ())),
        constants={"linear_attention_freq": [int(kind == "linear_attention") for kind in hf.layer_types]},
        renamed=_STORED, left=("mtp.",), left_counts=("num_nextn_predict_layers",) * bool(hf.num_nextn_predict_layers),
    )  # fmt: skip


def _mixture(hf: Any, sparse: tuple[int, ...]) -> Mixture:
    """DeepSeek-V3's router; MLPs without gates."""
    return Mixture(
        layers=hf.num_hidden_layers, sparse=sparse, experts=hf.n_routed_experts, chosen=hf.num_experts_per_tok,
        width=hf.moe_intermediate_size, shared=hf.moe_shared_expert_intermediate_size, latent=hf.moe_latent_size,
        score="sigmoid", normalised=bool(hf.norm_topk_prob), bias=True, groups=hf.n_group, of_groups=hf.topk_group,
        scale=hf.routed_scaling_factor, gated=False, names=_NAMES,
    )  # fmt: skip


def _attention(layers: tuple[int, ...]) -> tuple[Rule, ...]:
    ours = _OURS + "self_attention."
    qkv = tuple(f"{_THEIRS}{part}_proj.weight" for part in "qkv")
    return (Rule(ours + "linear_qkv.weight", qkv, "qkv", layers),
            Rule(ours + "linear_proj.weight", (_THEIRS + "o_proj.weight",), layers=layers))


def _dense(layers: tuple[int, ...]) -> tuple[Rule, ...]:
    names = {"linear_fc1": "up_proj", "linear_fc2": "down_proj"}
    return tuple(Rule(f"{_OURS}mlp.{ours}.weight", (f"{_THEIRS}{theirs}.weight",), layers=layers)
                 for ours, theirs in names.items())
