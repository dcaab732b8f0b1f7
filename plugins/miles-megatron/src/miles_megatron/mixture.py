"""A shared description of MLPs and of mixtures of them, for the families that have experts. No torch here.

A family says how its router scores and what its checkpoint calls the tensors; constants of Megatron's config and rules
of the weight map follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from miles_core.errors import ConfigError
from miles_megatron.specs import Rule

_OURS, _THEIRS = "decoder.layers.{layer}.mlp.", "model.layers.{layer}."


@dataclass(frozen=True, slots=True)
class Names:
    """What a checkpoint calls the tensors of a layer's mixture; {expert} counts from 0.

    Args:
        router, bias: the router's matrix, and what is added to scores for the choice alone.
        gate, up, down: of an expert.
        shared, shared_parts: prefix of the MLP that all tokens pass, and what follows of its gate, up and down.
        shared_gate: the vector whose product with a token gates that MLP; None where it always counts in full.
        latent_down, latent_up: the matrices to the latent that experts see, and back.
    """

    router: str = "mlp.gate.weight"
    bias: str = "mlp.gate.e_score_correction_bias"
    gate: str = "mlp.experts.{expert}.gate_proj.weight"
    up: str = "mlp.experts.{expert}.up_proj.weight"
    down: str = "mlp.experts.{expert}.down_proj.weight"
    shared: str = "mlp.shared_experts."
    shared_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_gate: str | None = None
    latent_down: str = "mlp.fc1_latent_proj.weight"
    latent_up: str = "mlp.fc2_latent_proj.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """The mixtures of one checkpoint: MLPs of which a router chooses some for every token.

    Args:
        layers: of the whole model.
        sparse: the layers that have one; the others have one dense MLP.
        experts, chosen: how many there are, and how many a token passes.
        width: inner channels of an expert; shared: of the MLP that all tokens pass beside them, 0 for none.
        latent: channels that a token is projected to before the experts, and back from after them (Nemotron 3 Super);
            the router and the shared MLP see the token itself. None for no such projections.
        score: "softmax" or "sigmoid" of the router's products.
        normalised: the weights of a token's experts add up to 1.
        bias: the choice is by score + bias, the weights are by the score (DeepSeek-V3, arXiv:2412.19437, 2.1.2).
        groups, of_groups: experts lie in so many groups, of which the best are chosen first, by the sum of their two
            best scores; 1 for no groups.
        scale: factor on the weights.
        gated: whether MLPs have a gate; without one they have two matrices.
        names: of the tensors.
    """

    layers: int
    sparse: tuple[int, ...]
    experts: int
    chosen: int
    width: int
    shared: int = 0
    latent: int | None = None
    score: str = "softmax"
    normalised: bool = True
    bias: bool = False
    groups: int = 1
    of_groups: int = 1
    scale: float = 1.0
    gated: bool = True
    names: Names = Names()

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: a router that Megatron's would compute otherwise.
        """
        problems = {
            "sigmoid scores that are not normalised": self.score == "sigmoid" and not self.normalised
            and self.chosen > 1,
            "a normalised score of a single expert": self.score == "sigmoid" and self.normalised and self.chosen == 1,
            "a bias on softmax scores": self.bias and self.score != "sigmoid",
            f"{self.chosen} experts out of {self.of_groups} groups (Megatron ranks groups by their best "
            f"{self.chosen // self.of_groups})": self.groups > 1 and self.chosen // self.of_groups != 2,
        }
        for what, present in problems.items():
            if present:
                raise ConfigError(f"a router with {what} is not supported", who="the checkpoint's config.json",
                                  fix="use another checkpoint: Megatron's router would select or weight experts "
                                      "differently", code="router-unsupported")

    @property
    def constants(self) -> dict[str, object]:
        """Fields of TransformerConfig that the checkpoint fixes."""
        grouped = self.groups > 1
        return {
            "num_moe_experts": self.experts,
            "moe_router_topk": self.chosen,
            "moe_ffn_hidden_size": self.width,
            "moe_layer_freq": [int(layer in self.sparse) for layer in range(self.layers)],
            # softmax then top-k leaves the probabilities as they are; top-k then softmax normalises them
            "moe_router_pre_softmax": self.score == "softmax" and not self.normalised,
            "moe_router_score_function": self.score,
            "moe_router_enable_expert_bias": self.bias,
            "moe_router_num_groups": self.groups if grouped else None,
            "moe_router_group_topk": self.of_groups if grouped else None,
            "moe_router_topk_limited_devices": None,  # groups again, as many as there are expert-parallel ranks
            "moe_router_topk_scaling_factor": self.scale if self.scale != 1 else None,
            "moe_shared_expert_intermediate_size": self.shared or None,
            "moe_shared_expert_gate": self.names.shared_gate is not None,
            "moe_latent_size": self.latent,
        }

    @property
    def defaults(self) -> dict[str, object]:
        """Fields that a run may change: routing in fp32, no load balancing."""
        return {"moe_router_dtype": "fp32", "moe_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.0}

    @property
    def also(self) -> dict[str, tuple[object, ...]]:
        """Options that say the same in other words; see ModelSpec."""
        options = {"moe_router_pre_softmax": (True, False)} if self.score == "sigmoid" else {}
        if self.groups == 1:
            options |= {"moe_router_num_groups": (1,), "moe_router_group_topk": (1,)}
        return options if self.scale != 1 else {**options, "moe_router_topk_scaling_factor": (1.0,)}

    def rules(self) -> tuple[Rule, ...]:
        """Of the MLPs of all layers."""
        dense = tuple(layer for layer in range(self.layers) if layer not in self.sparse)
        return (*(dense_mlp(dense) if dense else ()), *self.sparse_rules())

    def sparse_rules(self) -> Iterator[Rule]:
        """Of the mixtures alone."""
        names, experts = self.names, _OURS + "experts.local_experts.{expert}."

        def one(ours: str, theirs: str) -> Rule:
            return Rule(_OURS + ours, (_THEIRS + theirs,), layers=self.sparse)

        yield one("router.weight", names.router)
        if self.bias:
            yield one("router.expert_bias", names.bias)
        first, join = ((names.gate, names.up), "rows") if self.gated else ((names.up,), "same")
        yield Rule(experts + "linear_fc1.weight", tuple(_THEIRS + name for name in first), join, self.sparse,
                   self.experts)
        yield Rule(experts + "linear_fc2.weight", (_THEIRS + names.down,), "same", self.sparse, self.experts)
        if self.shared:
            *first, last = names.shared_parts[not self.gated:]
            parts = tuple(f"{_THEIRS}{names.shared}{part}.weight" for part in first)
            yield Rule(_OURS + "shared_experts.linear_fc1.weight", parts, join, self.sparse)
            yield one("shared_experts.linear_fc2.weight", f"{names.shared}{last}.weight")
        if self.latent is not None:
            yield one("fc1_latent_proj.weight", names.latent_down)
            yield one("fc2_latent_proj.weight", names.latent_up)
        if names.shared_gate is not None:
            yield one("shared_experts.gate_weight", names.shared_gate)


def after(layers: int, dense: int) -> tuple[int, ...]:
    """The sparse layers of a model whose first ones are dense (config.json's first_k_dense_replace)."""
    return tuple(range(min(dense, layers), layers))


def dense_mlp(layers: tuple[int, ...], fused: bool = False, bias: bool = False) -> tuple[Rule, ...]:
    """Rules of one gated MLP per layer."""
    theirs = f"{_THEIRS}mlp."
    first, join = (("gate_up_proj",), "halves") if fused else (("gate_proj", "up_proj"), "rows")
    kinds = ("weight", "bias") if bias else ("weight",)
    return tuple(
        rule
        for kind in kinds
        for rule in (
            Rule(f"{_OURS}linear_fc1.{kind}", tuple(f"{theirs}{name}.{kind}" for name in first), join, layers),
            Rule(f"{_OURS}linear_fc2.{kind}", (f"{theirs}down_proj.{kind}",), layers=layers),
        )
    )
