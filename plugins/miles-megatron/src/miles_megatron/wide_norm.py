"""A norm over all heads of a projection, which tensor parallelism cuts by heads."""

from __future__ import annotations

import torch
import torch.distributed as dist

from miles_megatron import cpu

cpu.install()

from megatron.core import parallel_state  # noqa: E402 - after install()
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # noqa: E402


class _WideRMSNorm(torch.autograd.Function):
    """x [..., h], weight [h] of this rank's channels -> x / rms(all channels) * weight, statistics in fp32."""

    @staticmethod
    def forward(ctx, x, weight, eps, group):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        ctx.channels, ctx.group = x.shape[-1] * group.size(), group
        scale = (_summed((wide * wide).sum(-1, keepdim=True), group) / ctx.channels).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        grad, normed = grad.to(scale.dtype), x * scale
        product, gain = normed * grad, weight.to(scale.dtype)
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        # d x = (gain * grad - normed * mean(gain * grad * normed)) / rms; the mean is over the channels of all ranks
        along = _summed((product @ gain).unsqueeze(-1), ctx.group) / ctx.channels
        grad_x = torch.mul(grad, gain).addcmul_(normed, along, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None, None


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if group.size() > 1:
        dist.all_reduce(x, group=group)
    return x


class WideNorm(torch.nn.Module):
    """RMSNorm over all heads together; in a layer spec the norm of q or of k.

    Args:
        hidden_size: channels of a head.
        heads: of the whole model.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, *, heads: int):
        super().__init__()
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.eps = eps
        mine = heads // self.group.size() * hidden_size
        self.weight = torch.nn.Parameter(torch.ones(mine, dtype=config.params_dtype))
        self.weight.tensor_model_parallel, self.weight.partition_dim, self.weight.partition_stride = True, 0, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n, d] of this rank's n heads -> the same."""
        return _WideRMSNorm.apply(x.flatten(-2), self.weight, self.eps, self.group).unflatten(-1, x.shape[-2:])

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Megatron's protocol: the weight is cut among tensor-parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets, tp_group=self.group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )  # fmt: skip
