"""A plugin that plants one defect into a trainer's model before its first pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from miles_core.config import option
from miles_core.hookspecs import hookimpl


@dataclass(frozen=True, kw_only=True)
class DefectsOptions:
    """Which."""

    plant: str | None = option(None, "Name of the defect.")


class Defects:
    """Plants a defect."""

    def __init__(self, options: DefectsOptions):
        self.options = options

    @hookimpl
    def log_prob(self, proceed, access):
        """The models are loaded; nothing has computed yet."""
        (chunk,) = access.chunks("actor")
        if self.options.plant is not None:
            with torch.no_grad():
                PLANTS[self.options.plant](chunk)
        return proceed()


def whole(tensor):
    """The rank's own numbers, of a sharded parameter too."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def layer(model, number):
    return model.decoder.layers[number] if hasattr(model, "decoder") else model.model.layers[number]


def at(number, path):
    """(model) -> a part of its layer."""
    return lambda model: layer(model, number).get_submodule(path)


def noised(tensor, share=0.1):
    """Weights of some other step."""
    tensor = whole(tensor)
    tensor.add_(share * tensor.std() * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5)))


def swapped(tensor, one, other):
    tensor = whole(tensor)
    tensor[[one, other]] = tensor[[other, one]].clone()


def setting(part, name, value):
    def plant(model):
        module = part(model)
        assert getattr(module, name) != value
        setattr(module, name, value)

    return plant


def zeroed(part, name):
    def plant(model):
        tensor = whole(getattr(part(model), name))
        assert tensor.abs().sum() > 0
        tensor.zero_()

    return plant


def stale(part, name="weight"):
    return lambda model: noised(getattr(part(model), name))


def on_second_rank(plant):
    return lambda model: plant(model) if torch.distributed.get_rank() == 1 else None


def left_out(part):
    """A module hands on what it is given."""
    def plant(model):
        part(model).forward = lambda hidden, *_: hidden

    return plant


def transposed(part):
    def plant(model):
        weight = whole(part(model).weight)
        weight.copy_(weight.t().clone())

    return plant


def rows_swapped(part, one, other, name="weight"):
    def plant(model):
        weight = whole(getattr(part(model), name))
        weight.copy_(torch.cat([weight[other], weight[one]]))

    return plant


def rope_base(model):
    rotary = model.model.rotary_emb
    rotary.inv_freq.copy_(rotary.inv_freq**1.1)


def rope_scaled(model):
    rotary = model.model.rotary_emb
    rotary.inv_freq.mul_(0.5)


def positions_off_by_one(model):
    """The first token of a packed sample has the last position of the one before it."""
    rotary = model.model.rotary_emb
    forward = rotary.forward

    def wrong(hidden, position_ids, *rest):
        return forward(hidden, position_ids.roll(1, 1), *rest)

    rotary.forward = wrong


def no_boundaries(number):
    """A layer's packed samples see those before them."""
    def plant(model):
        from miles_fsdp.attention import Boundaries

        attention = layer(model, number).self_attn
        told = attention._miles_boundaries

        class Merged(Boundaries):
            lengths = property(lambda _: [sum(told.lengths)], lambda *_: None)

        attention._miles_boundaries = Merged()

    return plant


def head_stale(model):
    """The output layer has not followed the embedding that it is tied to."""
    weight = model.output_weight.detach().clone()
    noised(weight)
    # Of this model alone: its class is that of later ones, too.
    model.__class__ = type("Stale", (type(model),), {"output_weight": property(lambda _: weight)})


def halved_gradient(part):
    """The backward pass of a module is wrong, and its forward pass is not."""
    def plant(model):
        module = part(model)
        forward = module.forward

        def wrong(hidden, *rest, **more):
            return forward(0.5 * hidden + 0.5 * hidden.detach(), *rest, **more)

        module.forward = wrong

    return plant


def expert(number, which, one, other=None):
    """Of the experts that transformers keeps in one tensor."""
    def plant(model):
        tensor = getattr(layer(model, number).mlp.experts, which)
        noised(whole(tensor)[one]) if other is None else swapped(tensor, one, other)

    return plant


