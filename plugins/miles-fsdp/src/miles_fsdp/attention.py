"""Attention of packed samples by their boundaries, as one of transformers' attention functions: no mask is ever made.

On a GPU in 16 bits it is the flash attention that torch brings, over sequences of varying length; elsewhere
scaled_dot_product_attention of one sample after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from miles_local.transfer import on_device
from transformers import AttentionInterface, PreTrainedModel

from miles_core.errors import ConfigError
from miles_fsdp.context import ALONE, Context

PACKED, NAME = "packed", "miles_packed"
"""The value of --attn-implementation, and what it is called in transformers."""
LARGEST_HEAD = 256
"""Of the flash kernels."""
UNABLE = ("softcap", "s_aux", "position_bias")
"""What some architectures ask of an attention function and this one does not compute."""


@dataclass(slots=True)
class Boundaries:
    """Where the samples of the micro-batch lie whose layers compute now.

    All parts of a module know the same object, since arguments of a forward do not reach the attention of every
    architecture. It outlives the forward: a backward pass may compute layers again.

    Args:
        lengths: of the samples, which add up to the rows.
        context: the ranks that have the other rows.
        offsets: [samples + 1] int32 on the device, where each begins, and the end.
        attend: what computes attention in place of torch's, with the arguments of `flash`.
    """

    lengths: Sequence[int] = ()
    offsets: torch.Tensor | None = None
    context: Context = ALONE
    attend: Callable[..., torch.Tensor] | None = None

    def set(self, lengths: Sequence[int], device: torch.device, context: Context = ALONE) -> None:
        """For the next forward."""
        self.context = context
        self.lengths, self.offsets = lengths, on_device(np.cumsum([0, *lengths], dtype=np.int32), device)


def attend_by(model: PreTrainedModel, boundaries: Boundaries) -> bool:
    """Have a model's layers attend within these boundaries; whether its attention is of that kind.

    It is, where transformers says that flash attention computes it: causal, perhaps within a window, and no other mask.
    """
    if not (model._supports_flash_attn and model._can_set_attn_implementation()):
        return False
    for part in model.modules():
        cast("Any", part)._miles_boundaries = boundaries
    text, parts = model.config.get_text_config(), model.config.sub_configs
    own = [key for key in parts if getattr(model.config, key, None) is text]  # not a tower's
    model.set_attn_implementation(dict.fromkeys(own, NAME) if own else NAME)
    return True


def packed_attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None,
                     scaling: float | None = None, sliding_window: int | None = None, is_causal: bool | None = None,
                     **more: Any) -> tuple[torch.Tensor, None]:
    """
    Args:
        query: [1, heads, T, D] of this rank's rows; key, value: of perhaps fewer heads, and value with another D.
        sliding_window: how many rows each sees, itself among them; None: all before it in its sample.

    Returns:
        [1, T, heads, D of the values].

    Raises:
        ConfigError: the architecture asks for something else than causal attention.
    """
    odd = [name for name in UNABLE if more.get(name) is not None]
    if odd or is_causal is False or not getattr(module, "is_causal", True):
        raise ConfigError("the packed attention does not compute what this architecture asks of it",
                          got=", ".join(odd) or "attention that is not causal", code="fsdp-attention-unsupported",
                          who=f"--attn-implementation packed, {type(module).__name__}",
                          fix="--attn-implementation eager")
    if sliding_window is None and _slides(module):  # Qwen2-MoE tells its mask alone
        sliding_window = module.sliding_window
    bounds: Boundaries = module._miles_boundaries
    q, k, v = (one[0].transpose(0, 1).to(value.dtype) for one in (query, key, value))  # [T, heads, D]
    context = bounds.context
    if k.shape[1] % context.size:  # fewer of them than ranks: as many as there are queries
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    q, k, v = map(context.to_heads, (q, k, v))
    fits = max(q.shape[-1], v.shape[-1]) <= LARGEST_HEAD
    fused = v.is_cuda and v.dtype in (torch.bfloat16, torch.float16) and fits
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    attended = (bounds.attend or (flash if fused else _one_by_one))(q, k, v, bounds, scale, sliding_window)
    return context.to_rows(attended)[None], None


def _slides(module: Any) -> bool:
    """Whether this layer is one of those with a window, as the configuration lists them."""
    kinds = getattr(module.config, "layer_types", None)
    return kinds is not None and kinds[module.layer_idx] == "sliding_attention" and hasattr(module, "sliding_window")


def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Boundaries, scale: float,
          window: int | None) -> torch.Tensor:
    """The operator below torch.nn.attention.varlen, whose own parameters are others in each release."""
    size, longest = value.shape[-1], max(bounds.lengths)
    wide = -(-max(query.shape[-1], size) // 8) * 8  # the kernels want equal sizes of heads, in eights
    query, key, value = (one if one.shape[-1] == wide else F.pad(one, (0, wide - one.shape[-1]))
                         for one in (query, key, value))
    attended: torch.Tensor
    attended, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, bounds.offsets, bounds.offsets, longest, longest, 0.0, window is None, False, scale=scale,
        window_size_left=-1 if window is None else window - 1, window_size_right=0)
    return attended[..., :size]


def _one_by_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Boundaries, scale: float,
                window: int | None) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    whole = (one.transpose(0, 1) for one in (query, key, value))
    attended = []
    for q, k, v in zip(*(one.split(list(bounds.lengths), 1) for one in whole), strict=True):
        mask, length = None, q.shape[1]
        if window is not None and window < length:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        attended.append(F.scaled_dot_product_attention(q[None], k[None], v[None], mask, is_causal=mask is None,
                                                       scale=scale)[0])
    return torch.cat(attended, 1).transpose(0, 1)


# No compiled layer goes into it: lengths differ from batch to batch, and each would be compiled anew.
AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))
# Without a function for masks under the name transformers makes none, and does not ask the device about positions.
