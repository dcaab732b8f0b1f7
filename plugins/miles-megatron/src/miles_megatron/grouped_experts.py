"""A rank's experts in one matrix product each way, and a dispatcher that sorts tokens once.

The products are torch's grouped ones: rows of experts side by side, weights [E, N, K] in one tensor, and how many rows
an expert has as numbers on the device. No expert is a kernel of its own, its gradient is no tensor of its own, and
nothing waits for the device: layers of 64 experts or 128 took most of their time in Python.

Parameters stay what they are, one for each expert under its name; weight map, checkpoints, optimizer and syncs see no
difference. They are only laid out side by side, in their own storage and in those that Megatron's DDP gives parameters
and gradients, and the product reads and writes all of them as one view. Where they do not lie like that, or a layer's
forward is not its own (adapters, fake quantisation, hooks), experts are computed as Megatron does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from miles_megatron import cpu
from miles_megatron.stacks import as_one

cpu.install()

from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402 - after install()
from megatron.core.transformer.moe.moe_utils import permute, unpermute  # noqa: E402
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher  # noqa: E402


class Stack(NamedTuple):
    """The weights of one layer of all experts, and what their gradients are added to.

    Args:
        weights: [E, N, K].
        gradients: [E, N, K], None where nothing is trained.
        first: the first expert's parameter; the product hangs on it in the graph, and so has a backward pass.
    """

    weights: torch.Tensor
    gradients: torch.Tensor | None
    first: torch.nn.Parameter


def lay_side_by_side(linear: torch.nn.Module) -> None:
    """One storage for the parameters of a layer that has one per expert.

    They are registered last expert first: Megatron's DDP fills its buffers from a model's last parameter to its first.
    """
    names = [name for name in linear._parameters if name.startswith("weight")]
    parameters = [linear._parameters.pop(name) for name in names]
    together = torch.stack([parameter.detach() for parameter in parameters])
    for parameter, place in zip(parameters, together, strict=True):
        parameter.data = place
    for name, parameter in reversed(list(zip(names, parameters, strict=True))):
        linear._parameters[name] = parameter


def stacked(linear: torch.nn.Module, experts: int) -> Stack | None:
    """The layer's weights as one tensor, or None where it has to be called itself."""
    called = linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear)
    parameters = [linear._parameters.get(f"weight{number}") for number in range(experts)]
    if called or getattr(linear, "use_bias", False) or any(one is None for one in parameters):
        return None
    weights, gradients = as_one(parameters), None
    if weights is not None and torch.is_grad_enabled() and parameters[0].requires_grad:
        buffers = [getattr(parameter, "main_grad", None) for parameter in parameters]
        gradients = None if any(one is None for one in buffers) else as_one(buffers)
        if gradients is None:
            return None
    return None if weights is None else Stack(weights, gradients, parameters[0])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ends, first, weights, gradients):
        ctx.save_for_backward(x, ends)
        ctx.weights, ctx.gradients = weights, gradients
        return torch._grouped_mm(x, weights.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx, grad):
        x, ends = ctx.saved_tensors
        grad = grad.contiguous()
        if ctx.gradients is not None:
            ctx.gradients.add_(torch._grouped_mm(grad.t(), x, offs=ends))
        to_x = torch._grouped_mm(grad, ctx.weights, offs=ends) if ctx.needs_input_grad[0] else None
        return to_x, None, None, None, None


def product(x: torch.Tensor, ends: torch.Tensor, stack: Stack) -> torch.Tensor:
    """Rows of x times their expert's weights; backward adds the weights' gradient to `stack.gradients`.

    Args:
        x: [R, K], the rows of expert 0, then of expert 1 and so on.
        ends: [E] int32, where each expert's rows end.

    Returns:
        [R, N].
    """
    return _Product.apply(x, ends, stack.first, stack.weights, stack.gradients)