def swap_experts(experts, one, other):
    parameters = dict(experts.named_parameters())
    for name, parameter in parameters.items():
        if f".{one}." in name:
            partner = parameters[name.replace(f".{one}.", f".{other}.")]
            parameter.data, partner.data = partner.data.clone(), parameter.data.clone()


def bfloat16_router(model):
    gate = layer(model, 2).mlp.gate
    weight = whole(gate.weight)
    weight.copy_(weight.bfloat16())


def bias_lost(part):
    return zeroed(part, "bias")


PLANTS = {
    # positions and masks
    "rope-base": rope_base,
    "rope-unscaled": rope_scaled,
    "positions-off-by-one": positions_off_by_one,
    "samples-seen": no_boundaries(2),
    "window-left-out": setting(at(3, "self_attn"), "sliding_window", None),
    "window-one-less": setting(at(2, "self_attn"), "sliding_window", 23),
    "megatron-window": setting(at(2, "self_attention.core_attention"), "window", None),
    # scales
    "attention-scale": setting(at(1, "self_attn"), "scaling", 0.2),
    "megatron-attention-scale": setting(at(0, "self_attention.core_attention"), "scale", 0.17),
    "residual-scale": setting(at(1, ""), "residual_multiplier", 1.0),
    "embedding-scale": setting(lambda model: model.model, "embedding_multiplier", 5.0),
    "logit-scale": setting(lambda model: model.config, "logits_scaling", 5.0),
    # norms
    "norm-epsilon": setting(at(2, "input_layernorm"), "variance_epsilon", 1e-5),
    "megatron-norm-epsilon": setting(at(1, "self_attention.q_layernorm"), "eps", 1e-5),
    "q-norm-left-out": left_out(at(1, "self_attn.q_norm")),
    "megatron-k-norm-left-out": left_out(at(3, "self_attention.k_layernorm")),
    "latent-norm-left-out": left_out(at(1, "self_attn.kv_a_layernorm")),
    "final-norm-stale": stale(lambda model: model.model.norm),
    # projections
    "projection-transposed": transposed(at(2, "self_attn.k_proj")),
    "q-bias-missing": bias_lost(at(1, "self_attn.q_proj")),
    "megatron-down-bias-missing": bias_lost(at(2, "mlp.linear_fc2")),
    "megatron-gate-and-up-swapped": rows_swapped(at(0, "mlp.linear_fc1"), slice(0, 96), slice(96, 192)),
    "key-heads-swapped": rows_swapped(at(3, "self_attn.k_proj"), slice(0, 32), slice(32, 64)),
    "projection-stale": stale(at(2, "self_attn.o_proj")),
    "activation": setting(at(3, "mlp"), "act_fn", torch.nn.GELU()),
    # vocabulary
    "embedding-stale": stale(lambda model: model.model.embed_tokens),
    "tied-head-stale": head_stale,
    # experts and routers
    "experts-swapped": expert(1, "gate_up_proj", 2, 5),
    "expert-stale": expert(2, "down_proj", 3),
    "megatron-experts-swapped": lambda model: swap_experts(layer(model, 3).mlp.experts, 0, 6),
    "router-not-normalised": setting(at(2, "mlp.gate"), "norm_topk_prob", False),
    "router-one-less": setting(at(1, "mlp.gate"), "top_k", 1),
    "router-bias-lost": zeroed(at(2, "mlp.gate"), "e_score_correction_bias"),
    "router-scale": setting(at(1, "mlp.gate"), "routed_scaling_factor", 1.0),
    "router-rounded": bfloat16_router,
    "shared-expert-lost": zeroed(at(3, "mlp.shared_experts.down_proj"), "weight"),
    # one of two ranks
    "second-rank-projection-stale": on_second_rank(stale(at(1, "self_attention.linear_proj"))),
    "second-rank-norm-stale": on_second_rank(stale(at(2, "input_layernorm"))),
    "second-rank-values-stale": on_second_rank(lambda model: noised(
        layer(model, 3).self_attention.linear_qkv.weight[-32:])),
    # the backward pass alone
    "gradient-of-norm": halved_gradient(at(2, "post_attention_layernorm")),
    "gradient-of-values": halved_gradient(at(1, "self_attn.o_proj")),
}
