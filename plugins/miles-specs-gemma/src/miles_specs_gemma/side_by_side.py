"""A dense MLP and experts side by side, each between norms of its own, and a router that norms what it sees."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from miles_megatron import cpu

cpu.install()

from megatron.core.transformer import ModuleSpec, TransformerConfig  # noqa: E402 - after install()
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402

# Megatron's layer warns of a mixture of another class, to which it does not pass the groups that are the default.
logging.getLogger("megatron.core.transformer.transformer_layer").addFilter(
    lambda record: not record.getMessage().startswith("Unknown MLP type"))  # fmt: skip

Norm = Callable[..., torch.nn.Module]
"""As LayerModules.norm of module_specs.py."""


def reshape(config: TransformerConfig, layer: ModuleSpec, attention: Any, sparse: bool, modules: Any) -> None:
    """A layer with experts gets `SideBySide` and `NormedRouter`; see ModelSpec.reshape."""
    if not sparse:
        return
    inside = layer.submodules
    inside.pre_mlp_layernorm = IdentityOp
    mixture = inside.mlp.submodules
    mixture.router = functools.partial(NormedRouter, norm=modules.norm)
    inside.mlp = ModuleSpec(module=SideBySide, params={"norm": modules.norm}, submodules=mixture)


class SideBySide(MoELayer):
    """Megatron's mixture, whose shared experts are the dense MLP. It sees the residual without a norm.

    h -> norm(dense(norm(h))) + norm(experts(norm(h))), and the router sees h.
    """

    def __init__(self, config: TransformerConfig, *args: Any, norm: Norm, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.before_dense, self.after_dense, self.before_experts, self.after_experts = (
            norm(config, config.hidden_size, config.layernorm_epsilon) for _ in range(4))

    def shared_experts_compute(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, b, H] -> [T, b, H] of the dense MLP and the norms around it."""
        output: torch.Tensor = self.after_dense(super().shared_experts_compute(self.before_dense(hidden_states)))
        return output

    def preprocess(self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> Any:
        """Tokens [T, b, H], normed, as they are sent to the experts."""
        return super().preprocess(self.before_experts(hidden_states), probs, routing_map)

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor) -> torch.Tensor:
        """[T, b, H] of the experts, normed, and of the dense MLP."""
        experts: torch.Tensor = self.after_experts(super().postprocess(output, None))
        return experts + shared_expert_output


class NormedRouter(TopKRouter):
    """Megatron's, of tokens divided by their root mean square and by the root of their width, times a vector.

    The weights of a token's experts add up to 1 before each is multiplied with a number of its expert.
    """

    def __init__(self, config: TransformerConfig, *args: Any, norm: Norm, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)
        scale: Any = torch.nn.Parameter(torch.ones(config.num_moe_experts, dtype=config.params_dtype))
        scale.sequence_parallel = config.sequence_parallel
        self.expert_scale = scale

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """[T, b, H] -> [T, b, experts]."""
        logits: torch.Tensor = super().gating(self.norm(input) * self.config.hidden_size**-0.5)
        return logits

    def routing(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T x b, experts], 0 of those that are not chosen, and which are."""
        weights, chosen = super().routing(*args, **kwargs)
        return weights * self.expert_scale.to(weights.dtype), chosen