class GroupedExperts:
    """Mixed into Megatron's TEGroupedMLP, whose layers have a parameter per expert.

    Called with probabilities it multiplies what lies between the layers by them, as Megatron does; without, the caller
    weighs what comes out (SortedOnce).
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for linear in (self.linear_fc1, self.linear_fc2):
            lay_side_by_side(linear)

    def stacks(self) -> tuple[Stack, Stack] | None:
        """Of both layers, or None where Megatron's own forward has to be taken."""
        config = self.config
        other = (config.fp8 or config.fp4 or config.add_bias_linear or config.moe_apply_probs_on_input
                 or config.no_sync_func is not None  # DDP waits for every parameter's own gradient
                 or self.activation_recompute or self.offload_expert_fc1 or self.offload_moe_act)
        if other or config.params_dtype == torch.float32 and not cpu.no_cuda():
            return None
        first = stacked(self.linear_fc1, self.num_local_experts)
        second = stacked(self.linear_fc2, self.num_local_experts) if first is not None else None
        return None if first is None or second is None else (first, second)

    def forward(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs):
        """[R, H], rows of each expert [E], probabilities [R] or None -> ([R, H], None)."""
        x, stacks = permuted_local_hidden_states, self.stacks()
        if stacks is None:
            return super().forward(x, tokens_per_expert, permuted_probs)
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32).to(x.device, non_blocking=True)
        inner = self.activation_func(product(x, ends, stacks[0]))
        if permuted_probs is not None:
            inner = (inner * permuted_probs.unsqueeze(-1)).to(inner.dtype)
        return product(inner, ends, stacks[1]), None


class SortedOnce(MoEAlltoAllTokenDispatcher):
    """Of a rank that has all experts: one sort there and one back, which weighs as it adds; counts stay on the device.

    Megatron's sorts rows twice, multiplies them by their probabilities apart, and waits for the counts.
    """

    experts: GroupedExperts
    counts: torch.Tensor | None = None

    def dispatch_preprocess(self, hidden_states, routing_map, probs):
        """[S, B, H], [T, E], [T, E] -> ([T k, H], None); Megatron's where experts are called one by one."""
        self.counts = None
        if self.experts.stacks() is None:
            return super().dispatch_preprocess(hidden_states, routing_map, probs)
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        self.counts = routing_map.sum(0)
        sorted_rows, _, self.back = permute(rows, routing_map, fused=self.config.moe_permute_fusion,
                                            num_out_tokens=len(rows) * self.config.moe_router_topk)
        return sorted_rows, None

    def token_dispatch(self, rows, probs):
        """There is nobody to send them to."""
        return (rows, probs) if self.counts is not None else super().token_dispatch(rows, probs)

    def dispatch_postprocess(self, rows, probs):
        """They are sorted."""
        return (rows, self.counts, None) if self.counts is not None else super().dispatch_postprocess(rows, probs)

    def combine_preprocess(self, rows):
        """They stay sorted."""
        return rows if self.counts is not None else super().combine_preprocess(rows)

    def token_combine(self, rows, *args, **kwargs):
        """They are here."""
        return rows if self.counts is not None else super().token_combine(rows, *args, **kwargs)

    def combine_postprocess(self, rows):
        """[T k, H] -> [S, B, H], each row by its probability."""
        if self.counts is None:
            return super().combine_postprocess(rows)
        shape = torch.Size([self.probs.shape[0], self.hidden_shape[-1]])
        whole = unpermute(rows, self.back, shape, probs=self.probs, routing_map=self.routing_map,
                          fused=self.config.moe_permute_fusion)
        self.counts = self.back = self.probs = self.routing_map = None
        return whole.view(self.hidden_shape)


def sort_once(model: torch.nn.Module) -> None:
    """Put a SortedOnce in the place of dispatchers that have nothing to exchange and no rows to drop or to pad."""
    for layer in model.modules():
        if not isinstance(layer, MoELayer) or not isinstance(layer.experts, GroupedExperts):
            continue
        theirs, config = layer.token_dispatcher, layer.config
        alone = type(theirs) is MoEAlltoAllTokenDispatcher and theirs.ep_size == theirs.tp_size == 1
        dropping = config.moe_expert_capacity_factor is not None or config.moe_router_padding_for_quantization
        if alone and not dropping and not layer.shared_expert_overlap:
            # The same object under another class: its groups, and what plugins may have kept of it, stay.
            theirs.__class__, theirs.experts = SortedOnce, layer.experts
